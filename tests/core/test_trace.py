"""The recorder beside a scheduler: what it says of leases and waits is what an observer saw and what the books hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cython_ext.readings import TraceKind, TraceReading
from gpuserver.core.observe.trace import Recorder, noted
from gpuserver.core.scheduler.leases import (
    Added,
    Command,
    Drained,
    Event,
    Idle,
    Lease,
    LeaseStarted,
    Observed,
    Publish,
    Removed,
    Runnable,
    Withdraw,
)
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.model import MS, US, Run, S, Work
from tests.core.populations import Population, temporal_populations
from vgpu.protocol.trace import (
    BusyRecord,
    DrainRecord,
    LaunchRecord,
    LeaseRecord,
    LevelRecord,
    TraceRecord,
    WaitRecord,
)
from vgpu.share import Share

ANY = 1 << 30
Kind = TypeVar("Kind", bound=TraceRecord)


def of(kind: type[Kind], records: tuple[TraceRecord, ...]) -> list[Kind]:
    return [record for record in records if isinstance(record, kind)]


def recorder(**changes: object) -> Recorder:
    made = Recorder(ANY)
    made.enter(0, "vgpu-0", 0, **changes)  # type: ignore[arg-type]
    return made


def lease(epoch: int, start_ns: int, end_ns: int | None, window_ns: int = 12) -> Publish:
    return Publish(Lease(0, epoch, start_ns, end_ns, window_ns=window_ns))


def told(made: Recorder) -> tuple[TraceRecord, ...]:
    return made.take(ANY)[0]


def drained(epoch: int, at_ns: int, *, wants: bool = True) -> Drained:
    return Drained(0, epoch, at_ns, idle_ns=0, wants=wants)


def test_a_lease_from_go_to_its_drain_and_the_waits_around_it() -> None:
    made = recorder()
    made.on_event(Runnable(0), 100)
    made.on_command(lease(7, 200, 1200))
    made.on_event(LeaseStarted(0, 7, 250), 260)
    made.on_event(drained(7, 1300), 1310, (1050, 900))
    made.finish(2000)
    assert told(made) == (
        WaitRecord(vgpu_id="vgpu-0", begin_ns=100, end_ns=250, ended="lease"),
        LeaseRecord(
            vgpu_id="vgpu-0",
            epoch=7,
            go_ns=250,
            granted_ns=1000,
            end_ns=1250,
            drained_ns=1300,
            charged_ns=1050,
            busy_ns=900,
            window_ns=12,
            ended="ended",
        ),
        WaitRecord(vgpu_id="vgpu-0", begin_ns=1300, end_ns=2000, ended="still-waits"),
    )


@pytest.mark.parametrize(
    ("end_ns", "revised_ns", "drained_ns", "wants", "ended"),
    [
        (1000, None, 1000, True, "ended"),
        (1000, None, 990, True, "ended"),
        (1000, None, 400, False, "returned"),
        (None, None, 400, False, "returned"),
        (None, 500, 520, True, "revoked"),
        (1000, 500, 520, False, "revoked"),
        (1000, 2000, 2010, True, "ended"),
    ],
)
def test_how_a_lease_ended(
    end_ns: int | None, revised_ns: int | None, drained_ns: int, wants: bool, ended: str
) -> None:
    made = recorder()
    made.on_command(lease(1, 0, end_ns))
    made.on_event(LeaseStarted(0, 1, 0), 0)
    if revised_ns is not None:
        made.on_command(lease(1, 0, revised_ns))
    made.on_event(drained(1, drained_ns, wants=wants), drained_ns, (1, 1))
    (found,) = of(LeaseRecord, told(made))
    assert found.ended == ended
    longest = None if end_ns is None else max(end_ns, revised_ns or 0)
    assert (found.granted_ns, found.end_ns) == (longest, revised_ns or end_ns)


def test_what_was_so_before_it_began_and_is_so_when_it_ends() -> None:
    old, following = Lease(0, 3, -50, 900, window_ns=5), Lease(0, 4, 900, 1900, window_ns=5)
    made = recorder(leases=[(old, True), (following, False)], booked=(70, 60))
    made.on_event(drained(3, 950), 960, (100, 80))
    made.on_event(LeaseStarted(0, 4, 960), 961)
    made.on_event(Observed(0, 4, idle_ns=10, drains_by_ns=1300), 1000)
    (running,) = made.under_way(1060)
    made.finish(1060)
    first, last = of(LeaseRecord, told(made))
    assert (first.go_ns, first.charged_ns, first.busy_ns, first.window_ns) == (-50, 30, 20, 5)
    assert (last.ended, last.drained_ns, last.end_ns, last.charged_ns, last.busy_ns) == (
        "in-force",
        None,
        1960,
        100,
        90,
    )
    assert running == last


@pytest.mark.parametrize("known", [True, False])
def test_a_round_ends_when_it_was_to_however_early_it_began(known: bool) -> None:
    pinned = Lease(0, 3, 1000, 2000, early=False)
    made = recorder(leases=[(pinned, False)] if known else [])
    if not known:
        made.on_command(Publish(pinned))
    made.on_event(LeaseStarted(0, 3, 960), 961)
    (running,) = made.under_way(1060)
    assert isinstance(running, LeaseRecord)
    assert (running.go_ns, running.end_ns, running.granted_ns) == (960, 2000, 1040)


def test_a_wish_that_is_given_up_and_a_vgpu_that_goes() -> None:
    made = recorder(wants=True)
    made.on_event(Idle(0), 10)
    made.on_command(lease(1, 0, None))
    made.on_event(LeaseStarted(0, 1, 20), 20)
    made.on_event(Runnable(0), 25)
    made.on_event(Removed(0), 30)
    made.on_event(Runnable(0), 40)
    made.finish(50)
    wait, held = told(made)
    assert wait == WaitRecord(vgpu_id="vgpu-0", begin_ns=0, end_ns=10, ended="gave-up")
    assert isinstance(held, LeaseRecord)
    assert (held.ended, held.drained_ns) == ("removed", 30)


def test_a_lease_that_was_taken_back_is_none_unless_it_had_begun() -> None:
    made = recorder()
    for epoch in (1, 2):
        made.on_command(lease(epoch, 100, 200))
        made.on_command(Withdraw(0, epoch))
    made.on_event(LeaseStarted(0, 2, 99), 101)  # it crossed the withdrawal
    made.on_event(drained(2, 105, wants=False), 106, (6, 6))
    assert [(r.epoch, r.end_ns, r.ended) for r in of(LeaseRecord, told(made))] == [(2, 99, "revoked")]


def test_a_lease_that_went_before_its_withdrawal_was_said_is_a_revoked_one() -> None:
    made = recorder()
    made.on_command(lease(1, 100, 200))
    made.on_event(LeaseStarted(0, 1, 99), 101)  # with what led to the withdrawal
    made.on_command(Withdraw(0, 1))
    made.on_event(drained(1, 105), 106, (6, 6))
    assert [(r.epoch, r.end_ns, r.ended) for r in of(LeaseRecord, told(made))] == [(1, 199, "revoked")]


def test_of_two_leases_that_drained_together_the_last_one_shows_what_both_were_charged() -> None:
    made = recorder()
    for epoch in (1, 2):
        made.on_command(lease(epoch, epoch * 100, epoch * 100 + 50))
    made.on_event(LeaseStarted(0, 1, 100), 300)
    made.on_event(drained(1, 150), 300)
    made.on_event(LeaseStarted(0, 2, 200), 300)
    made.on_event(drained(2, 250), 300, (100, 80))
    assert [(r.epoch, r.charged_ns, r.busy_ns) for r in of(LeaseRecord, told(made))] == [(1, 0, 0), (2, 100, 80)]


def test_memory_is_bounded_and_what_does_not_fit_is_counted() -> None:
    made = Recorder(3)
    made.enter(0, "vgpu-0", 0)
    for at_ns in range(5):
        made.add(LevelRecord(vgpu_id="vgpu-0", name="lag", at_ns=at_ns, value_ns=0))
    made.miss(10)
    first, lost = made.take(2)
    assert ([record.at_ns for record in of(LevelRecord, first)], lost) == ([0, 1], 12)
    assert (made.waiting, made.take(2)[1]) == (1, 0)


WINDOW = (100, 200)


@pytest.mark.parametrize(
    ("kind", "begin_ns", "end_ns", "found"),
    [
        (TraceKind.BUSY, 50, 150, (100, 150)),
        (TraceKind.BUSY, 150, 250, (150, 200)),
        (TraceKind.BUSY, 50, 100, None),
        (TraceKind.BUSY, 200, 250, None),
        (TraceKind.BUSY, 150, 150, None),
        (TraceKind.BUSY, 150, 301, None),  # in the future
        (TraceKind.LAUNCH, 0, 150, 150),
        (TraceKind.LAUNCH, 0, 201, None),
        (TraceKind.DRAIN, 0, 200, 200),
        (99, 110, 120, None),
    ],
)
def test_what_a_process_noted_is_cut_to_the_window_or_refused(
    kind: int, begin_ns: int, end_ns: int, found: object
) -> None:
    record = noted("vgpu-0", 1, 42, TraceReading(kind, begin_ns, end_ns, 0), WINDOW, 300)
    if isinstance(record, BusyRecord):
        assert (record.begin_ns, record.end_ns) == found
    elif isinstance(record, LaunchRecord):
        assert record.seen_ns == found
    elif isinstance(record, DrainRecord):
        assert record.drained_ns == found
    else:
        assert found is None


@given(st.builds(TraceReading, *[st.integers(0, 400)] * 3, st.integers(0, 2**64 - 1)))
def test_nothing_that_a_tenant_writes_is_an_error_or_outside(reading: TraceReading) -> None:
    record = noted("vgpu-0", 1, 42, reading, WINDOW, 300)
    if isinstance(record, BusyRecord):
        assert WINDOW[0] <= record.begin_ns < record.end_ns <= WINDOW[1]


# --- beside a scheduler, on a simulated GPU


def record(population: Population, until_ns: int) -> tuple[Run, tuple[TraceRecord, ...]]:
    scheduler, made = TemporalScheduler(), Recorder(ANY)

    def watch(events: Sequence[Event], now_ns: int, commands: list[Command]) -> None:
        last = {event.vgpu: event for event in events if isinstance(event, Drained)}
        for event in events:
            if isinstance(event, Added):
                made.enter(event.vgpu, str(event.vgpu), now_ns)
            booked = scheduler.booked(event.vgpu) if isinstance(event, Drained) and last[event.vgpu] is event else None
            made.on_event(event, now_ns, booked)
        for command in commands:
            made.on_command(command)

    run = population.run(scheduler, watch)
    run.run(until_ns)
    made.finish(until_ns)
    return run, told(made)


@pytest.mark.simulation
@given(temporal_populations(), st.integers(1, 1500))
def test_the_leases_are_those_that_an_observer_saw(population: Population, until_ms: int) -> None:
    run, records = record(population, until_ms * MS)
    found = of(LeaseRecord, records)
    late = until_ms * MS - run.up_ns  # what was still on its way was not heard of
    over = {(r.epoch, r.go_ns, r.drained_ns) for r in found if r.drained_ns is not None}
    seen = {(r.epoch, r.go_ns, r.drained_ns) for r in run.records if r.drained_ns is not None}
    assert over <= seen
    assert {lease for lease in seen if lease[2] is not None and lease[2] < late} <= over
    for key in run.keys:
        booked = run.scheduler.booked(key)
        own = [r for r in found if r.vgpu_id == str(key) and r.drained_ns is not None]
        assert (sum(r.charged_ns for r in own), sum(r.busy_ns for r in own)) == booked


A_GO_THAT_CROSSED_ITS_WITHDRAWAL = Population(
    shares=(Share(137_404, 137_404), Share(435_114), Share(427_480, 427_480)),
    works=(
        Work(kernel_ns=30 * MS, jitter=0.3, refill_ns=0, burst=2, pause_ns=MS, start_ns=115 * MS, tails=True),
        Work(kernel_ns=2 * MS, jitter=0.3, refill_ns=0, start_ns=126 * MS),
        Work(jitter=0.0, refill_ns=400 * US, burst=8, pause_ns=127 * MS, start_ns=100 * MS),
    ),
    seed=2,
)


@pytest.mark.simulation
@given(temporal_populations())
@example(A_GO_THAT_CROSSED_ITS_WITHDRAWAL)
def test_in_temporal_mode_leases_overlap_by_their_tails_alone(population: Population) -> None:
    run, records = record(population, S)
    tails = {r.epoch: r.tail_ns for r in run.records if r.tail_ns is not None}
    inorder = sorted(of(LeaseRecord, records), key=lambda r: r.go_ns)
    for before, after in pairwise(inorder):
        over_ns = min(x for x in (before.drained_ns, before.end_ns, tails.get(before.epoch), S) if x is not None)
        assert after.go_ns >= over_ns - run.down_ns - run.up_ns


@pytest.mark.simulation
@given(temporal_populations())
def test_who_waits_holds_no_lease(population: Population) -> None:
    _, records = record(population, S)
    waits, held = of(WaitRecord, records), of(LeaseRecord, records)
    assert all(0 <= wait.begin_ns < wait.end_ns <= S for wait in waits)
    for wait in waits:
        for one in held:
            if one.vgpu_id == wait.vgpu_id and one.drained_ns is not None:
                assert min(one.drained_ns, wait.end_ns) <= max(one.go_ns, wait.begin_ns)


@pytest.mark.simulation
def test_a_pair_holds_about_what_it_was_promised() -> None:
    pair = Population((Share(300_000, 300_000), Share(700_000, 700_000)), (Work(), Work()), 1)
    _, records = record(pair, 3 * S)
    held = [sum(r.charged_ns for r in of(LeaseRecord, records) if r.vgpu_id == str(key)) for key in (0, 1)]
    assert held[0] / sum(held) == pytest.approx(0.3, abs=0.02)


def test_a_lease_is_shown_as_shared_once_it_was() -> None:
    made = recorder()
    made.shares(0)
    made.on_command(lease(5, 1000, None))
    made.on_event(LeaseStarted(0, 5, 1000), 1000)
    made.shares(1)
    (before,) = of(LeaseRecord, tuple(made.under_way(2000)))
    made.shares(0)
    (since,) = of(LeaseRecord, tuple(made.under_way(3000)))
    assert (before.shared, since.shared) == (False, True)
