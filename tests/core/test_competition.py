"""What both modes share, told by hand: who competes, and which reports are believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuserver.core.scheduler.base import SchedulerBase
from gpuserver.core.scheduler.interface import make_scheduler
from gpuserver.core.scheduler.leases import Added, Drained, LeaseStarted, Runnable, Tick
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.desk import MS, Desk, leases, owed, spans, withdrawn
from vgpu.share import PPM, Mode, Share

HALF = Share(PPM // 2)
CAPPED = Share(PPM // 2, PPM // 2)
BOTH = pytest.mark.parametrize("kind", [TemporalScheduler, SpatialScheduler])


def test_a_mode_has_its_scheduler() -> None:
    temporal, spatial = (make_scheduler(mode, first_epoch=70) for mode in (Mode.TEMPORAL, Mode.SPATIAL))
    assert isinstance(temporal, TemporalScheduler)
    assert isinstance(spatial, SpatialScheduler)
    for scheduler in (temporal, spatial):
        assert scheduler.next_epoch == 70
        assert Desk(scheduler, HALF).runs(0, 1).epoch == 70
        assert scheduler.next_epoch == 71


def test_without_its_limit_a_throttled_vgpu_comes_back_at_once() -> None:
    desk = Desk(SpatialScheduler(), *[replace(CAPPED, sm_mpercent=30_000)] * 2)
    desk.runs(0, 0)
    desk.runs(1, 50)
    desk.changed(1, HALF, 50)
    desk.drained(0, 1, 60)
    desk.changed(0, replace(HALF, sm_mpercent=30_000), 61)
    assert not desk.statement(0, 61).throttled
    desk = Desk(TemporalScheduler(), CAPPED)
    desk.runs(0, 0)
    desk.drained(0, 1, 60)
    assert desk.statement(0, 60).throttled
    assert desk.due_ms == 80
    assert desk.changed(0, Share(450_000, 450_000), 61) == []
    assert desk.statement(0, 61).throttled
    assert [x.end_ns for x in leases(desk.changed(0, HALF, 62))] == [None]
    assert not desk.statement(0, 62).throttled


def test_throttling_forgives_and_takes_nothing() -> None:
    """The others' progress pays a debt, whether one waits for the bucket or has stopped to want."""
    desk = Desk(TemporalScheduler(), CAPPED, HALF)
    desk.runs(0, 0)
    desk.wants(1, 30)
    desk.drained(0, 1, 80)
    before = desk.statement(0, 80)
    assert before.throttled
    desk.went(1, 2, 80)
    assert desk.statement(0, 85).lag_ns == pytest.approx(before.lag_ns + 5 * MS, abs=2)
    desk.idle(0, 85)
    after = desk.statement(0, 85)
    assert (after.throttled, after.waiting_since_ns) == (False, None)
    assert after.lag_ns == pytest.approx(before.lag_ns + 5 * MS, abs=2)
    desk.tick(90)
    assert desk.statement(0, 90).lag_ns == pytest.approx(before.lag_ns + 10 * MS, abs=2)


@BOTH
def test_whoever_is_removed_leaves_nothing_behind(kind: type[SchedulerBase]) -> None:
    wide = Share(PPM // 3, sm_mpercent=60_000)
    desk = Desk(kind(), wide, wide, wide)
    desk.runs(0, 0)
    desk.wants(1, 1)
    desk.wants(2, 1)
    commands = desk.removed(0, 4)
    assert {x.vgpu for x in leases(commands)} <= {1, 2}
    assert list(desk.scheduler.books()) == [1, 2]
    going = [x for x in leases(commands) if x.start_ns <= 4 * MS]
    assert [x.vgpu for x in going] == [1] or kind is TemporalScheduler
    desk.removed(1, 5)
    desk.removed(2, 6)
    assert desk.scheduler.books() == {}
    assert desk.due_ms is None
    with pytest.raises(KeyError, match="vGPU 0"):
        desk.wants(0, 7)
    desk.tell(Added(0, wide), 8)
    assert [x.end_ns for x in leases(desk.wants(0, 8))] == [None]


def test_a_successor_pays_for_itself_once_a_stuck_holder_is_removed() -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF)
    desk.runs(0, 0)
    desk.wants(1, 10)
    desk.went(1, 2, 122.2)  # GO after the bounded wait
    assert desk.statement(0, 125).penalised
    assert desk.statement(1, 125).held_ns == 0
    desk.removed(0, 130)
    assert desk.statement(1, 135).held_ns == 5 * MS


@BOTH
def test_a_process_that_dies_while_it_waits_is_forgotten(kind: type[SchedulerBase]) -> None:
    desk = Desk(kind(), HALF, HALF)
    desk.runs(0, 0)
    commands = desk.wants(1, 1)
    assert desk.wants(1, 2) == []
    assert desk.statement(1, 2).waiting_since_ns == 1 * MS
    published = [x.epoch for x in leases(commands) if x.vgpu == 1]
    assert not desk.statement(1, 2).runs  # whether or not a lease is published ahead
    commands = desk.idle(1, 3)
    assert withdrawn(commands) == [(1, e) for e in published]
    statement = desk.statement(1, 3)
    assert (statement.wants, statement.holds, statement.waiting_since_ns) == (False, False, None)
    assert desk.idle(1, 4) == []
    assert desk.statement(0, 4).lag_ns == 0  # alone again


@BOTH
def test_a_go_that_crossed_its_withdrawal_is_charged(kind: type[SchedulerBase]) -> None:
    desk = Desk(kind(), *[replace(HALF, sm_mpercent=70_000)] * 3)
    desk.runs(0, 0)
    desk.wants(1, 1)
    desk.tick(15)
    assert withdrawn(desk.idle(1, 16)) == [(1, 2)]
    desk.went(1, 2, 16.05)
    assert desk.statement(1, 17).holds
    assert desk.statement(1, 17).runs
    desk.wants(1, 16.5)  # counted, and granted nothing before that has drained
    desk.wants(2, 17)
    desk.drained(0, 1, 18, wants=False)
    desk.drained(1, 2, 18.05, wants=False)
    statement = desk.statement(1, 20)
    half_of_the_overlap = (18 - 16.05) / 2
    assert statement.held_ns == round((2 - half_of_the_overlap) * MS)
    assert (statement.tokens, statement.holds) == (1, False)
    desk.went(1, 2, 21)  # over
    assert not desk.statement(1, 21).holds


@BOTH
def test_a_limit_throttles_only_once_what_crossed_its_withdrawal_has_drained(kind: type[SchedulerBase]) -> None:
    """Throttled, it keeps its lag: what it still holds would be forgiven."""
    tenth = Share(PPM // 10, PPM // 10, sm_mpercent=70_000)
    desk = Desk(kind(), replace(HALF, sm_mpercent=70_000), tenth)
    desk.runs(0, 0)
    desk.wants(1, 1)
    desk.tick(15)
    assert withdrawn(desk.idle(1, 16)) == [(1, 2)]
    desk.went(1, 2, 16.05)
    desk.changed(1, replace(tenth, limit_ppm=PPM // 2), 17)  # its line is 20 ms now, and its bucket below
    desk.wants(1, 18)
    statement = desk.statement(1, 18)
    assert (statement.holds, statement.throttled) == (True, False)
    desk.drained(0, 1, 20)
    desk.drained(1, 2, 36)
    statement = desk.statement(1, 36)
    assert (statement.holds, statement.throttled) == (False, True)
    assert statement.lag_ns < -10 * MS  # for the 20 ms that it held


@BOTH
def test_reports_that_crossed_a_decision_change_nothing(kind: type[SchedulerBase]) -> None:
    desk = Desk(kind(), HALF, HALF)
    desk.runs(0, 0)
    before = desk.scheduler.books()
    desk.tell(LeaseStarted(0, 1, 0), 0)  # twice
    for epoch in (2, 9):
        desk.tell(LeaseStarted(0, epoch, 0), 0)  # never published
    desk.tell(LeaseStarted(1, 0, 0), 0)  # from before this scheduler
    desk.tell(Drained(0, 7, 0, 0, wants=False), 0)
    desk.tell(Drained(1, 1, 0, 0, wants=False), 0)
    desk.observed(1, 1, 0, idle_ns=5)
    assert desk.scheduler.books() == before
    assert [desk.statement(k, 0).holds for k in (0, 1)] == [True, False]
    assert desk.statement(0, 0).wants
    desk.drained(0, 1, 5)
    assert desk.statement(0, 5).tokens == 1
    desk.went(0, 1, 6)  # over
    assert desk.statement(0, 6).held_ns == 5 * MS


@BOTH
def test_time_never_runs_backwards(kind: type[SchedulerBase]) -> None:
    desk = Desk(kind(), CAPPED)
    desk.runs(0, 100)
    desk.tick(110)
    books = desk.scheduler.books()
    desk.scheduler.handle(Runnable(0), 50 * MS)
    assert desk.scheduler.books() == books
    desk.tell(Drained(0, 1, 999 * MS, 0, wants=True), 120)  # a drain from the future happened now
    assert desk.statement(0, 120).held_ns == 20 * MS


@BOTH
def test_a_mode_takes_the_policy_it_is_given(kind: type[SchedulerBase]) -> None:
    policy = Policy(window_ns=3 * MS)
    mode = Mode.SPATIAL if kind is SpatialScheduler else Mode.TEMPORAL
    scheduler = make_scheduler(mode, policy)
    assert scheduler.policy is policy
    assert leases(Desk(scheduler, HALF).wants(0, 0))[0].window_ns == 3 * MS
    assert make_scheduler(mode).next_epoch == kind().next_epoch == 1


@pytest.mark.parametrize(("limit_ppm", "line"), [(300_001, 40 * 300_001), (1, 5 * MS)])
@BOTH
def test_a_throttled_vgpu_comes_back_to_the_nanosecond(kind: type[SchedulerBase], limit_ppm: int, line: int) -> None:
    """``line``: P·l, in nanoseconds, or the shortest token."""
    desk = Desk(kind())
    desk.tell(Added(0, Share(1, limit_ppm), replace(owed(0), bucket_ns=-7)), 0)
    assert desk.wants(0, 0) == []
    due = desk.scheduler.next_deadline_ns()
    assert due == -(-(line * PPM + 7 * PPM) // limit_ppm)
    assert desk.scheduler.handle(Tick(), due - 1) == []
    assert len(leases(desk.scheduler.handle(Tick(), due))) == 1


def test_who_comes_back_from_its_limit_is_where_it_was_among_the_others() -> None:
    desk = Desk(TemporalScheduler(), CAPPED, HALF)
    desk.runs(0, 0)
    desk.wants(1, 30)
    desk.drained(0, 1, 75, wants=True)
    before = desk.statement(0, 75)
    assert before.throttled
    assert before.lag_ns < -10 * MS
    desk.went(1, 2, 75)
    desk.tick(109.9)
    assert desk.statement(0, 109.9).throttled
    desk.tick(110)
    after, other = desk.statement(0, 110), desk.statement(1, 110)
    assert not after.throttled
    # Its distance to the other: to a clock that counts it again, that is half on each side.
    assert after.lag_ns - other.lag_ns == pytest.approx(before.lag_ns + 35 * MS, abs=4)


def test_only_its_own_withdrawn_lease_can_hold_up_a_partition() -> None:
    desk = Desk(SpatialScheduler(), *[Share(PPM // 5, sm_mpercent=m * 1000) for m in (60, 60, 20, 20)])
    desk.runs(0, 0)
    desk.wants(1, 1)
    (lease,) = leases(desk.wants(2, 4))
    desk.idle(2, 4.1)
    assert leases(desk.wants(3, 4.2))[0].after == ()
    again = leases(desk.wants(2, 4.3))[0]
    assert again.after == ((2, lease.epoch),)
    assert again.go_by_ns > again.start_ns
    desk.idle(2, 4.4)
    assert leases(desk.wants(2, 6.4))[0].after == ()


def test_who_is_penalised_stays_so_until_its_work_is_gone() -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF)
    desk.runs(0, 0)
    desk.wants(1, 10)
    desk.went(1, 2, 122.2)
    desk.idle(0, 130)
    assert desk.statement(0, 130).penalised
    desk.wants(0, 131)
    assert desk.statement(0, 131).penalised
    desk.drained(0, 1, 140, wants=False)
    assert not desk.statement(0, 140).penalised


def test_a_drain_ends_every_older_lease_of_its_vgpu() -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF)
    desk.runs(0, 0)
    desk.wants(1, 1)
    assert withdrawn(desk.idle(1, 16)) == [(1, 2)]
    assert [x.epoch for x in leases(desk.wants(1, 16.05)) if x.vgpu == 1] == [3]
    desk.tell(LeaseStarted(1, 2, 16 * MS), 16.1)  # its GO had crossed the withdrawal
    desk.tell(Drained(0, 1, 16 * MS, 0, wants=False), 17)
    desk.went(1, 3, 17.5)
    assert desk.statement(1, 18).held_ns == 2 * MS  # the older one's; the newer one pays once that has drained
    desk.tell(Drained(1, 3, 19 * MS, 0, wants=False), 30)
    statement = desk.statement(1, 30)
    assert (statement.tokens, statement.holds) == (2, False)
    assert (statement.held_ns, statement.overuse_ns) == (3 * MS, 3 * MS)
    assert desk.due_ms is None


def test_whoever_went_beside_an_older_lease_pays_from_the_drain_that_ends_it() -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF, HALF)
    desk.runs(0, 0)
    desk.wants(1, 1)
    assert withdrawn(desk.idle(1, 16)) == [(1, 2)]
    desk.wants(1, 16.05)
    desk.tell(LeaseStarted(1, 2, 16 * MS), 16.1)  # its GO had crossed the withdrawal
    desk.drained(0, 1, 17, wants=False)
    desk.went(1, 3, 60)
    (lease,) = leases(desk.wants(2, 61))
    assert lease.after == ((1, 3), (1, 2))
    desk.went(2, lease.epoch, 100)  # neither has drained
    assert desk.statement(2, 105).held_ns == 0
    desk.drained(1, 3, 105)
    assert desk.statement(2, 110).held_ns == 5 * MS


def test_equals_go_in_the_order_of_their_arrival() -> None:
    desk = Desk(SpatialScheduler(), Share(PPM // 3))
    for key in (5, 3):
        desk.tell(Added(key, Share(PPM // 3, sm_mpercent=60_000)), 7)
    desk.runs(0, 10)
    desk.wants(5, 11)
    desk.wants(3, 11)
    assert [x.vgpu for x in leases(desk.drained(0, 1, 12, wants=False))] == [5]
    accounts = desk.scheduler._accounts.all.values()  # type: ignore[attr-defined]
    assert [(a.key, a.order, a.served_ns) for a in accounts] == [(0, 0, 12 * MS), (5, 1, 7 * MS), (3, 2, 7 * MS)]


def test_where_nobody_competes_the_least_indebted_is_let_back_in() -> None:
    desk = Desk(TemporalScheduler(), HALF)
    desk.tell(Added(1, HALF, owed(-300)), 0)
    desk.tell(Added(2, HALF, owed(-200)), 0)
    desk.runs(0, 0)
    desk.wants(1, 1)
    desk.wants(2, 1)
    assert [desk.statement(key, 1).penalised for key in (1, 2)] == [True, True]
    assert spans(desk.drained(0, 1, 2, wants=False)) == [(2, 2, 2, None)]
    assert [desk.statement(key, 2).penalised for key in (1, 2)] == [True, False]


@pytest.mark.parametrize(("back_at", "early"), [(21.69, True), (21.7, False), (22.2, False), (30, False)])
def test_a_token_given_back_before_its_end_is_remembered(back_at: float, early: bool) -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF)
    desk.runs(0, 0)
    desk.wants(1, 10)
    desk.drained(0, 1, back_at, wants=False)
    assert desk.scheduler._accounts.all[0].returns_ppm == (62_500 if early else 0)  # type: ignore[attr-defined]
