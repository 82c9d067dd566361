"""Whom the spatial scheduler chooses, by which clock and which charge: its quantities on accounts made by hand.

V is a second, everybody's guarantee half the time where nothing else is said.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuserver.core.scheduler.account import FRACTION_BITS, Account, real, virtual
from gpuserver.core.scheduler.accounts import InvariantError
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.leases import Lease
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from tests.core.desk import GRANTED_ONLY, MS, share
from tests.core.planted import plant
from vgpu.share import PPM, Priority


def went(start_ms: int, end_ms: int | None) -> ActiveLease:
    hold = ActiveLease(Lease(0, 1, start_ms * MS, None if end_ms is None else end_ms * MS), 60_000)
    hold.go(start_ms * MS, frozenset(), 0, 0)
    return hold


def account(
    key: int, sm_percent: int, owed_ms: float, *, waited_ms: float = 1, priority: Priority = Priority.NORMAL
) -> Account:
    """One that waits; its guarantee is half the time. V is a second."""
    half = share(0.5, sm_percent, priority=priority)
    time = (1000 * MS << FRACTION_BITS) - virtual(round(owed_ms * MS), half.guarantee_ppm)
    since = 1000 * MS - round(waited_ms * MS)
    return Account(key, key, half, wants=True, competing=True, time=time, waiting_since_ns=since)


def scheduler_with(*accounts: Account) -> SpatialScheduler:
    scheduler = SpatialScheduler(GRANTED_ONLY)
    plant(scheduler, *accounts)
    scheduler._time._last, scheduler._time._last_ns = 1000 * MS << FRACTION_BITS, 1000 * MS
    return scheduler


@pytest.mark.parametrize(
    ("accounts", "chosen"),
    [
        ([account(0, 60, 5), account(1, 60, 9)], [1]),
        ([account(0, 60, 9), account(1, 50, 5), account(2, 50, 5)], [1, 2]),
        # four rounds of its guarantee: 80 ms at a half
        ([account(0, 60, 5, waited_ms=80), account(1, 60, 9)], [1]),
        ([account(0, 60, 5, waited_ms=80.001), account(1, 60, 9)], [0]),
        ([account(0, 60, 5, waited_ms=90), account(1, 60, 9, waited_ms=90), account(2, 40, 0)], [1, 2]),
        ([account(0, 60, 5, waited_ms=90), account(1, 41, 90)], [0]),
        ([account(0, 100, 5, waited_ms=90), account(1, 100, 90)], [0]),
        # a high one first, unless it is ahead by more than a quarter of a round
        ([account(0, 60, 90), account(1, 60, -2.5, priority=Priority.HIGH)], [1]),
        ([account(0, 60, 90), account(1, 60, -2.500001, priority=Priority.HIGH)], [0]),
        ([account(0, 60, 90), account(1, 60, 0, priority=Priority.HIGH), account(2, 40, 0)], [1, 2]),
        ([account(0, 60, 90), account(1, 60, 0, priority=Priority.LOW)], [0]),
        # however far ahead: who fits is not left out
        ([account(0, 60, 5), account(1, 40, -500)], [0, 1]),
        ([account(0, 60, 5), account(1, 30, -500), account(2, 40, -400)], [0, 2]),
    ],
)
def test_the_best_packed_set(accounts: list[Account], chosen: list[int]) -> None:
    scheduler = scheduler_with(*(replace(a) for a in accounts))
    found = scheduler._choice.choose(995 * MS, 1000 * MS)
    assert sorted(a.key for a in found) == chosen


def late(key: int, sm_percent: int, drains_ms: float) -> Account:
    """One that will not have drained at the boundary, nor is owed anything."""
    one = account(key, sm_percent, -10)
    one.holds[1] = went(960, 970)
    one.holds[1].drains_by_ns = round(drains_ms * MS)
    return one


@pytest.mark.parametrize(
    ("kernel_ms", "drains_ms", "wide_owed_ms", "chosen"),
    [
        (10, 1005, 90, [1]),  # done when the late one's SMs are free again
        (10.001, 1005, 90, []),  # the wide one would have to wait for it
        (20, 1010.001, 90, [1]),
        (20, 1010, 90, []),
        (30, 1005, 1, [1]),  # it is chosen anyway once nobody is late
        (30, 970, 90, []),  # nobody knows when the late one drains
    ],
)
def test_beside_a_late_one_nobody_begins_a_kernel_that_keeps_out_who_is_owed_more(
    kernel_ms: float, drains_ms: float, wide_owed_ms: float, chosen: list[int]
) -> None:
    narrow, wide = account(1, 40, 5), account(2, 100, wide_owed_ms)
    if wide_owed_ms == 1:
        narrow, wide = account(1, 40, 50), account(2, 80, 1)
    narrow.longest_kernel_ns = round(kernel_ms * MS)
    scheduler = scheduler_with(late(0, 40, drains_ms), narrow, wide)
    assert [a.key for a in scheduler._choice.choose(995 * MS, 1000 * MS)] == chosen


@pytest.mark.parametrize(
    ("kernel_ms", "others_ms", "owed_ms"),
    [
        (5, 5, 500),
        (5.000001, 5, 20.000002),
        (30, 5, 70),
        (30, 5.000001, 500),  # nobody has short kernels
        (30, 0, 70),  # or it is not known
        (100, 5, 210),
        (300, 5, 500),
        (5, 30, 500),
    ],
)
def test_beside_short_kernels_nobody_is_owed_without_bound_what_long_ones_cost(
    kernel_ms: float, others_ms: float, owed_ms: float
) -> None:
    """A round and two of its kernels, once they are longer than half a round. It was owed 500 ms."""
    waits, holds, other = account(0, 60, 500), account(1, 60, 500), account(2, 60, 0)
    for one, length_ms in ((waits, kernel_ms), (holds, kernel_ms), (other, others_ms)):
        one.longest_kernel_ns = round(length_ms * MS)
    holds.holds[1] = went(990, 1000)
    scheduler = scheduler_with(waits, holds, other)
    scheduler._time.limit_credit()
    scheduler._accounts.check()
    v = 1000 * MS << FRACTION_BITS
    assert real(v - waits.time, waits.guarantee) == round(owed_ms * MS)
    assert real(v - holds.time, holds.guarantee) == 500 * MS


def test_beside_a_late_one_only_who_is_owed_most_begins_early() -> None:
    for wide_owed_ms, chosen in ((1, [1]), (90, [])):
        narrow, wide = account(1, 40, 50), account(2, 80, wide_owed_ms)
        narrow.longest_kernel_ns = 6 * MS
        scheduler = scheduler_with(late(0, 40, 1005), narrow, wide)
        assert [a.key for a in scheduler._choice.choose(995 * MS, 1000 * MS)] == [1]  # it fits that round
        assert [a.key for a in scheduler._choice.choose(995 * MS, 1000 * MS, 5 * MS)] == chosen


def test_who_is_placed_first_stays_so_until_it_goes() -> None:
    forced, most_owed = account(0, 60, 5, waited_ms=90), account(1, 60, 90)
    forced.holds[1] = ActiveLease(Lease(0, 1, 1000 * MS, 1010 * MS), 60_000)
    scheduler = scheduler_with(forced, most_owed)
    assert [a.key for a in scheduler._choice.choose(996 * MS, 1000 * MS)] == [0]


def test_the_mean_is_weighted_with_the_guarantees() -> None:
    """500 ms of virtual time apart: three quarters of the way to the one with three times the guarantee, and 400 ms."""
    two = account(0, 60, 500), account(1, 60, 250)
    for one, guarantee in zip(two, (0.2, 0.6), strict=True):
        one.take_share(share(guarantee, 60))
    assert scheduler_with(*two)._time.clock(1000 * MS) == (0 + 500 * 3 // 4 + 400) * MS << FRACTION_BITS


@pytest.mark.parametrize(("owed_ms", "charged_ms"), [(4, 16), (0, 16), (-8, 16), (-10, 14), (-25, 6)])
def test_planned_time_is_charged_to_a_round_beyond_the_clock_and_overuse_in_full(owed_ms: int, charged_ms: int) -> None:
    """8 ms held at a guarantee of a half, 3 of them too many; the clock goes 8 ms further meanwhile."""
    holder = account(0, 60, owed_ms)
    hold = ActiveLease(Lease(0, 1, 1000 * MS, 1005 * MS), 60_000)
    hold.go(1000 * MS, frozenset(), 0, 0)
    scheduler = scheduler_with(holder)
    time = scheduler._time.charged(holder, hold, holder.time, 1008 * MS)
    assert time - holder.time == charged_ms * MS << FRACTION_BITS


@pytest.mark.parametrize(
    ("changes", "boundary_ms", "complaint"),
    [
        ({}, None, "vGPU 0 waits though all vGPUs fit"),
        ({"holds": {1: went(0, 10)}, "key": 0}, 20, None),
        ({"holds": {1: went(0, None)}}, None, None),
        ({"holds": {1: went(0, None)}}, 20, "open-ended lease in a round"),
        ({"holds": {1: went(0, None)}, "share": share(0.5, 60, 0.5)}, None, "open-ended lease in a round"),
        ({"holds": {1: went(0, 10), 2: went(0, 10)}}, 20, "leases of more than all SMs"),
        ({"holds": {1: went(0, None), 2: went(0, 10)}}, 20, "leases of more than all SMs"),
        ({"holds": {1: went(0, 4), 2: went(0, 10)}}, 20, None),  # overdue: no longer in force
        ({"holds": {1: went(0, 10), 2: ActiveLease(Lease(0, 2, 0, 10), 60_000)}}, 20, None),  # not begun
    ],
)
def test_contradictions_are_found(changes: dict[str, object], boundary_ms: int | None, complaint: str | None) -> None:
    one = account(0, 60, 0)
    for name, value in changes.items():
        setattr(one, name, value)
    one.take_share(one.share)
    one.holds = {e: replace(h, lease=replace(h.lease, epoch=e)) for e, h in one.holds.items()}
    scheduler = scheduler_with(one)
    scheduler._accounts.now_ns, scheduler._publisher.next_epoch = 5 * MS, 9
    scheduler._rounds.boundary_ns = None if boundary_ms is None else boundary_ms * MS
    if complaint is None:
        scheduler.check()
    else:
        with pytest.raises(InvariantError, match=complaint):
            scheduler.check()


def test_a_dry_bucket_is_not_chosen() -> None:
    dry, full = (
        replace(account(key, 60, 9 - key), share=share(0.5, 60, 0.5), bucket_at_ns=1000 * MS) for key in (0, 1)
    )
    dry.bucket, full.bucket = 20 * MS * PPM - 1, 20 * MS * PPM
    assert [a.key for a in scheduler_with(dry, full)._choice.choose(995 * MS, 1000 * MS)] == [1]


def test_class_then_debt_then_arrival() -> None:
    low, high = (account(k, 10, 50, priority=p) for k, p in ((0, Priority.LOW), (1, Priority.HIGH)))
    accounts = [low, account(4, 10, 7), account(3, 10, 7), account(2, 10, 8), high]
    ordered = scheduler_with(*accounts)._choice.most_owed_first(accounts, 1000 * MS)
    assert [a.key for a in ordered] == [1, 2, 3, 4, 0]


@pytest.mark.parametrize(
    ("owed_ms", "after_ms", "clock_ms"),
    [
        ((10, 0), 7, 1007),  # with the wall
        ((-10, -30), 0, 1020),  # everybody is ahead: the least of them (20 ms virtual)
        ((500, 300), 7, 1000 - 800 + 400),  # everybody is behind: 400 ms beyond the mean
    ],
)
def test_the_guarantee_clock(owed_ms: tuple[int, int], after_ms: int, clock_ms: int) -> None:
    scheduler = scheduler_with(*(account(key, 60, owed) for key, owed in enumerate(owed_ms)))
    assert scheduler._time.clock((1000 + after_ms) * MS) == clock_ms * MS << FRACTION_BITS
