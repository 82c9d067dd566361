"""What the temporal scheduler says after each event, in named situations.

Times are milliseconds. A lease reads (vGPU, epoch, start, end). The period is 40 ms, a decision takes 0.2 ms to have
effect, the window is 12 ms: a holder that must end does so 12.2 ms after somebody else came.
"""

from __future__ import annotations

import pytest

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.accounts import InvariantError
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.leases import AccountState, Added, Lease
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.desk import GRANTED_ONLY, MS, Desk, leases, spans, withdrawn
from tests.core.planted import plant
from vgpu.share import PPM, Priority, Share

HALF = Share(PPM // 2)
QUARTER = Share(PPM // 4)
CAPPED = Share(PPM // 2, PPM // 2)
HIGH = Share(PPM // 4, priority=Priority.HIGH)
LOW = Share(PPM // 4, priority=Priority.LOW)


def desk(*shares: Share) -> Desk:
    return Desk(TemporalScheduler(), *shares)


def pair() -> Desk:
    """vGPU 0 holds from 0 on; vGPU 1 came at 10 and has the next lease, from 22.2 on."""
    two = desk(HALF, HALF)
    two.runs(0, 0)
    commands = two.wants(1, 10)
    assert spans(commands) == [(0, 1, 0, 22.2), (1, 2, 22.2, 42.2)]
    return two


def test_epochs_go_on_beyond_those_of_another_gpu() -> None:
    """From where somebody comes who has seen them; they never go back."""
    one = desk(HALF, HALF)
    one.scheduler.skip_to(1000)
    one.scheduler.skip_to(10)
    assert [epoch for _, epoch, *_ in spans(one.wants(0, 0))] == [1000]
    assert one.scheduler.next_epoch == 1001


def test_alone_a_lease_has_no_end() -> None:
    one = desk(HALF)
    assert leases(one.wants(0, 3)) == [
        Lease(0, 1, 3 * MS, None, go_by_ns=8 * MS, early=True, window_ns=DEFAULT_POLICY.window_ns)
    ]
    assert one.due_ms is None


def test_the_next_lease_waits_for_the_holder_a_token_long_and_twice_a_known_kernel() -> None:
    for kernel_ms, patience in ((0, 20), (8, 20), (30, 60), (90, 100)):
        two = desk(HALF, HALF)
        two.runs(0, 0)
        two.observed(0, 1, 1, longest_kernel_ns=kernel_ms * MS)
        following = leases(two.wants(1, 10))[-1]
        assert following.after == ((0, 1),)
        assert following.go_by_ns == round((22.2 + patience) * MS)
        assert following.early


def test_two_take_turns() -> None:
    two = pair()
    assert two.due_ms is None
    assert two.drained(0, 1, 22.3) == []
    # vGPU 0's 2.3 ms above its token of 20 ms come off its next one.
    assert spans(two.went(1, 2, 22.3)) == [(0, 3, 42.3, 60)]
    two.drained(1, 2, 42.4)
    assert spans(two.went(0, 3, 42.4)) == [(1, 4, 60.1, 80)]
    # An early return: GO is on its way, so the rest follows at once.
    assert two.drained(0, 3, 50, wants=False) == []
    assert spans(two.went(1, 4, 50.1)) == [(1, 4, 50.1, None)]


@pytest.mark.parametrize(("handover_us", "end"), [(2000, 4.5), (400, 4), (100, 3)])
def test_an_open_ended_lease_stays_for_five_hand_overs(handover_us: int, end: float) -> None:
    """Which only matters where the window is short: below a higher class."""
    three = desk(LOW, LOW, HIGH)
    three.runs(0, 0)
    (lease,) = leases(three.drained(0, 1, 2, handover_cost_ns=handover_us * 1000))
    three.went(0, lease.epoch, 2)
    assert spans(three.wants(1, 2.5))[0] == (0, 2, 2, end)


def test_who_gives_up_is_forgotten_and_who_comes_next_waits_for_what_may_have_crossed() -> None:
    two = pair()
    commands = two.idle(1, 11)
    assert withdrawn(commands) == [(1, 2)]
    assert spans(commands) == [(0, 1, 0, None)]
    following = leases(two.wants(1, 11.5))[-1]
    assert following.after == ((0, 1), (1, 2))
    assert following.go_by_ns == round(43.7 * MS)
    assert withdrawn(two.idle(1, 11.6)) == [(1, 3)]
    assert leases(two.wants(1, 14))[-1].after == ((0, 1),)  # 2 ms later nothing can have crossed any more


def test_a_higher_class_ends_the_lease_as_soon_as_possible() -> None:
    three = desk(LOW, HALF, HIGH)
    assert three.runs(0, 0).window_ns == DEFAULT_POLICY.window_low_ns
    assert spans(three.wants(1, 1)) == [(0, 1, 0, 1.45), (1, 2, 1.45, pytest.approx(28.116666))]
    three.drained(0, 1, 1.4)
    three.went(1, 2, 1.45)
    commands = three.wants(2, 5)
    assert spans(commands)[0] == (1, 2, 1.45, 5.45)
    granted = leases(commands)[-1]
    assert (granted.vgpu, granted.start_ns, granted.window_ns) == (2, 5.45 * MS, DEFAULT_POLICY.window_ns)


def test_a_higher_class_that_is_ahead_of_its_share_ends_nothing() -> None:
    two = desk(LOW, HIGH)
    two.runs(1, 0)
    two.wants(0, 1)
    two.drained(1, 1, 50, wants=True)
    two.went(0, 2, 50)
    assert two.statement(1, 52).lag_ns < -5 * MS
    assert leases(two.tick(52)) == []


@pytest.mark.parametrize(("ahead_ms", "end"), [(10.9, 1.45), (11.1, 3)])
def test_a_higher_class_may_be_a_quarter_of_a_token_ahead(ahead_ms: float, end: float) -> None:
    """A token is 20 ms; vGPU 0 held 1 ms, and to a clock that counts both, half of the distance is vGPU 1's own. Where
    vGPU 1 is too far ahead, vGPU 0 stays for five hand-overs like beside any other."""
    two = desk(LOW)
    two.tell(Added(1, HIGH, AccountState(-round(ahead_ms * MS), 0, 0, 0, 0, 0)), 0)
    two.runs(0, 0)
    two.drained(0, 1, 0.5, handover_cost_ns=MS)
    two.went(0, 2, 0.5)
    commands = two.wants(1, 1)
    assert spans(commands)[0] == (0, 2, 0.5, end)
    assert spans(commands)[1][:3] == (1, 3, end)
    if end > 2:  # what vGPU 0 has held in the meantime makes up for it, and its successor comes earlier too
        commands = two.tick(2)
        assert spans(commands)[0] == (0, 2, 0.5, 2.45)
        assert leases(commands)[1].start_ns == 2.45 * MS
        assert leases(commands)[1].go_by_ns == pytest.approx(22.45 * MS)


def test_a_limit_ends_a_lease_and_its_refill_begins_the_next() -> None:
    one = desk(CAPPED).ganged(0)
    assert one.runs(0, 0).end_ns == 40 * MS
    assert one.due_ms == 38
    assert one.tick(37.9) == []
    assert spans(one.tick(38)) == [(0, 1, 0, 60)]  # 20 ms are left at 40
    assert one.due_ms == 58
    assert one.tick(58) == []
    assert one.due_ms == 62  # it is late then
    one.drained(0, 1, 60)
    assert one.due_ms == 80
    assert one.tick(79.9) == []
    assert spans(one.tick(80)) == [(0, 2, 80, 100)]


def test_an_open_ended_lease_that_is_about_to_begin_gets_an_end_when_somebody_comes() -> None:
    three = desk(Share(400_000, 400_000), HALF, Share(PPM // 10)).ganged(0)
    assert three.runs(0, 0).end_ns == 32 * MS
    assert spans(three.wants(1, 1)) == [(1, 2, 32, None)]  # at 32 ms vGPU 0 is dry
    assert three.tick(31.55) == []
    # 0.5 ms before its start a lease counts as started: nobody takes its place, but it is not for ever any more.
    ((vgpu, epoch, start, end),) = spans(three.wants(2, 31.6))
    assert (vgpu, epoch, start) == (1, 2, 32)
    assert end == pytest.approx(32 + 40 * 0.5 / 0.9, abs=0.001)  # a token, as it was when vGPU 1 came
    assert three.tick(31.7) == []
    three.drained(0, 1, 31.72)
    assert (1, 2) in [s[:2] for s in spans(three.went(1, 2, 31.75))]  # its GO may have found no end


@pytest.mark.parametrize(("at", "displaced"), [(12.69, True), (12.7, False), (13.1, False)])
def test_half_a_millisecond_before_its_start_a_lease_counts_as_started(at: float, displaced: bool) -> None:
    three = desk(HALF, QUARTER, QUARTER)
    three.runs(0, 0)
    assert spans(three.wants(1, 1))[1][:3] == (1, 2, 13.2)
    commands = three.wants(2, at)
    assert withdrawn(commands) == ([(1, 2)] if displaced else [])
    assert [s[:3] for s in spans(commands)] == ([(2, 3, 13.2)] if displaced else [])


def test_the_next_lease_has_no_end_once_the_holder_wants_nothing_more() -> None:
    two = pair()
    assert spans(two.idle(0, 15)) == [(1, 2, 22.2, None)]
    assert spans(two.wants(0, 16)) == [(1, 2, 22.2, 42.2)]


def test_a_go_that_may_have_crossed_a_revision_is_answered_with_the_end_that_holds() -> None:
    for went_at, answered in ((1.1, True), (1.3, False)):
        two = desk(HALF, HALF)
        two.wants(0, 0)
        assert spans(two.wants(1, 1)) == [(0, 1, 0, 13.2)]
        commands = two.went(0, 1, went_at)
        assert [s[:2] for s in spans(commands)] == ([(0, 1)] if answered else []) + [(1, 2)]
    two = pair()
    assert [s[:2] for s in spans(two.changed(1, QUARTER, 12))] == [(1, 2)]
    two.drained(0, 1, 12.1)
    assert (1, 2) in [s[:2] for s in spans(two.went(1, 2, 12.15))]


def test_a_holder_gets_the_short_window_with_its_end_where_a_higher_class_has_come_to_be() -> None:
    two = desk(HALF, QUARTER)
    assert two.runs(0, 0).window_ns == 12 * MS
    two.tell(Added(2, HIGH), 1)
    assert [x.window_ns for x in leases(two.wants(1, 2))] == [250_000, 250_000]


@pytest.mark.parametrize(("debt_ms", "penalised"), [(100, False), (100.001, True)])
def test_a_debt_beyond_the_grace_is_paid_outside_the_competition(debt_ms: float, penalised: bool) -> None:
    one = desk(HALF)
    one.tell(Added(1, HALF, AccountState(-round(debt_ms * MS), 0, 0, 0, 0, 0)), 0)
    one.runs(0, 0)
    one.wants(1, 0)
    assert one.statement(1, 0).penalised is penalised


def test_a_small_debt_bars_nobody_however_long_the_others_have_run() -> None:
    two = desk(HALF, HALF)
    two.runs(0, 0)
    two.wants(1, 1000)
    two.drained(0, 1, 1013)
    assert not two.statement(0, 1013).penalised


def test_a_finite_lease_is_followed_by_whoever_comes() -> None:
    two = desk(CAPPED, HALF).ganged(0)
    two.runs(0, 0)
    assert spans(two.wants(1, 1)) == [(1, 2, 40, 60)]
    assert two.due_ms == 42  # it is late then
    two.drained(0, 1, 13.2)
    assert spans(two.went(1, 2, 13.2)) == [(0, 3, 33.2, 60)]


def test_one_that_does_not_drain_is_penalised_until_the_others_have_caught_up() -> None:
    two = pair()
    assert spans(two.went(1, 2, 122.2)) == [(1, 2, 122.2, None)]
    assert two.statement(0, 122.2).penalised
    two.drained(0, 1, 200)
    assert two.statement(0, 200).penalised
    assert two.due_ms == 400  # as long as it has held
    assert two.tick(399.9) == []
    assert spans(two.tick(400)) == [(1, 2, 122.2, 412.2), (0, 3, 412.2, 432.2)]
    two = pair()
    two.went(1, 2, 122.2)
    two.drained(0, 1, 200)
    assert spans(two.drained(1, 2, 207, wants=False)) == [(0, 3, 207, None)]  # nobody else competes


def test_a_debt_is_paid_at_the_pace_of_whoever_competes() -> None:
    two = desk(HALF, HALF)
    two.runs(0, 0)
    two.wants(1, 100)  # with the idle credit of 20 ms
    two.went(1, 2, 212.2)
    two.drained(0, 1, 300)
    assert two.statement(0, 300).penalised
    assert two.due_ms == 300 + (300 - 80)


@pytest.mark.parametrize(("short_ms", "length_ms"), [(2, 22), (2.4, 22.4), (2.6, 2.6), (5, 5)])
def test_less_than_half_a_shortest_token_is_added_to_the_next(short_ms: float, length_ms: float) -> None:
    two = pair()
    two.drained(0, 1, 22.2)
    two.went(1, 2, 22.2)
    two.drained(1, 2, 42.2)
    two.went(0, 3, 42.2)
    end = 60 - short_ms  # its token ends at 60: it has held 2.2 ms too much before
    two.drained(0, 3, end)
    commands = two.went(1, 4, end)
    (following,) = [x for x in leases(commands) if x.vgpu == 0]
    assert following.end_ns is not None
    assert following.end_ns - following.start_ns == pytest.approx(length_ms * MS, abs=2)


def test_who_is_alone_owes_nobody() -> None:
    one = desk(HALF)
    one.runs(0, 0)
    one.drained(0, 1, 1000)
    assert not one.statement(0, 1000).penalised


def holding(start: int = 0, end: int | None = 10, epoch: int = 1, vgpu: int = 0, went: bool = True) -> ActiveLease:
    hold = ActiveLease(Lease(vgpu, epoch, start, end), 100_000)
    if went:
        hold.go(start, frozenset(), 0, 0)
    return hold


@pytest.mark.parametrize(
    ("current", "following", "changes", "complaint"),
    [
        (None, holding(), {}, "no vGPU holds"),
        (holding(vgpu=1), None, {}, "no account knows"),
        (holding(epoch=2), None, {}, "no account knows"),
        (holding(end=None), None, {"share": CAPPED}, "for a vGPU with a limit"),
        (holding(end=None), holding(20, 30, 2), {}, "has itself begun"),
        (holding(), holding(20, 30, 2, went=True), {}, "has itself begun"),
        (holding(went=False), holding(20, 30, 2, went=False), {}, "has not begun"),
        (holding(), holding(9, 30, 2, went=False), {}, "starts before"),
        (holding(end=None), holding(20, 30, 2, went=False), {}, "starts before"),
    ],
)
def test_contradictions_are_found(
    current: ActiveLease | None, following: ActiveLease | None, changes: dict[str, object], complaint: str
) -> None:
    scheduler = TemporalScheduler(GRANTED_ONLY, first_epoch=9)
    account = Account(0, 0, HALF, wants=True, competing=True)
    for name, value in changes.items():
        setattr(account, name, value)
    account.take_share(account.share)
    account.holds = {h.lease.epoch: h for h in (current, following) if h is not None and h.lease.vgpu == 0}
    if current is not None and current.lease.epoch == 2:
        account.holds = {2: holding(epoch=2)}  # another one of that name
    plant(scheduler, account)
    scheduler._holders.current, scheduler._holders.next = current, following
    with pytest.raises(InvariantError, match=complaint):
        scheduler.check()


def test_somebody_who_waits_for_nothing_is_found() -> None:
    scheduler = TemporalScheduler(GRANTED_ONLY, first_epoch=9)
    one = Account(0, 0, HALF, wants=True, competing=True)
    plant(scheduler, one)
    with pytest.raises(InvariantError, match="a vGPU waits and none holds"):
        scheduler.check()
    current = holding(end=None, vgpu=1)
    plant(scheduler, one, Account(1, 1, HALF, wants=True, competing=True, holds={1: current}))
    scheduler._holders.current = current
    with pytest.raises(InvariantError, match="a vGPU waits beside the open-ended"):
        scheduler.check()
    current.lease = Lease(1, 1, 0, 10)
    scheduler.check()


@pytest.mark.parametrize(
    ("drained_ms", "fair_ms"),
    [(22.3, 22.3), (22.5, 22.5), (22.9, 22.5), (24.0, 23.0)],
    ids=["a tail", "half a millisecond", "a little longer", "a slice of its successor's in between"],
)
def test_at_a_tail_the_next_one_goes_and_neither_pays_twice(drained_ms: float, fair_ms: float) -> None:
    two = pair()
    assert two.went(1, 2, 22.0) == []
    assert not two.statement(0, 22.1).penalised
    commands = two.drained(0, 1, drained_ms)
    assert [lease.vgpu for lease in leases(commands)] == [0], "its next lease is published as ever"
    two.drained(1, 2, 42.0)
    held = [two.statement(key, 42.0).held_ns / MS for key in (0, 1)]
    assert held == pytest.approx([fair_ms, 42.0 - fair_ms])


def test_who_is_passed_by_is_penalised_and_pays_for_all_of_the_overlap() -> None:
    two = pair()
    two.went(1, 2, 42.2)
    assert two.statement(0, 42.3).penalised
    two.drained(0, 1, 50)
    two.drained(1, 2, 62.2)
    assert [two.statement(key, 62.2).held_ns / MS for key in (0, 1)] == pytest.approx([50, 12.2])


def test_a_tail_that_does_not_end_is_waited_for_once() -> None:
    """vGPU 0 says that it is about to drain and does not. The first of the others goes for that; the second waits for
    it as long as for anybody; from then on it is penalised."""
    three = desk(QUARTER, QUARTER, QUARTER)
    three.runs(0, 0)
    three.wants(1, 1)
    (first,) = (lease for lease in leases(three.wants(2, 1)) if lease.vgpu != 0)
    said = three.went(first.vgpu, first.epoch, 13)
    assert not three.statement(0, 13).penalised
    said += three.drained(first.vgpu, first.epoch, 26)
    (second,) = leases(said)
    assert second.vgpu != 0
    assert (0, 1) in second.after
    three.went(second.vgpu, second.epoch, second.go_by_ns / MS)
    assert three.statement(0, second.go_by_ns / MS).penalised
