"""--mem-limit: memory that nobody was promised, lent and given back, on a simulated node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.node import SimulatedNode, eventually
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuChanges

GIB = 1 << 30

PROGRAM = """
import sys
from tests.hook.app import App
app = App()
blocks = []
print("ready", flush=True)
for line in sys.stdin:
    word, size = line.split()
    if word == "take":
        block = app.allocate(int(size) << 20)
        blocks += [block] if block is not None else []
        print(block is not None, flush=True)
    elif word == "give":
        app.free(blocks.pop(0))
        print("given", flush=True)
    else:
        free, total = app.memory_info()
        print(free >> 30, total >> 30, flush=True)
"""


class Program:
    def __init__(self, node: SimulatedNode, vgpu: VgpuStatus) -> None:
        self.popen = node.program(vgpu, PROGRAM)
        assert self._heard() == "ready"

    def _heard(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def ask(self, word: str, mib: int = 0) -> str:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{word} {mib}\n")
        self.popen.stdin.flush()
        return self._heard()

    def takes(self, gib: int) -> bool:
        return self.ask("take", gib << 10) == "True"

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.end()


def test_what_is_free_is_lent_and_promised_to_nobody_while_it_is(programs: list[Program]) -> None:
    """Of 140 GiB 100 are promised: 40 are for those who borrow."""
    with SimulatedNode(1) as node:
        node.create(sm_percent=30, memory_bytes="80G", name="promised")
        borrower = node.create(sm_percent=30, memory_bytes="20G", memory_limit_bytes="100G")
        programs.append(Program(node, borrower))
        first = programs[0]
        eventually(lambda: first.ask("info").split()[0] in {"58", "59"}, "what is free is lent to it")
        assert first.ask("info").split()[1] == "100", "its limit is its size"
        assert not first.takes(65), "others were promised the rest"
        assert first.takes(50)
        with pytest.raises(VgpuError) as refused:
            node.create(sm_percent=20, memory_bytes="20G")
        assert refused.value.code is ErrorCode.NO_ROOM
        other = node.create(sm_percent=20, memory_bytes="5G")  # leaves four of what it was lent
        eventually(lambda: int(first.ask("info").split()[0]) <= 4, "what was promised since is lent no more")
        assert not first.takes(6)
        first.ask("give")
        eventually(lambda: int(first.ask("info").split()[0]) >= 53, "what it gave back it may have again")
        with node.link() as link:
            link.remove(other.vgpu_id)
            link.set(borrower.vgpu_id, VgpuChanges.parse(memory_limit_bytes="20G"))
        assert not first.takes(21)
        assert first.takes(18)


def test_two_who_borrow_never_have_more_than_there_is(programs: list[Program]) -> None:
    """Each takes what it gets, a GiB at a time, at once; nobody is refused by the card itself."""
    with SimulatedNode(1) as node:
        made = [node.create(sm_percent=30, memory_bytes="10G", memory_limit_bytes="140G") for _ in range(2)]
        promised = node.create(sm_percent=30, memory_bytes="60G")
        programs += [Program(node, vgpu) for vgpu in made]
        taken = [0, 0]

        def all_is_taken() -> bool:
            for i, program in enumerate(programs):
                while program.takes(1):
                    taken[i] += 1
            return sum(taken) >= 76

        eventually(all_is_taken, "nothing is left unlent")
        assert sum(taken) + 2 * 0.47 <= 80.4
        assert min(taken) >= 10
        guaranteed = Program(node, promised)
        programs.append(guaranteed)
        assert guaranteed.takes(59), "what was promised is there"
