"""What the spatial scheduler says in named situations: rounds of 10 ms, planned 5 ms ahead.

Times are milliseconds. A lease reads (vGPU, epoch, start, end); where two vGPUs of 60 % compete, the first boundary is
at 20 ms: what is left of the first round is shorter than a window.
"""

from __future__ import annotations

import pytest

from cython_ext.testing.bindings_logic import EARLY_NS
from gpuserver.core.scheduler.leases import AccountState, Added, Lease
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from tests.core import oracle
from tests.core.desk import MS, Desk, leases, share, spans, withdrawn
from tests.core.model import Run, S, Work
from vgpu.share import PPM, Priority, Share


def desk(*shares: Share) -> Desk:
    return Desk(SpatialScheduler(), *shares)


def two_of_sixty() -> Desk:
    """vGPU 0 holds, vGPU 1 waits for its first round."""
    pair = desk(share(0.45, 60), share(0.45, 60))
    pair.runs(0, 0)
    assert spans(pair.wants(1, 3)) == [(0, 1, 0, 20)]
    return pair


def test_where_all_fit_leases_are_plain() -> None:
    alone = desk(share(0.45, 60))
    assert leases(alone.wants(0, 3)) == [
        Lease(0, 1, 3 * MS, None, go_by_ns=3 * MS, early=True, window_ns=DEFAULT_POLICY.window_ns)
    ]
    assert alone.due_ms is None


def test_two_that_do_not_fit_take_turns() -> None:
    pair = two_of_sixty()
    assert pair.due_ms == 15
    assert leases(pair.tick(15)) == [
        Lease(1, 2, 20 * MS, 30 * MS, after=((0, 1),), go_by_ns=30 * MS, early=False, window_ns=12 * MS)
    ]
    assert pair.due_ms == 20
    assert pair.tick(20) == []
    assert pair.due_ms == 25
    pair.drained(0, 1, 20.2)
    pair.went(1, 2, 20.25)
    # vGPU 0 has had 20.2 ms: vGPU 1 goes on, with no hand-over, until it has had more; then it is vGPU 0's turn.
    assert spans(pair.tick(25)) == [(1, 2, 20.25, 40)]
    assert pair.tick(30) == []
    assert pair.due_ms == 35
    assert spans(pair.tick(35)) == [(1, 2, 20.25, 50)]
    pair.tick(40)
    assert spans(pair.tick(45)) == [(0, 3, 50, 60)]


def test_a_round_that_is_nearly_over_is_not_begun_with() -> None:
    for at, boundary in ((0, 20), (7.7, 20), (7.9, 20), (9.99, 20), (10, 30)):
        pair = desk(share(0.45, 60), share(0.45, 60))
        pair.runs(0, at)
        assert spans(pair.wants(1, at)) == [(0, 1, at, boundary)]


def test_whoever_may_run_again_alone_gets_its_end_taken_away() -> None:
    pair = two_of_sixty()
    pair.tick(15)
    commands = pair.idle(1, 16)
    assert withdrawn(commands) == [(1, 2)]
    assert spans(commands) == [(0, 1, 0, None)]
    assert pair.due_ms is None


def test_an_early_return_lets_the_other_start_at_once() -> None:
    pair = two_of_sixty()
    assert leases(pair.drained(0, 1, 8, wants=False)) == [
        Lease(1, 2, 8 * MS, None, go_by_ns=8 * MS, early=True, window_ns=12 * MS)
    ]
    pair = two_of_sixty()
    pair.tick(15)
    # Published for the boundary already: brought forward, and it waits for nobody any more.
    assert leases(pair.drained(0, 1, 17, wants=False)) == [
        Lease(1, 2, 17 * MS, None, go_by_ns=17 * MS, early=True, window_ns=12 * MS)
    ]


def test_a_go_that_may_have_crossed_a_revision_is_answered_with_the_end_that_holds() -> None:
    pair = desk(share(0.45, 60), share(0.45, 60))
    pair.wants(0, 0)
    assert spans(pair.wants(1, 1)) == [(0, 1, 0, 20)]
    assert spans(pair.went(0, 1, 1.1)) == [(0, 1, 1.1, 20)]
    short = desk(share(0.45, 60), share(0.45, 60))
    short.wants(0, 0)
    short.wants(1, 0.2)
    assert spans(short.went(0, 1, 0.3)) == [(0, 1, 0.3, 20.3)]
    pair.tick(15)
    assert spans(pair.drained(0, 1, 17, wants=False)) == [(1, 2, 17, None)]
    assert spans(pair.went(1, 2, 17.1)) == [(1, 2, 17.1, None)]


def test_free_sms_are_filled_until_the_boundary() -> None:
    three = desk(share(0.4, 60), share(0.4, 60), share(0.3, 40), share(0.3, 40))
    three.runs(0, 0)
    three.wants(1, 0)
    assert leases(three.wants(2, 4)) == [Lease(2, 2, 4 * MS, 20 * MS, go_by_ns=4 * MS, early=True, window_ns=12 * MS)]
    assert three.wants(3, 5) == []  # no SMs are left
    three.drained(2, 2, 6, wants=False)
    assert three.statement(3, 6).holds  # an early return is filled at once


def test_less_than_two_milliseconds_of_a_round_are_not_filled() -> None:
    for at, start in ((18, 18), (18.001, 20)):
        three = desk(share(0.3, 60), share(0.3, 60), share(0.1, 40))
        three.runs(0, 0)
        three.wants(1, 1)
        (filler,) = [x for x in leases(three.wants(2, at)) if x.vgpu == 2]
        assert (filler.start_ns, filler.end_ns, bool(filler.after)) == (start * MS, 30 * MS, start == 20)


def test_a_kernel_that_does_not_fit_the_rest_of_a_round_does_not_fill_it() -> None:
    """The next round is the wide one's."""
    for at, fits in ((14, True), (14.001, False)):
        three = desk(share(0.3, 60), share(0.3, 100), share(0.1, 40))
        three.runs(2, 0)
        three.drained(2, 1, 1, wants=False, longest_kernel_ns=6 * MS)
        three.runs(0, 1)
        three.wants(1, 2)
        assert spans(three.wants(2, at)) == ([(2, 3, 14, 17)] if fits else [])


def test_whoever_is_chosen_for_the_next_round_anyway_begins_a_long_kernel_in_this_one() -> None:
    three = desk(share(0.3, 60), share(0.3, 60), share(0.1, 40))
    three.runs(2, 0)
    three.drained(2, 1, 1, wants=False, longest_kernel_ns=30 * MS)
    three.runs(0, 1)
    three.wants(1, 2)
    assert spans(three.wants(2, 14)) == [(2, 3, 14, 30)]
    three.went(2, 3, 14)
    assert spans(three.observed(2, 3, 15, drains_by_ns=44 * MS))[0] == (2, 3, 14, 20)  # late: nothing more in it
    three.tick(20)
    assert three.statement(2, 20).holds


def test_a_filler_ends_half_a_kernel_before_the_boundary() -> None:
    """Its gate starts a kernel of which half fits: the last one is done at the boundary."""
    three = desk(share(0.3, 60), share(0.3, 60), share(0.1, 40))
    three.runs(2, 0)
    three.drained(2, 1, 1, wants=False, longest_kernel_ns=5 * MS + 1)
    three.runs(0, 1)
    three.wants(1, 2)
    (filler,) = leases(three.wants(2, 4))
    assert (filler.start_ns, filler.end_ns) == (4 * MS, 20 * MS - 2_500_000)
    assert isinstance(filler.end_ns, int)


def test_whoever_drains_late_keeps_its_sms_and_gets_no_round() -> None:
    for drains_ms, late in ((20.5, False), (20.501, True)):
        pair = two_of_sixty()
        pair.observed(0, 1, 14, drains_by_ns=round(drains_ms * MS))
        assert bool(leases(pair.tick(15))) is not late


def test_beside_one_that_drains_late_the_rest_of_the_card_is_packed() -> None:
    three = desk(share(0.3, 60), share(0.3, 40), share(0.3, 40))
    three.runs(0, 0)
    three.runs(1, 1)
    assert sorted(spans(three.wants(2, 1))) == [(0, 1, 0, 20), (1, 2, 1, 20)]
    three.observed(0, 1, 14, longest_kernel_ns=30 * MS, drains_by_ns=40 * MS)
    assert spans(three.tick(15)) == [(2, 3, 20, 30)]  # 40 of the 40 % that are left: who has had less
    assert leases(three.tick(16)) == []


def test_one_that_never_drains_is_passed_by() -> None:
    pair = two_of_sixty()
    pair.tick(15)
    pair.tick(20)
    assert withdrawn(pair.tick(25)) == [(1, 2)]  # vGPU 0 is late for the next round too
    assert pair.due_ms == 30
    assert not pair.statement(0, 30).penalised
    # It was waited for as long as a round; then it holds no SMs against others any more.
    assert spans(pair.tick(30)) == [(1, 3, 30, None)]
    assert pair.statement(0, 30).penalised
    pair.went(1, 3, 30)
    pair.drained(0, 1, 75)
    statement = pair.statement(0, 75)
    assert (statement.overuse_ns, statement.held_ns) == (55 * MS, 75 * MS)


def test_known_long_kernels_are_waited_for_twice_their_length_and_no_longer_than_the_grace() -> None:
    for kernel_ms, patience in ((4, 10), (30, 60), (90, 100)):
        pair = two_of_sixty()
        pair.observed(0, 1, 4, longest_kernel_ns=kernel_ms * MS)
        assert leases(pair.tick(15))[0].go_by_ns == (20 + patience) * MS


def test_a_go_in_spite_of_a_holder_bars_the_holder() -> None:
    pair = two_of_sixty()
    pair.tick(15)
    pair.tick(20)
    pair.went(1, 2, 30)
    assert [pair.statement(key, 30).penalised for key in (0, 1)] == [True, False]
    assert pair.statement(1, 35).held_ns == 0  # the overlap is vGPU 0's
    pair.drained(0, 1, 36)
    assert pair.statement(1, 37).held_ns == 1 * MS
    assert pair.statement(0, 37).held_ns == 36 * MS


def test_one_that_begins_late_still_ends_at_the_boundary() -> None:
    pair = two_of_sixty()
    pair.tick(15)
    pair.drained(0, 1, 24)
    assert spans(pair.went(1, 2, 24.1))[0] == (1, 2, 24.1, 30)
    pair = two_of_sixty()
    pair.tick(15)
    pair.drained(0, 1, 24.8)
    assert spans(pair.went(1, 2, 29.95))[0] == (1, 2, 29.95, 30.15)  # as soon as possible
    pair = two_of_sixty()
    pair.tick(15)
    pair.drained(0, 1, 20.4)
    assert pair.went(1, 2, 20.5) == []  # half a millisecond does not matter


def test_an_overlap_with_two_is_divided_where_the_last_of_them_shares_it() -> None:
    """Who is wide is still at its tail when two others go on its SMs."""
    three = desk(share(0.3, 80), share(0.3, 40), share(0.3, 40))
    three.runs(0, 0)
    three.wants(1, 1)
    three.wants(2, 1.5)
    assert [(lease.vgpu, lease.after) for lease in leases(three.tick(15))] == [(1, ((0, 1),)), (2, ((0, 1),))]
    three.went(1, 2, 20)
    three.went(2, 3, 20.4)
    three.drained(0, 1, 24)  # halves: 22 and 22.2
    assert [three.statement(key, 25).held_ns for key in (0, 1, 2)] == [22.2 * MS, 2.8 * MS, 2.8 * MS]


def crowd(priority: Priority, sm_percent: int) -> Desk:
    """vGPU 0 (60 %) and vGPU 1 (40 %, low) hold the card; vGPU 2 is of another class."""
    three = desk(share(0.3, 60), share(0.3, 40, priority=Priority.LOW), share(0.2, sm_percent, priority=priority))
    three.runs(0, 0)
    three.runs(1, 1)
    return three


def test_a_high_one_takes_back_what_it_needs_from_the_lowest_class_first() -> None:
    three = crowd(Priority.HIGH, 40)
    commands = three.wants(2, 2)
    assert [x.window_ns for x in leases(commands)] == [250_000, 250_000, 12 * MS]
    assert spans(commands) == [(0, 1, 0, 20), (1, 2, 1, 2.45), (2, 3, 2.45, 20)]
    granted = leases(commands)[-1]
    assert (granted.after, granted.go_by_ns, granted.early) == (((1, 2),), round(12.45 * MS), True)
    three = crowd(Priority.HIGH, 50)
    commands = three.wants(2, 2)
    assert spans(commands) == [(0, 1, 0, 2.45), (1, 2, 1, 2.45), (2, 3, 2.45, 20)]
    assert leases(commands)[-1].after == ((1, 2), (0, 1))


def test_a_high_one_under_a_limit_takes_back_no_longer_than_that() -> None:
    two = desk(share(0.3, 100), share(0.1, 40, 0.1, priority=Priority.HIGH))
    two.runs(0, 0)
    assert spans(two.wants(1, 2)) == [(0, 1, 0, 2.45), (1, 2, 2.45, 12.495)]  # 10 ms and what comes until 2.45


def test_a_normal_one_takes_nothing_back() -> None:
    three = crowd(Priority.NORMAL, 40)
    assert spans(three.wants(2, 2)) == [(0, 1, 0, 20), (1, 2, 1, 20)]


def test_just_before_a_boundary_a_high_one_waits_for_it() -> None:
    for at, revoked in ((18.5, True), (18.85, False)):
        three = crowd(Priority.HIGH, 40)
        three.tell(Added(3, share(0.2, 40)), 2)
        three.wants(3, 2)
        said = [s for s in spans(three.wants(2, at)) if s[0] == 2]
        assert said == ([(2, 3, at + 0.45, 30)] if revoked else [])


@pytest.mark.parametrize(("lag_ms", "revoked"), [(-3.6, True), (-4.0, False)])
def test_a_high_one_may_be_ahead_by_a_quarter_of_a_round(lag_ms: float, revoked: bool) -> None:
    """vGPU 0 held 2 ms alone, at a guarantee of 0.3: the clock went on by 2 / 0.3, which is worth 1.3 ms at 0.2."""
    two = desk(share(0.3, 100, priority=Priority.LOW))
    two.tell(Added(1, share(0.2, 40, priority=Priority.HIGH), AccountState(round(lag_ms * MS), 0, 0, 0, 0, 0)), 0)
    two.runs(0, 0)
    assert spans(two.wants(1, 2))[0] == (0, 1, 0, 2.45 if revoked else 20)


def test_a_high_one_that_is_ahead_of_its_guarantee_waits_like_anybody() -> None:
    three = crowd(Priority.HIGH, 40)
    three.wants(2, 2)
    three.drained(1, 2, 2.4)
    three.went(2, 3, 2.45)
    three.drained(2, 3, 20)  # 17.5 ms at a guarantee of a fifth
    commands = three.tick(22)
    assert not [x for x in leases(commands) if x.vgpu == 2 and x.start_ns == 22 * MS]


def test_a_limit_ends_a_lease_although_all_fit() -> None:
    alone = desk(share(0.5, 30, 0.5))
    assert alone.runs(0, 0).end_ns == 40 * MS
    assert alone.due_ms == 38
    assert alone.tick(37) == []
    assert spans(alone.tick(38)) == [(0, 1, 0, 60)]  # at 40 ms, 20 ms are left
    assert alone.due_ms == 58
    assert alone.tick(58) == []  # at 60 ms, 10: below the line
    alone.tick(60)
    assert alone.due_ms == 70  # for how long it may take to drain
    assert alone.drained(0, 1, 60) == []
    assert alone.due_ms == 80
    assert spans(alone.tick(80)) == [(0, 2, 80, 100)]


def test_a_limit_ends_a_lease_before_the_boundary() -> None:
    three = desk(share(0.1, 40, 0.05), share(0.5, 60), share(0.5, 60))
    three.runs(1, 0)
    three.wants(2, 0)
    assert spans(three.wants(0, 1)) == [(0, 2, 1, 11)]  # a bucket of twice 5 ms
    three.went(0, 2, 1)
    three.drained(0, 2, 11)
    assert three.statement(0, 11).throttled
    assert spans(three.tick(15)) == [(2, 3, 20, 30)]


def test_a_limit_that_ends_just_before_the_boundary_is_not_stretched_to_it() -> None:
    pair = desk(share(0.2, 60, 0.245), share(0.2, 60))
    assert pair.runs(0, 0).end_ns == 19.6 * MS
    assert pair.wants(1, 3) == []
    assert spans(pair.tick(15)) == [(1, 2, 20, 30)]


def test_a_limit_that_shrinks_before_the_boundary_shortens_what_was_planned() -> None:
    pair = desk(share(0.3, 60))
    pair.runs(0, 0)
    pair.tell(Added(1, share(0.1, 60, 0.1), AccountState(0, 8_600_000, 0, 0, 0, 0)), 5)
    pair.wants(1, 5)
    assert spans(pair.tick(15)) == [(1, 2, 20, 30)]
    # Its bucket: 8.6 ms, a tenth of the 11 ms since, a fiftieth of the 4 ms to come.
    assert spans(pair.changed(1, share(0.02, 60, 0.02), 16)) == [(1, 2, 20, 29.78)]


def test_leases_under_a_limit_take_part_in_rounds() -> None:
    pair = desk(share(0.3, 60, 0.9), share(0.3, 60, 0.9))
    assert pair.runs(0, 0).end_ns == 72 * MS
    assert pair.wants(1, 1) == []
    assert spans(pair.tick(15)) == [(0, 1, 0, 20), (1, 2, 20, 30)]
    pair.tick(20)
    # Everybody fits again before it has its GO: it waits for nobody any more.
    brought = leases(pair.drained(0, 1, 20.1, wants=False))[0]
    assert (brought.epoch, brought.start_ns, brought.after) == (2, 20.1 * MS, ())
    three = desk(share(0.3, 60, 0.9), share(0.3, 40), share(0.3, 40))
    three.runs(0, 0)
    three.runs(1, 1)
    three.wants(2, 1)
    assert spans(three.tick(15)) == [(0, 1, 0, 30), (2, 3, 20, 30)]


def test_a_filler_that_is_about_to_begin_is_left_alone() -> None:
    three = desk(share(0.3, 60), share(0.5, 70), share(0.05, 40))
    three.runs(0, 0)
    three.wants(1, 1)
    assert spans(three.wants(2, 14)) == [(2, 2, 14, 20)]
    commands = three.tick(15)
    assert withdrawn(commands) == []
    assert spans(commands) == [(1, 3, 20, 30)]


def test_a_new_limit_gives_an_open_ended_lease_an_end() -> None:
    alone = desk(share(0.5, 30))
    alone.runs(0, 0)
    assert spans(alone.changed(0, share(0.5, 30, 0.5), 10)) == [(0, 1, 0, 90)]  # its bucket of 80 ms
    assert spans(alone.changed(0, share(0.5, 30), 12)) == [(0, 1, 0, None)]


def test_a_limit_that_changes_before_the_go() -> None:
    alone = desk(share(0.5, 30))
    assert spans(alone.wants(0, 0)) == [(0, 1, 0, None)]
    assert spans(alone.changed(0, share(0.5, 30, 0.5), 1)) == [(0, 1, 1, 82)]  # 80 ms and what a waiting one saves up
    assert alone.tick(1) == []
    assert spans(alone.changed(0, share(0.5, 30), 2)) == [(0, 1, 2, None)]


def test_an_open_ended_lease_gets_the_short_window_once_a_higher_class_exists() -> None:
    alone = desk(share(0.5, 30))
    alone.runs(0, 0)
    commands = alone.tell(Added(1, share(0.1, 10, priority=Priority.HIGH)), 1)
    assert [(x.end_ns, x.window_ns) for x in leases(commands)] == [(None, 250_000)]


def test_in_rounds_a_refill_is_still_waited_for() -> None:
    three = desk(share(0.5, 60), share(0.5, 60), share(0.1, 10, 0.1))
    three.runs(2, 0)
    three.drained(2, 1, 15.4)  # a bucket of 10 ms, 1.54 more, 15.4 gone: 8.86 below its line
    refilled = 15.4 + 88.6
    three.runs(0, 99)
    three.wants(1, 99)
    assert three.due_ms == pytest.approx(refilled)
    assert three.tick(104.1) != []


def test_a_wider_share_counts_from_the_next_lease() -> None:
    pair = desk(share(0.3, 30), share(0.3, 60))
    pair.runs(0, 0)
    pair.runs(1, 0)
    commands = pair.changed(0, share(0.3, 50), 1)
    assert spans(commands) == [(0, 1, 0, 20), (1, 2, 0, 20)]  # 110 % do not fit any more: rounds begin


def test_the_clock_waits_for_nobody_who_is_hard_to_place() -> None:
    """All behind: V stays within 400 ms of the mean; all ahead: it is the least of them."""
    pair = desk(share(0.2, 60), share(0.2, 60))
    pair.runs(0, 0)
    pair.tick(100)
    pair.wants(1, 100)  # wakes owed the idle credit, not 100 ms
    assert pair.statement(1, 100).lag_ns == 20 * MS
    pair.tick(115)
    pair.drained(0, 1, 120)
    assert pair.statement(1, 120).lag_ns > pair.statement(0, 120).lag_ns


def four_halves() -> Desk:
    """vGPUs 0 and 1 hold half the card each, 2 and 3 wait for their first round."""
    four = desk(*[share(0.24, 50)] * 4)
    four.runs(0, 0)
    four.runs(1, 0)
    four.wants(2, 1)
    four.wants(3, 1)
    return four


def test_each_new_lease_waits_for_as_many_of_the_leaving_as_it_needs() -> None:
    four = four_halves()
    first, second = leases(four.tick(15))
    assert (first.vgpu, first.after, first.go_by_ns) == (2, ((0, 1),), 30 * MS)
    assert (second.vgpu, second.after, second.go_by_ns) == (3, ((0, 1), (1, 2)), 30 * MS)
    # Whoever drains first is waited for first; a known long kernel is waited for longer.
    commands = four.observed(0, 1, 16, drains_by_ns=19 * MS, longest_kernel_ns=8 * MS)
    first, second = leases(commands)
    assert (first.vgpu, first.after, first.go_by_ns) == (2, ((1, 2),), 30 * MS)
    assert (second.vgpu, second.after, second.go_by_ns) == (3, ((1, 2), (0, 1)), 36 * MS)
    # A GO that may have crossed the revision: the scheduler says which end holds.
    four.drained(1, 2, 16.1, wants=False)
    assert first.epoch in {x.epoch for x in leases(four.went(2, first.epoch, 16.15))}


def test_a_new_lease_does_not_wait_for_who_goes_on() -> None:
    three = desk(share(0.3, 60), share(0.3, 40), share(0.3, 40))
    three.runs(0, 0)
    three.runs(1, 1)
    three.wants(2, 1)
    commands = three.tick(15)
    assert spans(commands) == [(0, 1, 0, 30), (2, 3, 20, 30)]
    assert [x.after for x in leases(commands)] == [(), ((1, 2),)]


def test_a_plan_is_revised_until_just_before_the_boundary() -> None:
    three = desk(share(0.45, 60), share(0.45, 60), share(0.45, 60))
    three.runs(0, 0)
    three.wants(1, 3)
    three.tick(15)
    three.drained(0, 1, 20.2)
    three.went(1, 2, 20.25)
    assert spans(three.tick(25)) == [(1, 2, 20.25, 40)]
    # A newcomer is owed more: the round that was promised to vGPU 1 is taken back.
    assert spans(three.wants(2, 26)) == [(1, 2, 20.25, 30), (2, 3, 30, 40)]
    assert withdrawn(three.idle(2, 27)) == [(2, 3)]
    assert three.tick(29.6) == []


def test_a_promised_round_that_waits_for_nobody_is_taken_back_too() -> None:
    three = desk(share(0.6, 60), share(0.05, 70), share(0.3, 40))
    three.runs(0, 0)
    three.wants(1, 1)
    commands = three.wants(2, 18.5)  # too late to fill the round
    assert spans(commands) == [(0, 1, 0, 30), (2, 2, 20, 30)]
    assert [x.after for x in leases(commands)] == [(), ()]
    three.tell(Added(3, share(0.3, 70), AccountState(60 * MS, 0, 0, 0, 0, 0)), 18.7)
    commands = three.wants(3, 18.7)
    assert withdrawn(commands) == [(2, 2)]
    assert spans(commands) == [(0, 1, 0, 20), (3, 3, 20, 30)]
    assert (2, 2) in leases(commands)[-1].after  # should its GO have crossed the withdrawal


def test_nobody_is_let_in_while_a_lease_may_begin_early() -> None:
    """The dispatcher may begin the next round's leases so much before the boundary: the guard covers that, and a word
    on its way."""
    assert DEFAULT_POLICY.round_guard_ns >= EARLY_NS + DEFAULT_POLICY.decision_ns + 300_000


@pytest.mark.parametrize("start_ms", [3, 5])
def test_who_is_at_work_in_a_newer_lease_is_not_penalised_for_an_older_one(start_ms: int) -> None:
    """It went under one that had just been withdrawn, which never drains by itself. Penalised for that, the vGPU would
    lose its SMs while its newer lease is in force."""
    scheduler = SpatialScheduler()
    watch = oracle.Watch(scheduler)
    run = Run(scheduler, [], [], watch=watch, taking=True).run(start_ms * MS)
    run.add(0, Share(20_000, 20_000, 5_000, Priority.LOW), Work(5 * MS, burst=1, pause_ns=MS))
    run.add(1, Share(10_000, 110_000, 91_000, Priority.LOW), Work(MS, jitter=0.3))
    run.add(2, Share(60_000, PPM, 10_000, Priority.HIGH, bursts=True), Work(MS))
    run.run(3 * S)
    assert watch.found == []
