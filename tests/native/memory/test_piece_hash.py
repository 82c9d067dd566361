"""The hash by which a piece of memory is known to be as it was (logic/memory/piece_hash.pxd)."""

from __future__ import annotations

import random
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.testing.bindings_memory import hash_of_piece, parts_to_copy, runs_of_parts

WORDS, PARTS = 4096, 64
MASK = 2**64 - 1
words_of_a_piece = st.integers(0, WORDS - 1)


def piece(seed: int) -> list[int]:
    """Noise; zeros; or words that differ in their upper bits alone."""
    noise = random.Random(seed)
    return [noise.getrandbits(64) if seed % 3 == 0 else 0 if seed % 3 == 1 else i << 60 & MASK for i in range(WORDS)]


def hash_of(words: list[int]) -> tuple[int, int, int]:
    return hash_of_piece(memoryview(bytearray(struct.pack(f"<{len(words)}Q", *words))).cast("B").cast("Q"))


def hashed(words: list[int]) -> tuple[int, int]:
    return whole_hash(words)[:2]


def whole_hash(words: list[int]) -> tuple[int, int, int]:
    assert len(words) == WORDS
    return hash_of(words)


def vector(a: int, b: int, x: int, y: int) -> tuple[int, int]:
    return step(*step(a, b, x, y), 0, 0)


def step(a: int, b: int, x: int, y: int) -> tuple[int, int]:
    a = (a ^ x) * 0x9E3779B97F4A7C15 & MASK
    a ^= a >> 32
    b = (b ^ y) * 0xC2B2AE3D27D4EB4F & MASK
    b ^= b >> 32
    a = a + b & MASK
    return a, b ^ (a << 24 & MASK | a >> 40)


def reference(words: list[int]) -> tuple[int, int]:
    total_a = total_b = 0
    for lane in range(256):
        a = lane * 0x9E3779B97F4A7C15 & MASK ^ 0x243F6A8885A308D3
        b = lane * 0xC2B2AE3D27D4EB4F & MASK ^ 0x13198A2E03707344
        for at in range(2 * lane, WORDS, 512):
            a, b = vector(a, b, words[at], words[at + 1])
        for _ in range(3):
            a, b = step(a, b, lane, lane)
        total_a, total_b = total_a + a & MASK, total_b + b & MASK
    return total_a, total_b


@given(st.integers(0, 2**32))
def test_it_is_what_its_description_says(seed: int) -> None:
    assert hashed(piece(seed)) == reference(piece(seed))


@given(st.integers(0, 2**32), st.lists(st.tuples(words_of_a_piece, st.integers(1, MASK)), min_size=1, max_size=4))
def test_a_piece_that_has_changed_has_another_hash(seed: int, changes: list[tuple[int, int]]) -> None:
    before = piece(seed)
    after = list(before)
    for at, change in changes:
        after[at] ^= change
    assert (hashed(after) == hashed(before)) == (after == before)


@given(st.integers(0, 2**32), words_of_a_piece, words_of_a_piece, st.integers(0, 63))
def test_the_same_bit_of_two_words_does_not_cancel(seed: int, one: int, other: int, bit: int) -> None:
    before = piece(seed)
    after = list(before)
    after[one] ^= 1 << bit
    after[other] ^= 1 << bit
    assert (hashed(after) == hashed(before)) == (one == other)


TOPS = 1 << 63 | 1 << 31
SECONDS = 1 << 62 | 1 << 30


@pytest.mark.parametrize("base", [0, 1], ids=["noise", "zeros"])
@pytest.mark.parametrize(
    ("one", "next_one"),
    [
        ((0, 1 << 63), (TOPS, 0)),
        ((1 << 63, 0), (TOPS, TOPS)),
        ((1 << 63, 1 << 63), (0, TOPS)),
        ((0, 1 << 62), (SECONDS, 0)),
    ],
    ids=["sign of the last float", "of the second", "of both", "two instead of zero"],
)
def test_changes_of_high_bits_in_two_vectors_of_a_lane_do_not_cancel(
    base: int, one: tuple[int, int], next_one: tuple[int, int]
) -> None:
    """Of floats, signs and powers of two. With one step after a vector, a half or an eighth of these did."""
    before = piece(base)
    unchanged = hashed(before)
    for at in range(0, WORDS - 512, 2):
        after = list(before)
        for place, change in ((at, one), (at + 512, next_one)):
            after[place] ^= change[0]
            after[place + 1] ^= change[1]
        assert hashed(after) != unchanged, at


def test_a_dense_change_and_four_signs_do_not_cancel() -> None:
    """With a rotation by 32 bits they did, in this place of a piece of ones and in six others."""
    before = [0x3F803F803F803F80] * (139 * 512)
    after, at = list(before), 137 * 512 + 2 * 212
    for place, change in ((at, 1 << 63), (at + 1, 0x0B495A2880000000), (at + 512, TOPS), (at + 513, TOPS)):
        after[place] ^= change
    assert hash_of(after)[:2] != hash_of(before)[:2]


@given(st.dictionaries(words_of_a_piece, st.integers(0, 63)))
def test_only_parts_of_zeros_have_no_bit(bits: dict[int, int]) -> None:
    words = [0] * WORDS
    for at, bit in bits.items():
        words[at] = 1 << bit
    part_words = WORDS // PARTS
    assert whole_hash(words)[2] == sum(1 << part for part in {at // part_words for at in bits})


def members(parts: int) -> set[int]:
    return {part for part in range(PARTS) if parts >> part & 1}


def test_which_parts_are_copied() -> None:
    assert parts_to_copy(0) == 0
    assert parts_to_copy(MASK) == MASK
    assert members(parts_to_copy(0b10001)) == set(range(5)), "three parts are no gap"
    assert members(parts_to_copy(0b100001)) == {0, 5}, "four are"
    assert members(parts_to_copy(1 << 60)) == {60, 61, 62, 63}


@given(st.sets(st.integers(0, PARTS - 1)))
def test_what_is_copied_has_all_parts_and_only_gaps_that_are_worth_it(parts: set[int]) -> None:
    copied = members(parts_to_copy(sum(1 << part for part in parts)))
    assert parts <= copied
    runs = runs_of_parts(sum(1 << part for part in copied))
    assert {part for first, count in runs for part in range(first, first + count)} == copied
    for (first, count), (behind, _) in pairwise(runs):
        assert behind - (first + count) >= 4
    for part in copied - parts:
        around = [part - near for near in range(1, 4)]
        assert parts & set(around), "it is at most three parts behind one that is not zeros"
        assert part > PARTS - 4 or parts & {part + near for near in range(1, 4)}


@given(st.integers(0, MASK))
def test_runs_of_parts_are_as_long_as_they_can_be(parts: int) -> None:
    runs = runs_of_parts(parts)
    assert sum(((1 << count) - 1) << first for first, count in runs) == parts
    for (first, count), (behind, _) in pairwise(runs):
        assert first + count < behind


@given(st.integers(0, 2**32), words_of_a_piece, words_of_a_piece)
def test_words_that_change_places_change_the_hash(seed: int, one: int, other: int) -> None:
    before = piece(seed)
    after = list(before)
    after[one], after[other] = before[other], before[one]
    assert (hashed(after) == hashed(before)) == (after == before)


@given(st.integers(0, 2**32), words_of_a_piece, st.integers(0, 63))
def test_a_bit_changes_about_half_of_the_hash(seed: int, at: int, bit: int) -> None:
    before = piece(seed)
    after = list(before)
    after[at] ^= 1 << bit
    (a, b), (c, d) = hashed(before), hashed(after)
    assert 24 <= (a ^ c).bit_count() + (b ^ d).bit_count() <= 104
