"""The kernel of the hash (hook/swap/piece_hash.ptx) computes what the simulated GPU does, as its PTX says."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path

import pytest

import cython_ext
from cython_ext.testing.bindings_memory import hash_of_piece

KERNEL = Path(cython_ext.__file__).parent / "hook" / "swap" / "piece_hash.ptx"
LANES, WARP = 256, 32
WORDS = (2 << 20) // 8
PART_WORDS = WORDS // 64
MASK = {32: 2**32 - 1, 64: 2**64 - 1}
NUMBER = 3
"""Of the block: it hashes the piece at that place of its table."""
PLACES = [(9 - number) << 40 for number in range(5)]
RESULTS = 1 << 50
"""Where the hashes go."""
Values = list[int]


class Block:
    """Threads of one block in step: each register has a value for each lane."""

    def __init__(self, text: str, words: list[int]) -> None:
        body = re.sub(r"//[^\n]*", "", text[text.index("{\n") + 1 : text.rindex("}")])
        lines = [line.strip() for line in body.replace(":", ":;").split(";")]
        self.code = [line for line in lines if line and not line.startswith(".")]
        self.labels = {line[:-1]: at for at, line in enumerate(self.code) if line.endswith(":")}
        self.words, self.stored = words, dict[int, int]()
        self.shared: dict[int, int] = {}
        self.shared_bytes = int(re.findall(r"\.shared .*\[(\d+)\]", text)[0])
        self.unpublished: dict[int, int] = {}
        """Shared words that no barrier has passed yet."""
        self.active = list(range(LANES))
        self.registers: dict[str, Values] = {"%ctaid.x": [NUMBER] * LANES, "%tid.x": list(range(LANES))}
        self.registers |= {"addresses": [0] * LANES, "results": [-8] * LANES, "sums": [0] * LANES}
        self.at = 0

    def run(self) -> tuple[int, ...]:
        while self.active:
            line = self.code[self.at]
            self.at += 1
            if not line.endswith(":"):
                self.step(line)
        result = RESULTS + 24 * NUMBER
        assert sorted(self.stored) == [result, result + 8, result + 16]
        return tuple(self.stored[place] for place in sorted(self.stored))

    def step(self, line: str) -> None:
        guard, line = re.fullmatch(r"(?:@(!?%p\d+) )?(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        lanes = self.active
        if guard:
            wanted, taken = guard[0] != "!", self.registers[guard.lstrip("!")]
            lanes = [lane for lane in lanes if bool(taken[lane]) == wanted]
        name, _, rest = line.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest)
        kind = name.split(".")
        if kind[0] == "ret":
            self.active = []
        elif kind[0] == "bra":
            if lanes == self.active:
                self.at = self.labels[operands[0]]
            elif lanes:  # they go to the end of the kernel
                assert operands[0] == "done"
                self.active = [lane for lane in self.active if lane not in set(lanes)]
        elif kind[0] == "bar":
            assert kind[1:] == ["sync"]
            assert len(self.active) == LANES
            self.shared |= self.unpublished
        elif kind[0] in {"ld", "st"}:
            self.access(kind, operands, lanes)
        else:
            assert not guard
            self.compute(kind, operands)

    def values(self, operand: str) -> Values:
        if operand.startswith("{"):
            low, high = (self.values(part.strip()) for part in operand[1:-1].split(","))
            return [a | b << 32 for a, b in zip(low, high, strict=True)]
        if operand in self.registers:
            return self.registers[operand]
        return [int(operand, 0)] * LANES

    def assign(self, operand: str, values: Values) -> None:
        if operand.startswith("{"):
            low, high = (part.strip() for part in operand[1:-1].split(","))
            self.registers[low] = [value & MASK[32] for value in values]
            self.registers[high] = [value >> 32 for value in values]
        else:
            self.registers[operand] = values

    def compute(self, kind: list[str], operands: list[str]) -> None:
        target, *sources = operands
        given = [self.values(source) for source in sources]
        bits = 64 if kind[-1].endswith("64") else 32
        first = given[0]
        second = given[1] if len(given) > 1 else first
        pairs = zip(first, second, strict=True)
        match kind[0]:
            case "mov" | "cvta" | "cvt":
                found = first
            case "add":
                found = [(a + b) & MASK[bits] for a, b in pairs]
            case "sub":
                found = [(a - b) & MASK[bits] for a, b in pairs]
            case "mul":
                assert kind[1:] in (["lo", "u64"], ["wide", "u32"])
                found = [(a * b) & MASK[64] for a, b in pairs]
            case "xor":
                found = [a ^ b for a, b in pairs]
            case "or":
                found = [a | b for a, b in pairs]
            case "and":
                found = [a & b for a, b in pairs]
            case "shr":
                found = [a >> b for a, b in pairs]
            case "shl":
                found = [a << b & MASK[bits] for a, b in pairs]
            case "setp":
                assert kind[1] == "ne"
                found = [int(a != b) for a, b in pairs]
            case "selp":
                found = [a if p else b for a, b, p in zip(*given, strict=True)]
            case "shfl":
                assert kind[1:3] == ["sync", "down"]
                found = [first[lane + by if lane % WARP + by < WARP else lane] for lane, by in enumerate(second)]
            case other:
                raise NotImplementedError(other)
        self.assign(target, found)

    def access(self, kind: list[str], operands: list[str], lanes: list[int]) -> None:
        where, what = operands if kind[0] == "st" else operands[::-1]
        base, _, offset = where[1:-1].partition("+")
        places = [value + int(offset or 0) for value in self.values(base)]
        names = [part.strip() for part in what.strip("{}").split(",")]
        for number, name in enumerate(names):
            at = [place + 8 * number for place in places]
            if kind[0] == "ld":
                read = {"param": self.parameter, "global": self.word, "shared": self.shared_word}[kind[1]]
                self.registers[name] = [read(place) for place in at]
            else:
                for lane in lanes:
                    self.store(kind[1], at[lane], self.registers[name][lane])

    def parameter(self, at: int) -> int:
        return RESULTS if at == -8 else PLACES[at // 8]

    def word(self, at: int) -> int:
        return self.words[(at - PLACES[NUMBER]) // 8]

    def shared_word(self, at: int) -> int:
        return self.shared[at]

    def store(self, space: str, at: int, value: int) -> None:
        if space == "shared":
            assert 0 <= at <= self.shared_bytes - 8
            self.unpublished[at] = value
        else:
            self.stored[at] = value


def computed(words: list[int]) -> tuple[int, ...]:
    return Block(KERNEL.read_text(), words).run()


def expected(words: list[int]) -> tuple[int, int, int]:
    return hash_of_piece(memoryview(bytearray(struct.pack(f"<{WORDS}Q", *words))).cast("B").cast("Q"))


def noise(seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.getrandbits(64) for _ in range(WORDS)]


def row(part: int) -> list[int]:
    """A piece with one word that is not 0, in that part: the first, the last, or another one."""
    words = [0] * WORDS
    words[part * PART_WORDS + {0: 0, 63: PART_WORDS - 1}.get(part, 7 * part * 61 % PART_WORDS)] = 1 << part
    return words


def test_it_finds_a_word_wherever_a_thread_reads_it() -> None:
    """One word in each part: of each of the 16 that a thread reads in a round, and of 64 threads."""
    words = [0] * WORDS
    for part in range(64):
        vector, lane = part % 8, (37 * part + 11) % LANES
        words[part * PART_WORDS + 2 * LANES * vector + 2 * lane + part // 8 % 2] = 1 << part
    assert computed(words) == expected(words)
    assert expected(words)[2] == MASK[64]


@pytest.mark.parametrize("part", [None, 0, 29, 63])
def test_it_computes_the_hash_and_the_parts_that_are_not_zeros(part: int | None) -> None:
    words = [0] * WORDS if part is None else row(part)
    assert computed(words) == expected(words)
    assert expected(words)[2] == (0 if part is None else 1 << part)


def test_it_computes_the_hash_of_noise_with_parts_of_zeros() -> None:
    words, zeros = noise(1), [1, 2, 31, 32, 33, 62]
    for part in zeros:
        words[part * PART_WORDS : (part + 1) * PART_WORDS] = [0] * PART_WORDS
    assert computed(words) == expected(words)
    assert expected(words)[2] == MASK[64] & ~sum(1 << part for part in zeros)
