"""One vGPU's account by hand: what is held, busy, overused and owed, to the nanosecond."""

from __future__ import annotations

import pytest

from gpuserver.core.scheduler.account import Account, real, virtual
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.leases import AccountState, Lease
from vgpu.share import PPM, Share

HALF = Share(PPM // 2, PPM // 2)
LARGE = (1 << 80) + 1
"""Beyond what a float can tell apart."""


def hold_of(epoch: int = 1, start_ns: int = 0, end_ns: int | None = 1000) -> ActiveLease:
    return ActiveLease(Lease(0, epoch, start_ns, end_ns), 100_000)


def gone(epoch: int = 1, at_ns: int = 0, end_ns: int | None = 1000, undrained: tuple[int, ...] = ()) -> ActiveLease:
    hold = hold_of(epoch, at_ns, end_ns)
    hold.go(at_ns, frozenset(undrained), grace_ns=100, tail_ns=0)
    return hold


def account_with(*holds: ActiveLease, share: Share = HALF) -> Account:
    return Account(0, 0, share, holds={h.lease.epoch: h for h in holds})


def test_virtual_time_is_exact_however_large() -> None:
    assert virtual(LARGE, PPM) == LARGE << 20
    assert virtual(3, 700_000) == 3 * PPM * 2**20 // 700_000
    assert real(LARGE << 20, PPM) == LARGE
    assert real(-1, PPM) == -1  # down, not towards zero


def test_before_its_go_a_lease_costs_nothing() -> None:
    hold = hold_of()
    assert (hold.held(500), hold.busy(500), hold.overuse(5000), hold.unsettled(500)) == (0, 0, 0, 0)


def test_from_its_go_on_a_lease_is_held_until_it_has_drained() -> None:
    hold = gone(at_ns=300, end_ns=1000)
    assert [hold.held(t) for t in (200, 300, 301, 1200)] == [0, 0, 1, 900]
    assert [hold.overuse(t) for t in (200, 1000, 1200)] == [0, 0, 200]
    assert gone(at_ns=300, end_ns=None).overuse(9000) == 0
    assert gone(at_ns=1500, end_ns=1000).overuse(1700) == 200  # a lease that begins after its end
    hold.settled_ns = 700
    assert [hold.unsettled(t) for t in (600, 700, 1200)] == [0, 0, 500]
    hold.idle_ns = 250
    assert [hold.busy(t) for t in (400, 550, 600)] == [0, 0, 50]


def test_an_overlap_is_paid_by_the_predecessor_at_most_for_the_grace() -> None:
    hold = gone(epoch=4, at_ns=1000, end_ns=None, undrained=(2, 3))
    assert [hold.held(t) for t in (1050, 1100, 1150)] == [0, 0, 50]
    assert [hold.unsettled(t) for t in (1050, 1150)] == [0, 50]
    hold.unshadow(9, 1010)
    assert hold.shadows == frozenset({2, 3})
    hold.unshadow(2, 1030)
    assert (hold.shadows, hold.usable_ns, hold.settled_ns) == (frozenset({3}), 1030, 1030)
    hold.unshadow(3, 1020)
    assert (hold.shadows, hold.usable_ns) == (frozenset(), 1030)
    assert (hold.held(1050), hold.unsettled(1050)) == (20, 20)
    late = gone(epoch=5, at_ns=1000, end_ns=None, undrained=(2,))
    late.unshadow(2, 4000)
    assert (late.usable_ns, late.settled_ns) == (1100, 1100)


def test_virtual_time_moves_with_its_deadline() -> None:
    account = Account(0, 0, HALF, time=100, deadline=130)
    account.shift_to(400)
    assert (account.time, account.deadline) == (400, 430)


def test_what_a_division_leaves_over_is_carried() -> None:
    account = Account(0, 0, Share(700_000))
    for _ in range(7):
        account.charge(1)
    assert account.time == virtual(7, 700_000)


def test_virtual_time_up_to_now_counts_every_lease() -> None:
    account = account_with(gone(1, 0, 100), gone(2, 100, 200))
    account.time = 7
    assert account.time_at(300) == 7 + virtual(300 + 200, PPM // 2)
    assert account.time == 7


def test_a_bucket_fills_by_the_limit_and_empties_by_what_is_busy() -> None:
    hold = gone(at_ns=1000, end_ns=None)
    hold.idle_ns = 30
    account = account_with(hold)
    account.bucket, account.bucket_at_ns = 400 * PPM, 900
    assert account.bucket_at(1100) == 400 * PPM + 200 * (PPM // 2) - 70 * PPM


def test_a_bucket_is_clamped_with_what_is_held_charged() -> None:
    account = account_with(gone(at_ns=0))
    account.refill(1000, full_ns=100)
    assert (account.bucket, account.bucket_at_ns) == (500 * PPM, 1000)
    account.holds[1].idle_ns = 700
    account.refill(1000, full_ns=100)
    assert account.bucket_at(1000) == 100 * PPM
    account.holds = {2: hold_of(2)}  # published, not begun
    account.refill(1000, full_ns=100)
    assert account.bucket == 100 * PPM
    account.bucket = -300 * PPM  # no lower bound
    account.refill(1200, full_ns=100)
    assert account.bucket == -200 * PPM


def test_the_hand_over_cost_is_averaged_within_its_bounds() -> None:
    account = Account(0, 0, HALF)
    account.learn(0, 0, 50, 1000)
    assert account.handover_ns == 0
    account.learn(0, 400, 50, 1000)
    assert account.handover_ns == 400
    account.learn(0, 5, 50, 1000)
    assert account.handover_ns == (15 * 400 + 5) // 16
    account.learn(0, 9999, 50, 1000)
    assert account.handover_ns == (15 * 375 + 4000) // 16  # one sample counts for no more than four times the bound
    account.learn(0, 0, 50, 1000)
    assert account.handover_ns == 601
    for _ in range(99):
        account.learn(0, 4000, 50, 1000)
    assert account.handover_ns == 1000  # the mean is clamped, not the samples
    for _ in range(99):
        account.learn(0, 1, 50, 1000)
    assert account.handover_ns == 50


def test_the_longest_kernel_decays_by_an_eighth() -> None:
    account = Account(0, 0, HALF)
    account.learn(8008, 0, 50, 1000)
    account.learn(100, 0, 50, 1000)
    assert account.longest_kernel_ns == 7007
    account.learn(1, 0, 50, 1000)
    assert account.longest_kernel_ns == 6131  # whole nanoseconds, rounded down
    account.learn(0, 0, 50, 1000)
    assert account.longest_kernel_ns == 6131
    account.learn(9000, 0, 50, 1000)
    assert account.longest_kernel_ns == 9000


def test_leases_add_up_in_the_books() -> None:
    first, second = gone(3, 0, 100), gone(5, 200, 300)
    first.idle_ns = 20
    account = account_with(first, second)
    account.bucket = 1000 * PPM + 1
    account.close(second, 340)
    assert (account.served_ns, account.last_epoch, list(account.holds)) == (340, 5, [3])
    account.close(first, 150)
    assert (account.served_ns, account.last_epoch, account.holds) == (150, 5, {})
    book = AccountState(lag_ns=-5, bucket_ns=1000 - 140 - 130, held_ns=290, busy_ns=270, overuse_ns=90, tokens=2)
    assert account.book(-5, 0) == book
    assert isinstance(account.book(0, 0).bucket_ns, int)


def test_the_part_of_leases_given_back_early_is_remembered_for_about_sixteen() -> None:
    seen = []
    account = account_with()
    for early in (None, True, True, False):
        account.holds = {1: gone(1)}
        account.close(account.holds[1], 10, **({} if early is None else {"early": early}))
        seen.append(account.returns_ppm)
    assert seen == [0, 62_500, 121_093, 113_524]
    assert isinstance(account.returns_ppm, int)


@pytest.mark.parametrize(("guarantee_ppm", "counted"), [(0, 1), (1, 1), (5, 5)])
def test_a_guarantee_of_nothing_still_divides(guarantee_ppm: int, counted: int) -> None:
    assert Account(0, 0, Share(guarantee_ppm)).guarantee == counted
