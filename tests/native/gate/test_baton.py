"""The baton among the processes of a vGPU: a model of processes that obey it, and what must hold whatever they do."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cython_ext.testing import bindings_logic as native
from cython_ext.testing.bindings_logic import (
    FOREVER_NS,
    LEASE_OPEN,
    NO_SLOT,
    PATIENCE_NS,
    TURN_NS,
    UNDATED,
    UNUSED_NS,
    Baton,
    LeaseRecord,
    PlanRecord,
)

MS = 1_000_000
STEP_NS = MS // 4


@dataclass(eq=False)
class Process:
    """``kernel_ns`` 0: it has nothing to do. ``busy``: its slot says that it has work; ``runs_ns``: until it has."""

    kernel_ns: int = 0
    busy: bool = False
    runs_ns: int = 0
    stopped: bool = False
    looks: int = 0
    used_under: int = 0
    worked_ns: int = 0
    waits_since_ns: int = -1
    longest_wait_ns: int = 0


@dataclass(eq=False)
class Model:
    """A vGPU, one step of time after the other: its processes act, then its relay looks."""

    baton: Baton = field(default_factory=lambda: Baton(0, 1))
    processes: dict[int, Process] = field(default_factory=dict)
    leased: bool = True
    now_ns: int = 1
    words: list[int] = field(default_factory=list)

    def run(self, for_ns: int) -> None:
        until_ns = self.now_ns + for_ns
        while self.now_ns < until_ns:
            self.now_ns += STEP_NS
            for slot, process in self.processes.items():
                if not process.stopped:
                    self.act(slot, process)
            self.look()
            self.check()

    def act(self, slot: int, process: Process) -> None:
        """A gate and its hook thread: the drain is seen, then one more kernel goes if it may and fits."""
        if process.busy and self.now_ns >= process.runs_ns:
            process.busy = False
        if process.busy or not process.kernel_ns:
            return
        process.looks += 1
        word, end_ns = self.baton.word, self.baton.end_ns
        fits = end_ns == UNDATED or end_ns - self.now_ns >= process.kernel_ns // 2 or process.used_under != word
        if self.leased and fits and native.baton_ours(word, end_ns, slot, self.now_ns):
            process.busy, process.used_under = True, word
            process.runs_ns = self.now_ns + process.kernel_ns
            process.worked_ns += process.kernel_ns
            process.waits_since_ns = -1
        elif process.waits_since_ns < 0 or not self.leased:
            process.waits_since_ns = self.now_ns
        else:
            process.longest_wait_ns = max(process.longest_wait_ns, self.now_ns - process.waits_since_ns)

    def look(self) -> None:
        wants = [slot for slot, p in self.processes.items() if p.kernel_ns or p.busy]
        looks = {slot: p.looks for slot, p in self.processes.items()}
        for _ in range(8):
            busy = [slot for slot, p in self.processes.items() if p.busy]
            if not self.baton.step(self.now_ns, wants, busy, looks, self.leased):
                break
            self.words.append(self.baton.word)
        else:
            pytest.fail("the relay does not come to rest")
        assert self.baton.due_ns > self.now_ns

    def check(self) -> None:
        running = {slot for slot, p in self.processes.items() if self.now_ns < p.runs_ns}
        assert len(running - self.baton.late) <= 1, "two processes at once, and nobody was waited for in vain"
        named = (self.baton.word & 0xFF) - 1
        assert named == self.baton.holder

    def kill(self, slot: int) -> None:
        """Its slot is silent at once, and the driver takes its kernel off the SMs."""
        self.processes[slot] = Process()


def model(*kernels_ns: int) -> Model:
    return Model(processes={slot: Process(kernel_ns) for slot, kernel_ns in enumerate(kernels_ns)})


# --- what a process has of it


def test_alone_it_has_no_end_and_keeps_the_word_when_it_goes_idle() -> None:
    one = model(MS)
    one.run(100 * MS)
    assert (one.baton.holder, one.baton.end_ns) == (0, FOREVER_NS)
    one.processes[0].kernel_ns = 0
    one.run(100 * MS)
    assert one.words == [one.baton.word]
    assert native.baton_ours(one.baton.word, one.baton.end_ns, 0, one.now_ns)


@pytest.mark.parametrize("kernels_ms", [(1, 1), (0.25, 4), (1, 1, 1), (5, 0.5, 2)])
def test_who_always_wants_gets_an_equal_part(kernels_ms: tuple[float, ...]) -> None:
    those = model(*(int(ms * MS) for ms in kernels_ms))
    those.run(5000 * MS)
    worked = [p.worked_ns for p in those.processes.values()]
    total = sum(worked)
    assert total > 0.85 * 5000 * MS  # a step of the model at each end of a turn
    assert all(abs(part / total - 1 / len(worked)) < 0.02 for part in worked)


def test_a_kernel_longer_than_a_turn_runs_and_is_paid_for() -> None:
    those = model(30 * MS, MS)
    those.run(5000 * MS)
    long, short = (p.worked_ns for p in those.processes.values())
    assert abs(long / (long + short) - 0.5) < 0.02


def test_idleness_earns_nothing() -> None:
    those = model(MS, 0)
    those.run(1000 * MS)
    those.processes[1].kernel_ns = MS
    before = those.processes[0].worked_ns
    those.run(1000 * MS)
    assert abs(those.processes[1].worked_ns - (those.processes[0].worked_ns - before)) < 2 * TURN_NS


def test_who_has_nothing_more_to_do_passes_it_on_at_once() -> None:
    those = model(MS, MS)
    those.run(50 * MS)
    holder = those.baton.holder
    those.processes[holder].kernel_ns = 0
    those.run(3 * MS)
    assert (those.baton.holder, those.baton.end_ns) == (1 - holder, FOREVER_NS)


# --- what may go wrong


def test_a_dead_holder_is_followed_at_once() -> None:
    those = model(MS, MS)
    those.run(50 * MS)
    holder = those.baton.holder
    those.kill(holder)
    those.look()
    assert those.baton.holder == 1 - holder


def test_a_stopped_one_without_work_costs_one_look_and_is_back_when_it_wakes() -> None:
    those = model(MS, MS)
    those.run(50 * MS)
    stopped = 1 - those.baton.holder
    those.processes[stopped].stopped = True
    those.run(2 * TURN_NS + UNUSED_NS)
    assert those.baton.asleep == {stopped}
    before = those.processes[1 - stopped].worked_ns
    those.run(1000 * MS)
    assert those.processes[1 - stopped].worked_ns - before > 0.99 * 1000 * MS
    those.processes[stopped].stopped = False
    before = those.processes[stopped].worked_ns
    those.run(2 * TURN_NS)
    assert not those.baton.asleep
    assert those.processes[stopped].worked_ns > before


def test_one_that_does_not_drain_is_waited_for_and_no_longer() -> None:
    those = model(MS, MS)
    those.run(50 * MS)
    stuck = those.baton.holder
    those.processes[stuck].runs_ns = those.now_ns + 3000 * MS
    those.processes[stuck].busy = True
    those.run(TURN_NS + PATIENCE_NS + MS)
    assert those.baton.late == {stuck}
    assert those.baton.holder == 1 - stuck
    those.run(3000 * MS)
    assert not those.baton.late
    assert those.baton.used_ns(stuck) > 2900 * MS  # all of it is charged
    assert those.processes[1 - stuck].longest_wait_ns < TURN_NS + PATIENCE_NS + 2 * MS


def test_turns_begin_with_the_lease_and_stop_with_it() -> None:
    those = model(MS, MS)
    those.run(50 * MS)
    those.leased = False
    those.run(200 * MS)
    assert those.baton.end_ns == UNDATED  # somebody stands by, and its time does not run
    assert not those.baton.asleep
    standing_by = those.baton.holder
    those.leased = True
    those.run(MS)
    assert (those.baton.holder, those.processes[standing_by].busy) == (standing_by, True)


def test_a_new_relay_goes_on_with_the_serial_and_waits_for_whoever_has_work() -> None:
    those = model(MS, MS)
    those.run(50 * MS)
    before = those.baton.word
    working = those.baton.holder
    those.baton = Baton(before, those.now_ns)
    assert those.baton.word >> 8 == (before >> 8) + 1
    assert not native.baton_ours(those.baton.word, those.baton.end_ns, working, those.now_ns)
    those.run(100 * MS)
    assert those.baton.holder != NO_SLOT


def test_serials_never_make_a_word_of_zero() -> None:
    baton = Baton((1 << 32) - 1, 1)
    assert baton.word == 1 << 8


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, int, str, int]]:
    """(after so many ms, slot, what happens to it, length of its kernels in ms)"""
    happenings = st.sampled_from(["work", "idle", "stop", "go on", "die", "no lease", "lease"])
    event = st.tuples(st.integers(0, 40), st.integers(0, 3), happenings, st.integers(1, 30))
    return draw(st.lists(event, max_size=40))


@given(lives())
@example(
    [
        *((12, 1, "stop", 1), (34, 0, "work", 1), (38, 0, "work", 1), (40, 0, "work", 1), (12, 0, "work", 1)),
        *((25, 3, "work", 1), (0, 1, "go on", 1), (0, 2, "work", 1)),
    ]
)
def test_one_at_a_time_whatever_happens_and_nobody_waits_for_ever(events: list[tuple[int, int, str, int]]) -> None:
    those = model(MS, MS, 0, 0)
    for after_ms, slot, what, kernel_ms in events:
        those.run(after_ms * MS)
        process = those.processes[slot]
        match what:
            case "work":
                process.kernel_ns = kernel_ms * MS
            case "idle":
                process.kernel_ns = 0
            case "stop" | "go on":
                process.stopped = what == "stop"
            case "die":
                those.kill(slot)
                those.baton.forget(slot)
            case _:
                those.leased = what == "lease"
    those.leased = True
    those.run(31 * MS)  # who was stopped with work, and runs again, is charged for it once it has drained
    for process in those.processes.values():
        process.longest_wait_ns, process.waits_since_ns = 0, -1
    # A debt from before is paid off first: a turn beside a holder that did not drain is one of ours, too.
    debt_ns = max(those.baton.used_ns(slot) for slot in range(4)) - min(those.baton.used_ns(slot) for slot in range(4))
    those.run(1000 * MS)
    # Three others, each with a turn, a kernel at its end, and the patience if it is stopped.
    bound_ns = 3 * (TURN_NS + 30 * MS + PATIENCE_NS + UNUSED_NS) + 3 * debt_ns
    assert all(p.longest_wait_ns <= bound_ns for p in those.processes.values())
    assert all(before >> 8 < after >> 8 for before, after in pairwise(those.words) if before != after)


# --- the gate's side


@given(
    word=st.integers(0, (1 << 32) - 1),
    end_ns=st.sampled_from([UNDATED, 500, 1000, FOREVER_NS]),
    slot=st.integers(0, 63),
    now_ns=st.integers(1, 2000),
)
def test_only_who_is_named_may_submit_and_only_until_its_end(word: int, end_ns: int, slot: int, now_ns: int) -> None:
    ours = native.baton_ours(word, end_ns, slot, now_ns)
    if word == 0:
        assert ours
    else:
        assert ours == ((word & 0xFF) - 1 == slot and (end_ns == UNDATED or now_ns < end_ns))


def test_a_turn_bounds_every_lease_and_only_the_lone_one_is_open() -> None:
    plan = PlanRecord(LeaseRecord(1, LEASE_OPEN, 0, FOREVER_NS), LeaseRecord(2, 0, 5000, 9000))
    assert native.baton_bound(plan, native.baton_until_ns(0, 0)) == plan
    assert native.baton_bound(plan, native.baton_until_ns(0x101, FOREVER_NS)) == plan
    bound = native.baton_bound(plan, native.baton_until_ns(0x101, 7000))
    assert [(lease.flags, lease.end_ns) for lease in bound] == [(0, 7000), (0, 7000)]
    undated = native.baton_bound(plan, native.baton_until_ns(0x101, UNDATED))
    assert not undated.current.flags & LEASE_OPEN
    assert undated.next.end_ns == 9000
