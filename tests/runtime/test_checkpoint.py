"""Suspending all processes or none, whatever the driver refuses and whoever dies meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserver.device.base import Onto
from gpuserver.device.nvidia import checkpoint
from gpuserver.device.nvidia.checkpoint import (
    CHECKPOINTED,
    FAILED,
    INVALID_VALUE,
    LOCKED,
    NOT_READY,
    OUT_OF_MEMORY,
    RUNNING,
    Refused,
    resume,
    suspend,
)
from gpuserver.device.pidfd import Target
from vgpu.identity import Process

if TYPE_CHECKING:
    from gpuserver.device.nvidia.checkpoint import Driver

    Move = Callable[[Driver, Sequence[Target], Onto | None], tuple[list[Refused], list[int]]]

MOVES = {
    "lock": (RUNNING, LOCKED),
    "checkpoint": (LOCKED, CHECKPOINTED),
    "restore": (CHECKPOINTED, LOCKED),
    "unlock": (LOCKED, RUNNING),
}


class Fake:
    """Processes by pid; calls named in ``refuses`` as (name, pid) fail once, those in ``kills`` end their process."""

    def __init__(self, states: dict[int, int], refuses: set[tuple[str, int]], kills: set[tuple[str, int]]) -> None:
        self.states = dict(states)
        self.refuses = set(refuses)
        self.kills = kills
        self.places = dict.fromkeys(states, "A")
        self.sees = True

    @contextmanager
    def opened(self, target: Target) -> Iterator[int]:
        if target.process.pid not in self.states:
            raise ProcessLookupError
        yield -1

    def state(self, pid: int) -> int:
        if pid not in self.states:
            raise Refused(pid, "GetState", INVALID_VALUE)
        return self.states[pid]

    def lock(self, pid: int, timeout_s: float) -> None:
        self._move("lock", pid)

    def checkpoint(self, pid: int) -> None:
        self._move("checkpoint", pid)

    def restore(self, pid: int, onto: Onto | None) -> None:
        self._move("restore", pid)
        if onto is not None:
            self.places[pid] = onto.of(self.places[pid])

    def where(self, pid: int) -> str:
        return self.places[pid] if self.sees else ""

    def unlock(self, pid: int) -> None:
        self._move("unlock", pid)

    def _move(self, name: str, pid: int) -> None:
        before, after = MOVES[name]
        assert self.state(pid) == before
        if (name, pid) in self.kills:
            del self.states[pid]
            raise Refused(pid, name, INVALID_VALUE)
        if (name, pid) in self.refuses:
            self.refuses.remove((name, pid))
            raise Refused(pid, name, OUT_OF_MEMORY if name == "restore" else NOT_READY)
        self.states[pid] = after


def all_of(move: Move, driver: Fake, onto: Onto | None = None) -> tuple[list[Refused], list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "is_alive", lambda process: process.pid in driver.states)
        patch.setattr(checkpoint, "opened", driver.opened)
        return move(cast("Driver", driver), [Target(Process(pid, 7)) for pid in PIDS], onto)


PIDS = (1, 2, 3)
CALLS = st.sets(st.tuples(st.sampled_from(sorted(MOVES)), st.sampled_from(PIDS)), max_size=4)


@given(
    st.sampled_from([suspend, resume]),
    st.fixed_dictionaries({pid: st.sampled_from([RUNNING, LOCKED, CHECKPOINTED, FAILED]) for pid in PIDS}),
    CALLS,
    CALLS,
)
def test_all_or_none_and_who_is_neither_is_named(
    move: Move, states: dict[int, int], refuses: set[tuple[str, int]], kills: set[tuple[str, int]]
) -> None:
    driver = Fake(states, refuses, kills)
    refusals, stuck = all_of(move, driver)
    wanted = CHECKPOINTED if (not refusals) == (move is suspend) else RUNNING
    assert all(state in {wanted, FAILED} or pid in stuck for pid, state in driver.states.items())
    assert all(pid in driver.states for pid in stuck)


def test_one_that_dies_meanwhile_holds_nobody_up() -> None:
    driver = Fake(dict.fromkeys(PIDS, RUNNING), set(), {("checkpoint", 2)})
    assert all_of(suspend, driver) == ([], [])
    assert driver.states == {1: CHECKPOINTED, 3: CHECKPOINTED}


def test_what_one_refuses_is_undone_for_all() -> None:
    driver = Fake(dict.fromkeys(PIDS, RUNNING), {("checkpoint", 3)}, {("restore", 2)})
    refusals, stuck = all_of(suspend, driver)
    assert [str(refusal) for refusal in refusals] == ["process 3: its work on the GPU did not end within 10 s"]
    assert (driver.states, stuck) == ({1: RUNNING, 3: RUNNING}, [])


def test_without_room_all_are_out_again() -> None:
    driver = Fake(dict.fromkeys(PIDS, CHECKPOINTED), {("restore", 3)}, set())
    refusals, stuck = all_of(resume, driver)
    assert len(refusals) == 1
    assert (driver.states, stuck) == (dict.fromkeys(PIDS, CHECKPOINTED), [])


@given(
    st.fixed_dictionaries({pid: st.sampled_from([LOCKED, CHECKPOINTED]) for pid in PIDS}),
    st.fixed_dictionaries({pid: st.sampled_from("ABC") for pid in PIDS}),
    CALLS,
)
def test_all_come_to_the_gpu_that_was_meant_wherever_they_were(
    states: dict[int, int], places: dict[int, str], refuses: set[tuple[str, int]]
) -> None:
    """Whoever moved them before may have been killed half-way: some are where they were, some where they were to be."""
    driver = Fake(states, refuses, set())
    driver.places = dict(places)
    refusals, stuck = all_of(resume, driver, Onto("A", "B"))
    if refusals:
        driver.refuses.clear()
        driver.states = dict.fromkeys(PIDS, CHECKPOINTED)
        refusals, stuck = all_of(resume, driver, Onto("A", "B"))
    assert refusals == []
    assert all(driver.places[pid] == "B" for pid in PIDS)
    assert all(state == RUNNING or pid in stuck for pid, state in driver.states.items())


def test_where_nvml_says_nothing_what_is_known_counts() -> None:
    driver = Fake(dict.fromkeys(PIDS, CHECKPOINTED), set(), set())
    driver.sees = False
    assert all_of(resume, driver, Onto("A", "B")) == ([], [])
    assert set(driver.places.values()) == {"B"}


def test_the_driver_is_told_of_every_gpu_there_is() -> None:
    """Two change places; the driver refuses a map that has not every GPU, once on either side."""
    uuids = ["A", "B", "C"]
    assert [Onto("A", "C").of(uuid) for uuid in uuids] == ["C", "B", "A"]
    assert [Onto("B", "B").of(uuid) for uuid in uuids] == uuids
    assert Onto.parse("GPU-a=GPU-b") == Onto("GPU-a", "GPU-b")


def test_a_uuid_as_the_driver_has_it_and_as_people_write_it() -> None:
    text = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    assert checkpoint.text_of(checkpoint.bytes_of(text)) == text


def test_a_driver_without_checkpoints_is_known_before_anybody_is_idle(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = SimpleNamespace(cuInit=lambda flags: 0)
    monkeypatch.setattr(checkpoint, "end_with", lambda parent: None)
    monkeypatch.setattr(checkpoint.ctypes, "CDLL", lambda name: old)
    assert checkpoint.main(["1", "probe"]) == 1
    assert json.loads(capsys.readouterr().out)["reason"] == "this driver has no checkpoints: 570 is the first"
    old.cuCheckpointProcessLock = None
    assert checkpoint.main(["1", "probe"]) == 0
