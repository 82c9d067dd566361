"""Suspending all processes or none, whatever the driver refuses and whoever dies meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserver.device import checkpoint
from gpuserver.device.checkpoint import (
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
from vgpu.identity import Process

if TYPE_CHECKING:
    from gpuserver.device.checkpoint import Driver

    Move = Callable[[Driver, Sequence[Process]], tuple[list[Refused], list[int]]]

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

    def state(self, pid: int) -> int:
        if pid not in self.states:
            raise Refused(pid, "GetState", INVALID_VALUE)
        return self.states[pid]

    def lock(self, pid: int, timeout_s: float) -> None:
        self._move("lock", pid)

    def checkpoint(self, pid: int) -> None:
        self._move("checkpoint", pid)

    def restore(self, pid: int) -> None:
        self._move("restore", pid)

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


def all_of(move: Move, driver: Fake) -> tuple[list[Refused], list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "is_alive", lambda process: process.pid in driver.states)
        return move(cast("Driver", driver), [Process(pid, 7) for pid in PIDS])


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
