"""What the books say at each moment, told by hand: lags, buckets, held and busy time; what a journal brings back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuserver.core.scheduler.base import SchedulerBase
from gpuserver.core.scheduler.leases import AccountSnapshot, AccountState, Added
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.desk import MS, Desk, leases, owed, spans
from vgpu.share import PPM, Priority, Share

HALF = Share(PPM // 2)
CAPPED = Share(PPM // 2, PPM // 2)
BOTH = pytest.mark.parametrize("kind", [TemporalScheduler, SpatialScheduler])


@BOTH
def test_books_show_a_running_lease_up_to_the_last_event(kind: type[SchedulerBase]) -> None:
    desk = Desk(kind(), CAPPED).ganged(0)
    assert desk.runs(0, 0).end_ns == 40 * MS  # its bucket: twice P·l
    desk.observed(0, 1, 10, idle_ns=2 * MS)
    assert desk.scheduler.books() == {
        0: AccountState(lag_ns=0, bucket_ns=37 * MS, held_ns=10 * MS, busy_ns=8 * MS, overuse_ns=0, tokens=0)
    }
    desk.observed(0, 1, 12, idle_ns=1 * MS)  # a gap that was seen stays seen
    (lease,) = leases(desk.drained(0, 1, 44, idle_ms=4))
    desk.went(0, lease.epoch, 50)
    desk.tick(53)
    (book,) = desk.scheduler.books().values()
    assert replace(book, lag_ns=0) == AccountState(
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
def test_a_snapshot_tells_everything_and_changes_nothing(kind: type[SchedulerBase]) -> None:
    desk = Desk(kind(), CAPPED, Share(PPM // 4, priority=Priority.HIGH)).ganged(0)
    desk.runs(0, 5)
    desk.observed(0, 1, 6, idle_ns=MS)
    expected = AccountSnapshot(
        vgpu=0,
        guarantee_ppm=PPM // 2,
        limit_ppm=PPM // 2,
        priority=Priority.NORMAL,
        wants=True,
        holds=True,
        open_ended=False,
        throttled=False,
        penalised=False,
        waiting_since_ns=5 * MS,
        lag_ns=0,
        bucket_ns=(40 + 5 - 9) * MS,
        held_ns=10 * MS,
        busy_ns=9 * MS,
        overuse_ns=0,
        tokens=0,
        runs=True,
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


def test_what_is_owed_to_one_that_waits_is_not_cut() -> None:
    wide = replace(HALF, sm_mpercent=60_000)
    desk = Desk(SpatialScheduler(), wide)
    desk.tell(Added(1, wide, owed(60)), 0)
    desk.runs(0, 0)
    assert desk.scheduler.books()[1].lag_ns == 20 * MS
    desk.wants(1, 1)
    assert not desk.statement(1, 1).holds
    assert desk.scheduler.books()[1].lag_ns >= 60 * MS


def test_the_credit_of_a_small_share_is_two_of_its_tokens() -> None:
    desk = Desk(TemporalScheduler(), Share(950_000), Share(50_000))
    desk.runs(0, 0)
    desk.tick(500)
    assert desk.scheduler.books()[1].lag_ns == 10 * MS
    desk.observed(0, 1, 500)
    desk.wants(1, 500)
    assert leases(desk.tick(501)) == []
