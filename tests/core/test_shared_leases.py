"""The leases and allowances of sharers, to the nanosecond."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpuserver.core.scheduler.accounts import InvariantError
from gpuserver.core.scheduler.leases import Allow, Command, Lease, Measured
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.desk import MS, Desk, leases, spans, withdrawn
from tests.core.sharers import HEAVY, LIGHT, exclusive, held, sharer, sharing
from vgpu.share import PPM


def allows(commands: list[Command]) -> list[Allow]:
    return [c for c in commands if isinstance(c, Allow)]


def test_the_demand_is_measured_every_50_ms_while_two_compete() -> None:
    desk = sharing(sharer(), sharer())
    assert desk.due_ms == 50
    desk.tick(49.9)
    assert desk.due_ms == 50
    desk.tick(50)
    assert desk.due_ms == 100
    assert desk.scheduler.comparable() == [0, 1]
    assert desk.scheduler.metered() == [0, 1]


def test_one_alone_is_not_measured_and_is_metered_if_it_has_a_limit() -> None:
    for limit, metered, due_ms in ((1.0, [], None), (0.3, [0], 10)):
        desk = Desk(TemporalScheduler(), sharer(limit=limit))
        desk.runs(0, 0)
        assert desk.scheduler.comparable() == []
        assert desk.scheduler.metered() == metered
        assert desk.due_ms == due_ms


def test_a_shared_lease_begins_at_once_without_an_end_and_waits_for_none() -> None:
    desk = sharing(sharer(), sharer(), sharer())
    desk.drained(2, held(desk, 2)[0], 110, wants=False)
    (lease,) = leases(desk.wants(2, 150))
    assert lease == Lease(2, lease.epoch, 150 * MS, None, go_by_ns=150 * MS, window_ns=DEFAULT_POLICY.shared_window_ns)


def taking_turns() -> tuple[Desk, Lease]:
    """Of two that are heavy so far vGPU 0 holds, and the lease of vGPU 1 follows."""
    desk = Desk(TemporalScheduler(), sharer(), sharer())
    desk.runs(0, 0)
    desk.wants(1, 5)
    end = held(desk, 0)[1]
    assert end is not None
    desk.tick(end / MS - 1.5)
    following, _ = desk.scheduler.published(1)[-1]
    assert following.after == ((0, held(desk, 0)[0]),)
    return desk, following


def light(key: int) -> Measured:
    return Measured(key, round(LIGHT * PPM))


def test_a_turn_that_has_not_begun_becomes_a_shared_lease_that_waits_for_none() -> None:
    desk, following = taking_turns()
    at_ns = following.start_ns - MS
    commands = desk.tell_all([light(1)], at_ns / MS)
    (lease,) = [lease for lease in leases(commands) if lease.vgpu == 1]
    assert lease == Lease(
        *(1, following.epoch, at_ns, None),
        go_by_ns=at_ns,
        window_ns=DEFAULT_POLICY.shared_window_ns,
        early=True,
    )
    assert desk.scheduler.shared() == [1]
    (said,) = leases(desk.went(1, following.epoch, at_ns / MS))
    assert (said.epoch, said.end_ns) == (following.epoch, None), "its GO may have crossed the change"


def test_the_turn_after_a_lease_that_becomes_a_shared_one_waits_for_it_no_more() -> None:
    """It would wait as long as its patience allows, and penalise the light vGPU as one that does not drain."""
    desk, following = taking_turns()
    at_ms = following.start_ns / MS - 1
    (lease,) = [lease for lease in leases(desk.tell_all([light(0)], at_ms)) if lease.vgpu == 1]
    assert (lease.epoch, lease.after) == (following.epoch, ())
    desk.went(1, following.epoch, at_ms + 0.1)
    statement = desk.statement(0, at_ms + 0.1)
    assert (statement.shared, statement.penalised) == (True, False)


def test_the_turn_after_a_lease_that_is_about_to_end_waits_for_it() -> None:
    desk, following = taking_turns()
    desk.tell_all([light(0)], (following.start_ns - DEFAULT_POLICY.decision_ns) / MS)
    lease, _ = desk.scheduler.published(1)[-1]
    assert lease.after == following.after


def test_a_turn_that_is_about_to_end_becomes_no_shared_lease() -> None:
    for before_ns, shared in ((DEFAULT_POLICY.decision_ns + 1, [0]), (DEFAULT_POLICY.decision_ns, [])):
        desk, following = taking_turns()
        epoch, end = held(desk, 0)
        assert end == following.start_ns
        desk.tell_all([light(0)], (end - before_ns) / MS)
        assert desk.scheduler.shared() == shared
        assert held(desk, 0) == (epoch, None if shared else end)


def test_a_turn_that_has_begun_becomes_a_shared_lease_and_begins_when_it_did() -> None:
    desk, following = taking_turns()
    before, _ = desk.scheduler.published(0)[-1]
    desk.tell_all([light(0)], (following.start_ns - MS) / MS)
    after, _ = desk.scheduler.published(0)[-1]
    assert after == replace(before, end_ns=None, window_ns=DEFAULT_POLICY.shared_window_ns)


def test_the_last_one_takes_turns_again_once_another_one_comes() -> None:
    desk = sharing(sharer(), sharer())
    desk.drained(1, held(desk, 1)[0], 110, wants=False)
    desk.added(2, exclusive(), 110)
    desk.wants(2, 120)
    assert held(desk, 0)[1] == 120 * MS + DEFAULT_POLICY.decision_ns + DEFAULT_POLICY.window_ns


def test_a_shared_lease_that_has_not_begun_is_taken_back_once_its_vgpu_is_heavy() -> None:
    desk = sharing(sharer(), sharer(), sharer())
    desk.drained(2, held(desk, 2)[0], 110, wants=False)
    desk.wants(2, 120)
    epoch = held(desk, 2)[0]
    commands = desk.measured(121, LIGHT, LIGHT, HEAVY)
    assert withdrawn(commands) == [(2, epoch)]
    assert [(key, end) for key, _, _, end in spans(commands)] == [(2, None)], "it takes turns, and is the only one"


def test_the_only_one_that_turns_heavy_holds_the_turn_without_a_gap() -> None:
    desk = sharing(sharer(), sharer())
    epoch = held(desk, 1)[0]
    desk.measured(150, LIGHT, HEAVY)
    end = 150 * MS + DEFAULT_POLICY.decision_ns + DEFAULT_POLICY.shared_window_ns
    desk.tick(151)
    assert held(desk, 1) == (epoch, None)
    assert end > 151 * MS


def test_one_that_turns_heavy_while_another_one_holds_the_turn_waits_for_that_one() -> None:
    desk = sharing(sharer(), sharer())
    desk.added(2, sharer(), 110)
    desk.runs(2, 120)
    epoch = held(desk, 1)[0]
    desk.measured(150, LIGHT, HEAVY, HEAVY)
    assert held(desk, 1) == (epoch, 150 * MS + DEFAULT_POLICY.decision_ns + DEFAULT_POLICY.shared_window_ns)
    assert held(desk, 2)[1] is None
    desk.drained(1, epoch, 151)
    turn, _ = desk.scheduler.published(2)[-1]
    assert turn.end_ns is not None
    desk.tick(turn.end_ns / MS - 1.5)
    following, _ = desk.scheduler.published(1)[-1]
    assert following.after == ((2, turn.epoch),)


def test_a_drain_beside_sharers_may_take_a_time_slice_of_each_longer() -> None:
    """A token of 40 % is 16 ms long."""
    desk = sharing(sharer(0.1), sharer(0.1))
    desk.added(2, sharer(0.4), 110)
    desk.added(3, sharer(0.4), 110)
    desk.runs(2, 120)
    desk.wants(3, 121)
    desk.tick((held(desk, 2)[1] or 0) / MS - 1.5)
    following, _ = desk.scheduler.published(3)[-1]
    assert following.go_by_ns - following.start_ns == 16 * MS + 2 * DEFAULT_POLICY.slice_ns


@pytest.mark.parametrize("heavy", [False, True])
def test_a_sharer_saves_up_its_idle_credit_and_nothing_beside_turns(heavy: bool) -> None:
    """vGPU 1 uses nothing."""
    desk = sharing(sharer(0.4), sharer(0.2))
    if heavy:
        desk.added(2, sharer(0.4), 5)
        desk.runs(2, 10)
    for at_ms in range(10, 1001, 10):
        desk.observed(0, held(desk, 0)[0], at_ms, used_ns=at_ms * MS // 2)
        desk.tick(at_ms)
    saved_ns = 0 if heavy else DEFAULT_POLICY.idle_credit_ns
    assert desk.statement(1, 1000).lag_ns == pytest.approx(saved_ns, abs=3 * MS)


def test_under_a_limit_a_sharer_may_use_its_bucket_and_what_comes_in_12_ms() -> None:
    desk = sharing(sharer(limit=0.3), sharer())
    epoch = held(desk, 0)[0]
    commands = desk.observed(0, epoch, 50, used_ns=7 * MS)
    bucket_ns = desk.scheduler.books(50 * MS)[0].bucket_ns
    assert allows(commands) == [Allow(0, epoch, 7 * MS + bucket_ns + 3_600_000)]
    assert allows(desk.tick(59.9)) == []
    assert desk.due_ms == 60
    assert len(allows(desk.tick(60))) == 1


def curbed_for(desk: Desk, used: float, until_ms: int) -> int:
    """vGPU 0 waits, and gets 10 %; vGPU 1 uses so much. Until one window is over. What vGPU 1 has used, in ns."""
    used_ns = 0
    for at_ms in range(10, until_ms + 1, 10):
        used_ns = round(used * at_ms * MS)
        desk.observed(0, held(desk, 0)[0], at_ms, used_ns=at_ms * MS // 10)
        desk.observed(1, held(desk, 1)[0], at_ms, used_ns=used_ns)
        desk.measured(at_ms, LIGHT, LIGHT, waits={0: 0.9})
    return used_ns


def test_a_curbed_sharer_may_use_its_guarantee_and_no_more_than_its_limit_leaves() -> None:
    """12 ms at 20.0001 % are 2,400,012 ns. Where its bucket has less, it is that."""
    for limit, left_ns in ((1.0, 2_400_012), (0.9, 2_400_012)):
        desk = sharing(sharer(0.7), sharer(0.200001, limit=limit))
        used_ns = curbed_for(desk, 0.4, 210)
        assert desk.allowed[1] == (held(desk, 1)[0], used_ns + left_ns)
        assert isinstance(desk.allowed[1][1], int)
    desk = sharing(sharer(0.6), sharer(0.2, limit=0.25))
    used_ns = curbed_for(desk, 0.55, 210)
    bucket_ns = desk.scheduler.books(210 * MS)[1].bucket_ns
    assert bucket_ns < 0
    assert desk.allowed[1] == (held(desk, 1)[0], used_ns + bucket_ns + 3 * MS)


def test_what_a_curbed_sharers_kernel_used_beyond_its_allowance_counts_against_the_next_one() -> None:
    """Each kernel takes 5 ms; a curbed sharer of 20 % may begin one every 25 ms, not one every 10."""
    desk = sharing(sharer(0.7), sharer(0.2))
    first_ns = curbed_for(desk, 0.4, 210)
    epoch = held(desk, 1)[0]
    used_ns = first_ns
    for at_ms in range(220, 410, 10):
        allowed_ns = desk.allowed[1][1]
        assert allowed_ns is not None
        if used_ns < allowed_ns:
            used_ns += 5 * MS
        desk.observed(1, epoch, at_ms, used_ns=used_ns)
        desk.tick(at_ms)
    assert used_ns - first_ns == 40 * MS, "20 % of 190 ms, and what the last kernel went beyond that"


def test_what_a_sharers_bucket_allowed_before_it_was_curbed_does_not_count_after_that() -> None:
    """It begins to compute 80 ms before it is curbed, out of its bucket."""
    desk = sharing(sharer(0.7), sharer(0.2, limit=0.5))
    used_ns = 0
    for at_ms in range(10, 211, 10):
        used_ns = max(0, at_ms - 130) * MS
        desk.observed(0, held(desk, 0)[0], at_ms, used_ns=at_ms * MS // 10)
        desk.observed(1, held(desk, 1)[0], at_ms, used_ns=used_ns)
        desk.measured(at_ms, LIGHT, LIGHT, waits={0: 0.9})
    assert desk.allowed[1] == (held(desk, 1)[0], used_ns + 2_400_000)


def test_a_curbed_sharer_saves_up_no_allowance() -> None:
    desk = sharing(sharer(0.7), sharer(0.2))
    used_ns = curbed_for(desk, 0.4, 210)
    desk.tick(400)
    assert desk.allowed[1][1] == used_ns + 2_400_000


def test_a_sharer_that_is_curbed_no_more_is_allowed_all_at_once_and_once() -> None:
    """Its allowance was renewed 6 ms before."""
    desk = sharing(sharer(0.7), sharer(0.2))
    used_ns = curbed_for(desk, 0.4, 210)
    desk.tick(404)
    assert desk.allowed[1] == (held(desk, 1)[0], used_ns + 2_400_000)
    desk.observed(0, held(desk, 0)[0], 410, used_ns=180 * MS)
    assert allows(desk.measured(410, LIGHT, LIGHT, waits={0: 0.0})) == [Allow(1, held(desk, 1)[0], None)]
    assert allows(desk.measured(420, LIGHT, LIGHT, waits={0: 0.0})) == []
    assert allows(desk.measured(440, LIGHT, LIGHT, waits={0: 0.0})) == []


def test_a_sharer_that_costs_turns_too_much_is_allowed_its_guarantee_over_that_cost() -> None:
    """The sharer uses 30 % and costs 60: in the first window that counts for a quarter, a factor of 1.25."""
    desk = sharing(sharer(0.2), sharer(0.1))
    desk.added(2, sharer(0.7), 1)
    desk.runs(2, 1)
    used_ns = 0
    for at_ms in range(10, 420, 10):
        used_ns = at_ms * MS * 3 // 10
        desk.observed(0, held(desk, 0)[0], at_ms, used_ns=used_ns)
        desk.observed(1, held(desk, 1)[0], at_ms, used_ns=0)
        desk.tell_all([Measured(2, round(HEAVY * PPM), work_ns=at_ms * MS * 4 // 10)], at_ms)
        desk.tick(at_ms)
        if 0 in desk.allowed:
            break
    assert at_ms == 400
    assert desk.allowed == {0: (held(desk, 0)[0], used_ns + 160_000 * 12)}


def test_the_books_of_sharers_are_checked() -> None:
    def spoilt(spoil: Callable[[TemporalScheduler], None]) -> str:
        desk = sharing(sharer(), sharer(limit=0.5))
        assert isinstance(desk.scheduler, TemporalScheduler)
        spoil(desk.scheduler)
        with pytest.raises(InvariantError) as raised:
            desk.scheduler.check()
        return str(raised.value)

    def unshare(scheduler: TemporalScheduler) -> None:
        scheduler._holders.shared[0].shared = False

    def end(scheduler: TemporalScheduler) -> None:
        scheduler._holders.shared[0].lease = replace(scheduler._holders.shared[0].lease, end_ns=10**9)

    def unknown(scheduler: TemporalScheduler) -> None:
        scheduler._holders.shared[0] = replace(scheduler._holders.shared[0])

    def unlimited(scheduler: TemporalScheduler) -> None:
        scheduler._accounts.all[1].allowance_at_ns = None

    def turn(scheduler: TemporalScheduler) -> None:
        scheduler._holders.current = scheduler._holders.shared.pop(0)

    def heavy(scheduler: TemporalScheduler) -> None:
        scheduler._accounts.all[0].kind.light = False

    def without(scheduler: TemporalScheduler) -> None:
        account, hold = scheduler._accounts.all[0], scheduler._holders.shared.pop(0)
        del account.holds[hold.lease.epoch]
        scheduler._accounts.note_holds(account)

    def forget(scheduler: TemporalScheduler) -> None:
        del scheduler._holders.shared[0]

    for spoil in (unshare, end, unknown):
        assert spoilt(spoil).startswith("no shared lease, or one that no account knows: ActiveLease(lease=Lease(vgpu=0")
    assert spoilt(unlimited).startswith("a shared lease without an allowance for a vGPU with a limit: Lease(vgpu=1")
    assert spoilt(turn).startswith("a vGPU takes turns that may share: ActiveLease(lease=Lease(vgpu=0")
    assert spoilt(heavy) == "vGPUs hold shared leases that may not: {0}"
    assert spoilt(without) == "a vGPU waits that may share"
    assert spoilt(forget) == "vGPU 0 holds a shared lease, and takes turns"
