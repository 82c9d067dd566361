"""Groups of vGPUs that are swapped, on two simulated GPUs: all of a group are on their GPUs, or none, and programs find
their memory. The rules by themselves: tests/core/test_together.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from cython_ext.simengine import Engine
from tests.integration.fixtures import nodes
from tests.integration.node import SimulatedNode, eventually
from tests.integration.test_swapping import OWNED, ROOM_MIB, Program
from tests.integration.worker import state
from vgpu.protocol.messages import VgpuStatus

MIB = 1 << 20
PATIENCE_S = 180.0  # turns of a second each, on a busy machine

shared, node = nodes(2)


class Groups:
    """Two GPUs with room for one of the test's vGPUs each, and their programs."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.programs: list[Program] = []
        self._engines = [Engine(node.paths.runtime / "sim", gpu) for gpu in (0, 1)]

    def leave_room(self, *programs: int) -> None:
        """On each GPU for the contexts of so many programs, and for the memory of one."""
        for gpu, count in enumerate(programs):
            engine = self._engines[gpu]
            size = engine.memory_bytes - count * engine.context_bytes - ROOM_MIB * MIB
            self.node.create(gpu=str(gpu), sm_percent=5, memory_bytes=size)

    def vgpu(self, gpu: int, name: str, **more: Any) -> VgpuStatus:
        return self.node.create(gpu=str(gpu), name=name, sm_percent=20, memory_bytes="2G", oversubscribe="swap", **more)

    def group(self, name: str) -> list[VgpuStatus]:
        return [self.vgpu(gpu, f"{name}{gpu}", group=name) for gpu in (0, 1)]

    def program(self, vgpu: VgpuStatus, byte: int, *, busy: bool = True) -> Program:
        self.programs.append(Program(self.node, vgpu, byte, busy=busy))
        eventually(lambda: self.reading(vgpu).memory_implicit_bytes, "its context is seen")
        return self.programs[-1]

    def reading(self, vgpu: VgpuStatus) -> VgpuStatus:
        """Once its server answers: it may have been killed a moment ago."""
        return eventually(lambda: self.node.reading(vgpu.vgpu_id), f"{vgpu.name} is known", PATIENCE_S)

    def leaves(self, *vgpus: VgpuStatus) -> None:
        """One after the other, each at a moment of its own."""
        for vgpu in vgpus:
            eventually(lambda one=vgpu: self.reading(one).memory_away_bytes == OWNED, f"{vgpu.name} leaves", PATIENCE_S)  # type: ignore[misc]

    def on_card(self, gpu: int) -> int:
        self._engines[gpu].refresh()
        return self._engines[gpu].memory_used_bytes

    def end(self) -> None:
        for program in self.programs:
            program.end()


@pytest.fixture
def groups(node: SimulatedNode) -> Iterator[Groups]:
    found = Groups(node)
    yield found
    found.end()


def go_on(programs: list[Program]) -> None:
    """Each of them, which finds its memory as it was."""
    for program in programs:
        program.works()
    assert all(program.popen.poll() is None for program in programs)


@pytest.mark.slow
def test_a_group_leaves_as_a_whole_for_a_vgpu_on_one_of_its_gpus_and_comes_back(groups: Groups) -> None:
    groups.leave_room(1, 2)
    first, second = groups.group("ranks")
    lone = groups.vgpu(1, "lone")
    ranks = [groups.program(first, 1), groups.program(second, 2)]
    go_on(ranks)
    other = groups.program(lone, 3)
    for _ in range(2):
        groups.leaves(first, second)  # the first has its GPU to itself
        other.works()
        go_on([*ranks, other])


@pytest.mark.slow
def test_two_groups_take_turns(groups: Groups) -> None:
    groups.leave_room(2, 2)
    one, other = groups.group("one"), groups.group("other")
    programs = [groups.program(vgpu, byte) for byte, vgpu in enumerate((*one, *other), 1)]
    for _ in range(2):
        for group in (one, other):
            groups.leaves(*group)
        go_on(programs)


def test_while_one_is_suspended_the_others_are_away_and_come_back_with_it(groups: Groups) -> None:
    groups.leave_room(1, 1)
    ranks = groups.group("ranks")
    programs = [groups.program(vgpu, byte) for byte, vgpu in enumerate(ranks, 1)]
    for gpu in (1, 0):
        go_on(programs)
        suspended, other = ranks[gpu], ranks[1 - gpu]
        with groups.node.link() as link:
            link.suspend(suspended.vgpu_id)
        groups.leaves(other)
        assert state(groups.node, other) == "swapped"
        said = f"the vGPU of its group on GPU {gpu} is suspended"
        eventually(lambda at=other, said=said: groups.reading(at).reason == said, "it is said why")  # type: ignore[misc]
        with groups.node.link() as link:
            assert any(said in finding.text for finding in link.why(other.vgpu_id).findings)
            link.resume(suspended.vgpu_id)
    go_on(programs)
    eventually(lambda: not any(groups.reading(vgpu).reason for vgpu in ranks), "nothing is waited for")


@pytest.mark.slow
def test_one_that_was_suspended_because_it_was_idle_comes_back_when_another_wants(groups: Groups) -> None:
    groups.leave_room(1, 1)
    busy = groups.vgpu(0, "busy", group="ranks")
    idle = groups.vgpu(1, "idle", group="ranks", idle_suspend_ns="1s")
    worker, sleeper = groups.program(busy, 1), groups.program(idle, 2, busy=False)
    worker.works()
    with groups.node.link() as link:
        link.suspend(busy.vgpu_id)
    eventually(lambda: state(groups.node, idle) == "idle-suspended", "nothing wants the GPUs")
    with groups.node.link() as link:
        link.resume(busy.vgpu_id)
    worker.works()
    eventually(lambda: groups.reading(idle).memory_away_bytes == 0, "it comes back, too")
    sleeper.says("touch")
    worker.works()


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [0, 1])
def test_a_server_is_killed_and_nothing_is_lost(groups: Groups, gpu: int) -> None:
    groups.leave_room(1, 2)
    ranks = groups.group("ranks")
    lone = groups.vgpu(1, "lone")
    programs = [groups.program(vgpu, byte) for byte, vgpu in enumerate((*ranks, lone), 1)]
    for _ in range(2):
        groups.leaves(*ranks)
        os.kill(groups.node.server_pid(gpu), signal.SIGKILL)
        go_on(programs)
    for program in programs:
        program.says("touch")
    assert all(program.popen.poll() is None for program in programs)
    for vgpu in (*ranks, lone):
        now = groups.reading(vgpu)
        assert now.memory_used_bytes - now.memory_implicit_bytes == OWNED
    groups.end()
    for vgpu in (*ranks, lone):
        eventually(lambda one=vgpu: groups.reading(one).memory_used_bytes == 0, "its memory is given back")  # type: ignore[misc]
    eventually(lambda: not any(groups.on_card(gpu) for gpu in (0, 1)), "nothing is on the GPUs")
