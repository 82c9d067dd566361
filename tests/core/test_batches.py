"""Reports that are heard together: one decision for all of them, and books as if each had come alone."""

from __future__ import annotations

import pytest

from gpuserver.core.scheduler.base import SchedulerBase
from gpuserver.core.scheduler.leases import Drained, Idle, LeaseStarted, Observed, Report, Runnable
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.desk import MS, Desk, leases, spans, withdrawn
from vgpu.share import PPM, Share

THIRD = Share(PPM // 3, sm_mpercent=60_000)
BOTH = pytest.mark.parametrize("kind", [TemporalScheduler, SpatialScheduler])


def handing_over() -> Desk:
    """0 holds by lease 1 until 13.2 ms, then 2 by lease 3; 1 waits."""
    desk = Desk(TemporalScheduler(), THIRD, THIRD, THIRD)
    desk.runs(0, 0)
    desk.wants(1, 1)
    desk.wants(2, 1)
    return desk


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["drained first", "at its tail"])
def test_a_drain_and_the_go_after_it_are_one_decision(order: slice) -> None:
    desk, alone = handing_over(), handing_over()
    went, drained = LeaseStarted(2, 3, 13_300_000), Drained(0, 1, 13_400_000, idle_ns=0, wants=True)
    reports: list[Report] = [drained, went][order]
    (after,) = spans(desk.tell_all(reports, 13.5))
    for report in reports:
        alone.tell(report, 13.5)
    assert (after[0], after[1]) == (1, 4)
    assert desk.scheduler.books() == alone.scheduler.books()
    assert desk.scheduler.snapshot(20 * MS) == alone.scheduler.snapshot(20 * MS)


def test_who_gives_up_and_comes_back_keeps_its_place() -> None:
    desk = handing_over()
    assert withdrawn(desk.tell_all([Idle(2), Runnable(2)], 2)) == []
    assert desk.statement(2, 2).wants


def test_who_drains_and_wants_at_once_waits() -> None:
    desk = handing_over()
    desk.tell_all([Drained(0, 1, 13 * MS, idle_ns=0, wants=False), Runnable(0), LeaseStarted(2, 3, 13 * MS)], 13)
    statement = desk.statement(0, 13)
    assert (statement.wants, statement.holds, statement.tokens) == (True, False, 1)


@BOTH
def test_a_lease_that_went_and_drained_unheard_is_charged(kind: type[SchedulerBase]) -> None:
    desk = Desk(kind(), THIRD, THIRD)
    desk.wants(0, 0)
    desk.tell_all([LeaseStarted(0, 1, MS), Drained(0, 1, 4 * MS, idle_ns=MS, wants=False), Runnable(1)], 5)
    statement = desk.statement(0, 5)
    assert (statement.held_ns, statement.busy_ns, statement.wants) == (3 * MS, 2 * MS, False)


def test_readings_alone_call_for_no_decision() -> None:
    desk = Desk(TemporalScheduler(), THIRD, THIRD)
    desk.runs(0, 0)
    assert desk.tell_all([Observed(0, 1, idle_ns=MS), Observed(0, 1, idle_ns=2 * MS)], 3) == []
    assert desk.statement(0, 3).busy_ns == MS
    assert desk.tell_all([], 4) == []
    (lease,) = leases(desk.tell_all([Observed(0, 1, idle_ns=3 * MS), Runnable(1)], 5))[:1]
    assert (lease.vgpu, lease.end_ns is None) == (0, False)


@BOTH
def test_a_stranger_among_them_spoils_them_all(kind: type[SchedulerBase]) -> None:
    desk = Desk(kind(), THIRD)
    with pytest.raises(KeyError, match="7"):
        desk.scheduler.handle_all([Runnable(0), Runnable(7)], MS)
    assert not desk.statement(0, 1).wants
