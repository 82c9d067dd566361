"""Whose turn it is in temporal mode, how long a token is, and how long a period (``eevdf.py``). Times are ms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuserver.core.scheduler.account import Account, virtual
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.leases import Drained, GangWindow, Lease, Measured
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, with_period
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.desk import GRANTED_ONLY, MS, Desk
from tests.core.planted import plant
from vgpu.share import PPM, Priority, Share

HALF = Share(PPM // 2)
CAPPED = Share(PPM // 2, PPM // 2)
HIGH = Share(PPM // 4, priority=Priority.HIGH)


def waiting(key: int, owed_ms: float, token_ms: float, *, served_ms: int = 0, share: Share = HALF) -> Account:
    """One that waits at V = 0: what it is owed, and how long its token would be."""
    time = -virtual(round(owed_ms * MS), share.guarantee_ppm)
    deadline = time + virtual(round(token_ms * MS), share.guarantee_ppm)
    return Account(
        key, key, share, wants=True, competing=True, time=time, deadline=deadline, served_ns=served_ms * MS
    )  # fmt: skip


def period_ms(of: Desk) -> float:
    assert isinstance(of.scheduler, TemporalScheduler)
    return of.scheduler.period_ns / MS


def test_a_token_is_worth_ten_hand_overs() -> None:
    scheduler = TemporalScheduler(GRANTED_ONLY)
    small, large = waiting(0, 0, 5, share=Share(10_000)), waiting(1, 0, 5, share=Share(990_000))
    plant(scheduler, small, large)
    assert scheduler._quanta.quantum(small) == 5 * MS
    small.handover_ns = 900_000
    assert scheduler._quanta.quantum(small) == 9 * MS


def test_a_token_is_no_longer_than_a_tenth_of_a_second() -> None:
    """However long the period: with hand-overs of 0.5 ms of eight vGPUs, one of 90 % would have 180 ms at a time."""
    scheduler = TemporalScheduler(replace(GRANTED_ONLY, period_ns=200 * MS))
    small, large = waiting(0, 0, 20, share=Share(100_000)), waiting(1, 0, 180, share=Share(900_000))
    plant(scheduler, small, large)
    assert (scheduler._quanta.quantum(small), scheduler._quanta.quantum(large)) == (20 * MS, 100 * MS)


def test_the_period_follows_what_hand_overs_cost() -> None:
    two = Desk(TemporalScheduler(), HALF, HALF)
    two.runs(0, 0)
    two.wants(1, 10)
    two.drained(0, 1, 22.2, handover_cost_ns=350_000)
    assert period_ms(two) == 40  # 0.35 ms of 0.7 % are 50 ms: exactly a quarter more, which is no reason yet
    two = Desk(TemporalScheduler(), HALF, HALF)
    two.runs(0, 0)
    two.wants(1, 10)
    two.drained(0, 1, 22.2, handover_cost_ns=357_000)
    assert period_ms(two) == 51
    two.went(1, 2, 22.2)
    two.drained(1, 2, 42.2, handover_cost_ns=500_000)
    assert period_ms(two) == 51  # not twice a second
    two.tick(1022.1)
    assert period_ms(two) == 51
    two.tick(1022.2)
    assert period_ms(two) == pytest.approx(0.857 / 0.007)


def test_the_period_stays_short_for_who_returns_early_or_is_of_a_high_class() -> None:
    two = Desk(TemporalScheduler(), HALF, HIGH)
    two.runs(0, 0)
    two.drained(0, 1, 5, handover_cost_ns=900_000)
    two.wants(1, 7)
    assert period_ms(two) == 40
    # of eleven leases; half of them, lately, is the bound
    for returns, period in ((10, pytest.approx(0.45 / 0.007)), (11, 40)):
        two = Desk(TemporalScheduler(), HALF, HALF)
        for lease in range(11):
            two.runs(0, 10 * lease)
            two.drained(0, lease + 1, 10 * lease + 5, wants=lease >= returns, handover_cost_ns=450_000)
            two.idle(0, 10 * lease + 6)
        two.wants(0, 120)
        two.wants(1, 121)
        assert period_ms(two) == period
    alone = Desk(TemporalScheduler(), HALF)
    alone.runs(0, 0)
    alone.tell(Drained(0, 1, MS, 0, True, 0, MS), 1)
    assert period_ms(alone) == 40


def test_the_period_is_shorter_where_all_bursts_are_short() -> None:
    """Two decoders: a step of 2 ms that waits for a turn of 25 ms is late by that."""
    for bursts_ms, period in (((2, 2), 24), ((2, 9), 51), ((0, 2), 51), ((2, 4), 24)):
        two = Desk(TemporalScheduler(), HALF, HALF)
        for key, burst_ms in enumerate(bursts_ms):
            two.tell(Measured(key, PPM, burst_ms * MS), 0)
        two.runs(0, 0)
        two.drained(0, 1, 2.2, handover_cost_ns=357_000)
        two.wants(1, 10)
        two.tick(1010)
        assert period_ms(two) == period, bursts_ms
    assert with_period(DEFAULT_POLICY, 100 * MS).period_short_ns == 100 * MS, "as asked for"


def test_another_policy_has_its_period_at_once() -> None:
    one = Desk(TemporalScheduler(), HALF)
    assert one.scheduler.period_ns == 40 * MS
    policy = replace(DEFAULT_POLICY, period_ns=20 * MS)
    one.scheduler.adopt(policy)
    assert one.scheduler.policy is policy
    assert one.scheduler.period_ns == 20 * MS


@pytest.mark.parametrize(
    ("accounts", "chosen", "length_ms"),
    [
        # deadlines 30 and 28 ms of virtual time: the earliest; a token is 20 ms
        ([waiting(0, -5, 10), waiting(1, 5, 19)], 1, 19),
        # 14 and 30: vGPU 0 is ahead by a quarter of a token, and then by more
        ([waiting(0, -5, 2), waiting(1, 5, 20)], 0, 2.5),
        ([waiting(0, -5.0001, 2), waiting(1, 5.0001, 20)], 1, 20),
        # 1 ms apart, over both: equal, so the longest unserved
        ([waiting(0, 0, 10, served_ms=5), waiting(1, 0, 10.5, served_ms=4)], 1, 10.5),
        ([waiting(0, 0, 10, served_ms=5), waiting(1, 0, 10.5001, served_ms=4)], 0, 10),
        ([waiting(0, 0, 10), waiting(1, 0, 10)], 0, 10),
        # neither shorter than half a shortest token nor longer than one and a half
        ([waiting(0, 0, 0.1), waiting(1, 0, 20)], 0, 2.5),
        ([waiting(0, 0, 90), waiting(1, 0, 90)], 0, 30),
    ],
)
def test_the_earliest_eligible_deadline(accounts: list[Account], chosen: int, length_ms: float) -> None:
    scheduler = TemporalScheduler(GRANTED_ONLY)
    plant(scheduler, *(replace(a) for a in accounts))
    choice = scheduler._eevdf.pick(10 * MS, None)
    assert choice is not None
    assert (choice.account.key, choice.length_ns, choice.alone) == (chosen, length_ms * MS, False)
    assert isinstance(choice.length_ns, int)


@pytest.mark.parametrize(("bucket_ms", "length_ms"), [(1, 2.5), (7, 7), (900, 20)])
def test_a_token_is_no_longer_than_its_bucket_lasts(bucket_ms: int, length_ms: float) -> None:
    scheduler = TemporalScheduler(GRANTED_ONLY)
    account = waiting(0, 0, 20, share=CAPPED)
    account.bucket, account.bucket_at_ns = bucket_ms * MS * PPM + 1, 10 * MS
    plant(scheduler, account)
    choice = scheduler._eevdf.pick(10 * MS, None)
    assert choice is not None
    assert (choice.length_ns, choice.alone, choice.open_ended) == (length_ms * MS, True, True)
    assert isinstance(choice.length_ns, int)
    account.gang_window = GangWindow()
    choice = scheduler._eevdf.pick(10 * MS, None)
    assert choice is not None
    assert not choice.open_ended  # it stops together with the others of its gang


def test_without_a_limit_no_bucket_runs_dry() -> None:
    account = waiting(0, 0, 20)
    hold = ActiveLease(Lease(0, 1, 0, 10), 100_000)
    hold.go(0, frozenset(), 0, 0)
    account.holds = {1: hold}
    account.bucket = -10 * MS * PPM
    assert not TemporalScheduler()._eevdf._dry_at(account, 10)
