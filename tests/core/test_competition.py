"""What both modes share, told by hand: who competes, what the books say at each moment, which reports are believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuserver.core.competition import Competition
from gpuserver.core.leases import (
    Added,
    Book,
    Drained,
    Mode,
    Priority,
    Share,
    Statement,
    Tick,
    Wants,
    Went,
)
from gpuserver.core.policy import PPM, Policy
from gpuserver.core.scheduler import make_scheduler
from gpuserver.core.spatial import SpatialScheduler
from gpuserver.core.temporal import TemporalScheduler
from tests.core.desk import MS, Desk, leases, spans, withdrawn

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


@BOTH
def test_books_show_a_running_lease_up_to_the_last_event(kind: type[Competition]) -> None:
    desk = Desk(kind(), CAPPED)
    assert desk.runs(0, 0).end_ns == 40 * MS  # its bucket: twice P·l
    desk.observed(0, 1, 10, idle_ns=2 * MS)
    assert desk.scheduler.books() == {
        0: Book(lag_ns=0, bucket_ns=37 * MS, held_ns=10 * MS, busy_ns=8 * MS, overuse_ns=0, tokens=0)
    }
    desk.observed(0, 1, 12, idle_ns=1 * MS)  # a gap that was seen stays seen
    (lease,) = leases(desk.drained(0, 1, 44, idle_ms=4))
    desk.went(0, lease.epoch, 50)
    desk.tick(53)
    (book,) = desk.scheduler.books().values()
    assert replace(book, lag_ns=0) == Book(
        lag_ns=0,
        bucket_ns=(40 * 2 + 53 - 2 * 43) * MS // 2,
        held_ns=47 * MS,
        busy_ns=43 * MS,
        overuse_ns=4 * MS,
        tokens=1,
    )
    assert all(isinstance(number, int) for number in (book.bucket_ns, book.lag_ns))


def test_a_lease_is_told_to_have_no_end_from_its_go_until_it_gets_one() -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF)
    (lease,) = leases(desk.wants(0, 0))
    assert not desk.statement(0, 0).open_ended
    desk.went(0, lease.epoch, 0)
    assert desk.statement(0, 9000).open_ended
    assert lease.epoch in {ending.epoch for ending in leases(desk.wants(1, 10_000))}
    assert desk.statement(0, 10_000).holds
    assert not desk.statement(0, 10_000).open_ended


@BOTH
def test_a_snapshot_tells_everything_and_changes_nothing(kind: type[Competition]) -> None:
    desk = Desk(kind(), CAPPED, Share(PPM // 4, priority=Priority.HIGH))
    desk.runs(0, 5)
    desk.observed(0, 1, 6, idle_ns=MS)
    expected = Statement(
        vgpu=0,
        guarantee_ppm=PPM // 2,
        limit_ppm=PPM // 2,
        priority=Priority.NORMAL,
        wants=True,
        holds=True,
        open_ended=False,
        throttled=False,
        barred=False,
        waiting_since_ns=5 * MS,
        lag_ns=0,
        bucket_ns=(40 + 5 - 9) * MS,
        held_ns=10 * MS,
        busy_ns=9 * MS,
        overuse_ns=0,
        tokens=0,
    )
    assert desk.scheduler.snapshot(15 * MS)[0] == expected
    assert isinstance(desk.statement(0, 15).bucket_ns, int)
    assert desk.scheduler.snapshot(15 * MS)[0] == expected
    other = desk.statement(1, 15)
    assert (other.wants, other.holds, other.waiting_since_ns, other.priority) == (False, False, None, Priority.HIGH)
    desk.drained(0, 1, 60, wants=True)
    assert desk.scheduler.books(50 * MS) == desk.scheduler.books()  # never as it was before the last event
    assert desk.scheduler.books(70 * MS)[0].bucket_ns == desk.scheduler.books()[0].bucket_ns + 10 * MS // 2
    throttled = desk.statement(0, 70)
    assert (throttled.throttled, throttled.holds, throttled.waiting_since_ns) == (True, False, 60 * MS)
    assert (throttled.held_ns, throttled.busy_ns, throttled.overuse_ns, throttled.tokens) == (
        55 * MS, 54 * MS, 15 * MS, 1,
    )  # fmt: skip
    assert throttled.bucket_ns == (2 * 40 + 65 - 2 * 54) * MS // 2  # full when it woke, at 5 ms


def owed(lag_ms: int) -> Book:
    return Book(lag_ns=lag_ms * MS, bucket_ns=10**9, held_ns=0, busy_ns=0, overuse_ns=0, tokens=0)


@pytest.mark.parametrize(("lag_ms", "asleep", "awake"), [(60, 20, 60), (-60, -60, -60), (7, 7, 20)])
def test_what_a_journal_says_is_owed_is_credited_once(lag_ms: int, asleep: int, awake: int) -> None:
    """Asleep, a vGPU is owed no more than the idle credit; what the journal says counts in full at its first waking."""
    desk = Desk(TemporalScheduler(), HALF)
    desk.tell(Added(1, HALF, owed(lag_ms)), 0)
    assert desk.scheduler.books()[1].lag_ns == asleep * MS
    desk.runs(0, 0)
    desk.tick(25)
    desk.wants(1, 25)  # V is vGPU 0's, 25 ms further
    waiting = desk.scheduler.books()
    apart = waiting[1].lag_ns - waiting[0].lag_ns
    assert apart == pytest.approx(max(awake, lag_ms + 25 if lag_ms < 0 else awake) * MS, abs=2)


def test_a_restored_bucket_is_never_fuller_than_a_new_one() -> None:
    desk = Desk(TemporalScheduler())
    for key, bucket_ms in enumerate((10, 900, -30)):
        desk.tell(Added(key, CAPPED, replace(owed(0), bucket_ns=bucket_ms * MS, held_ns=5, busy_ns=4, tokens=3)), 1000)
    assert [b.bucket_ns for b in desk.scheduler.books().values()] == [10 * MS, 40 * MS, -30 * MS]
    assert desk.scheduler.books()[0].held_ns == 5
    assert desk.wants(2, 1000) == []
    assert desk.due_ms == 1100  # −30 ms and a line of 20 ms, refilled by half


def test_a_bucket_saves_up_for_a_wait_and_less_asleep() -> None:
    desk = Desk(SpatialScheduler(), CAPPED, Share(PPM, sm_mpercent=100_000))
    desk.tick(900)
    assert desk.scheduler.books()[0].bucket_ns == 40 * MS
    desk.runs(1, 900)
    desk.wants(0, 901)
    desk.tick(2000)
    assert desk.scheduler.books()[0].bucket_ns == 100 * MS  # 200 ms of its limit
    assert isinstance(desk.scheduler.books()[0].bucket_ns, int)
    desk.tell(Added(2, Share(10_000, 10_000)), 2000)
    assert desk.scheduler.books()[2].bucket_ns == 10 * MS  # never less than two shortest tokens


@pytest.mark.parametrize("awake", [True, False])
def test_a_change_of_share_keeps_what_is_owed(awake: bool) -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF)
    desk.runs(0, 0)
    if awake:
        assert spans(desk.wants(1, 10))[-1] == (1, 2, 22.2, 42.2)
    before = desk.statement(1, 12).lag_ns
    commands = desk.changed(1, Share(PPM // 4), 12)
    clock = desk.statement(0, 12).lag_ns
    assert desk.statement(1, 12).lag_ns - (0 if awake else before) == pytest.approx(-clock if awake else 0, abs=2)
    if awake:  # a third of the period, from the next token on
        assert leases(commands)[-1].epoch == 2
        assert leases(commands)[-1].end_ns == pytest.approx(22.2 * MS + 40 * MS / 3, abs=2)


def test_a_holder_pays_for_the_past_under_its_old_share() -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF)
    desk.runs(0, 0)
    desk.wants(1, 10)
    desk.drained(0, 1, 22.2)
    desk.went(1, 2, 22.2)
    before = desk.statement(1, 32).lag_ns
    desk.tick(32)
    desk.changed(1, Share(PPM // 10), 32)
    # Lag to the others is kept; over the new weights it is 5/6 of the distance instead of a half.
    assert desk.statement(1, 32).lag_ns == pytest.approx(2 * before * 5 // 6, rel=1e-6)
    assert desk.statement(1, 42).held_ns == 20 * MS - round(0.2 * MS)


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
def test_whoever_is_removed_leaves_nothing_behind(kind: type[Competition]) -> None:
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
    assert desk.statement(0, 125).barred
    assert desk.statement(1, 125).held_ns == 0
    desk.removed(0, 130)
    assert desk.statement(1, 135).held_ns == 5 * MS


@BOTH
def test_a_process_that_dies_while_it_waits_is_forgotten(kind: type[Competition]) -> None:
    desk = Desk(kind(), HALF, HALF)
    desk.runs(0, 0)
    commands = desk.wants(1, 1)
    assert desk.wants(1, 2) == []
    assert desk.statement(1, 2).waiting_since_ns == 1 * MS
    published = [x.epoch for x in leases(commands) if x.vgpu == 1]
    commands = desk.idle(1, 3)
    assert withdrawn(commands) == [(1, e) for e in published]
    statement = desk.statement(1, 3)
    assert (statement.wants, statement.holds, statement.waiting_since_ns) == (False, False, None)
    assert desk.idle(1, 4) == []
    assert desk.statement(0, 4).lag_ns == 0  # alone again


@BOTH
def test_a_go_that_crossed_its_withdrawal_is_charged(kind: type[Competition]) -> None:
    desk = Desk(kind(), *[replace(HALF, sm_mpercent=70_000)] * 3)
    desk.runs(0, 0)
    desk.wants(1, 1)
    desk.tick(15)
    assert withdrawn(desk.idle(1, 16)) == [(1, 2)]
    desk.went(1, 2, 16.05)
    assert desk.statement(1, 17).holds
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
def test_a_limit_throttles_only_once_what_crossed_its_withdrawal_has_drained(kind: type[Competition]) -> None:
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
def test_reports_that_crossed_a_decision_change_nothing(kind: type[Competition]) -> None:
    desk = Desk(kind(), HALF, HALF)
    desk.runs(0, 0)
    before = desk.scheduler.books()
    desk.tell(Went(0, 1, 0), 0)  # twice
    for epoch in (2, 9):
        desk.tell(Went(0, epoch, 0), 0)  # never published
    desk.tell(Went(1, 0, 0), 0)  # from before this scheduler
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
def test_time_never_runs_backwards(kind: type[Competition]) -> None:
    desk = Desk(kind(), CAPPED)
    desk.runs(0, 100)
    desk.tick(110)
    books = desk.scheduler.books()
    desk.scheduler.handle(Wants(0), 50 * MS)
    assert desk.scheduler.books() == books
    desk.tell(Drained(0, 1, 999 * MS, 0, wants=True), 120)  # a drain from the future happened now
    assert desk.statement(0, 120).held_ns == 20 * MS


@BOTH
def test_a_mode_takes_the_policy_it_is_given(kind: type[Competition]) -> None:
    policy = Policy(window_ns=3 * MS)
    mode = Mode.SPATIAL if kind is SpatialScheduler else Mode.TEMPORAL
    scheduler = make_scheduler(mode, policy)
    assert scheduler.policy is policy
    assert leases(Desk(scheduler, HALF).wants(0, 0))[0].window_ns == 3 * MS
    assert make_scheduler(mode).next_epoch == kind().next_epoch == 1


@pytest.mark.parametrize(("limit_ppm", "line"), [(300_001, 40 * 300_001), (1, 5 * MS)])
@BOTH
def test_a_throttled_vgpu_comes_back_to_the_nanosecond(kind: type[Competition], limit_ppm: int, line: int) -> None:
    """``line``: P·l, in nanoseconds, or the shortest token."""
    desk = Desk(kind())
    desk.tell(Added(0, Share(1, limit_ppm), replace(owed(0), bucket_ns=-7)), 0)
    assert desk.wants(0, 0) == []
    due = desk.scheduler.next_deadline_ns()
    assert due == -(-(line * PPM + 7 * PPM) // limit_ppm)
    assert desk.scheduler.handle(Tick(), due - 1) == []
    assert len(desk.scheduler.handle(Tick(), due)) == 1


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


def test_what_is_owed_to_one_that_waits_is_not_cut() -> None:
    wide = replace(HALF, sm_mpercent=60_000)
    desk = Desk(SpatialScheduler(), wide)
    desk.tell(Added(1, wide, owed(60)), 0)
    desk.runs(0, 0)
    assert desk.scheduler.books()[1].lag_ns == 20 * MS
    desk.wants(1, 1)
    assert not desk.statement(1, 1).holds
    assert desk.scheduler.books()[1].lag_ns >= 60 * MS


def test_who_is_barred_stays_so_until_its_work_is_gone() -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF)
    desk.runs(0, 0)
    desk.wants(1, 10)
    desk.went(1, 2, 122.2)
    desk.idle(0, 130)
    assert desk.statement(0, 130).barred
    desk.wants(0, 131)
    assert desk.statement(0, 131).barred
    desk.drained(0, 1, 140, wants=False)
    assert not desk.statement(0, 140).barred


def test_a_drain_ends_every_older_lease_of_its_vgpu() -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF)
    desk.runs(0, 0)
    desk.wants(1, 1)
    assert withdrawn(desk.idle(1, 16)) == [(1, 2)]
    assert [x.epoch for x in leases(desk.wants(1, 16.05)) if x.vgpu == 1] == [3]
    desk.tell(Went(1, 2, 16 * MS), 16.1)  # its GO had crossed the withdrawal
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
    desk.tell(Went(1, 2, 16 * MS), 16.1)  # its GO had crossed the withdrawal
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
    accounts = desk.scheduler._accounts.values()  # type: ignore[attr-defined]
    assert [(a.key, a.order, a.served_ns) for a in accounts] == [(0, 0, 12 * MS), (5, 1, 7 * MS), (3, 2, 7 * MS)]


def test_the_credit_of_a_small_share_is_two_of_its_tokens() -> None:
    desk = Desk(TemporalScheduler(), Share(950_000), Share(50_000))
    desk.runs(0, 0)
    desk.tick(500)
    assert desk.scheduler.books()[1].lag_ns == 10 * MS
    desk.observed(0, 1, 500)
    desk.wants(1, 500)
    assert leases(desk.tick(501)) == []


def test_where_nobody_competes_the_least_indebted_is_let_back_in() -> None:
    desk = Desk(TemporalScheduler(), HALF)
    desk.tell(Added(1, HALF, owed(-300)), 0)
    desk.tell(Added(2, HALF, owed(-200)), 0)
    desk.runs(0, 0)
    desk.wants(1, 1)
    desk.wants(2, 1)
    assert [desk.statement(key, 1).barred for key in (1, 2)] == [True, True]
    assert spans(desk.drained(0, 1, 2, wants=False)) == [(2, 2, 2, None)]
    assert [desk.statement(key, 2).barred for key in (1, 2)] == [True, False]


@pytest.mark.parametrize(("back_at", "early"), [(21.69, True), (21.7, False), (22.2, False), (30, False)])
def test_a_token_given_back_before_its_end_is_remembered(back_at: float, early: bool) -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF)
    desk.runs(0, 0)
    desk.wants(1, 10)
    desk.drained(0, 1, back_at, wants=False)
    assert desk.scheduler._accounts[0].returns_ppm == (62_500 if early else 0)  # type: ignore[attr-defined]
