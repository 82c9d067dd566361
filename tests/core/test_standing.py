"""Standby leases, told by hand: who has one, when it begins by itself, and what the scheduler then makes of it."""

from __future__ import annotations

from dataclasses import replace

from gpuserver.core.scheduler.leases import (
    Added,
    Changed,
    Command,
    Drained,
    GangCalled,
    GangWindow,
    Lease,
    LeaseStarted,
    Publish,
    Runnable,
)
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.desk import MS, Desk, leases, withdrawn
from vgpu.share import PPM, Share

HALF = Share(PPM // 2, sm_mpercent=50_000)
CAPPED = replace(HALF, limit_ppm=PPM // 2)
WIDE = replace(HALF, sm_mpercent=70_000)


def standby(commands: list[Command]) -> list[Lease]:
    return [lease for lease in leases(commands) if lease.standby]


def granted(commands: list[Command]) -> list[Lease]:
    return [lease for lease in leases(commands) if not lease.standby]


def test_an_idle_vgpu_has_one_and_has_it_again_after_it_was_used() -> None:
    desk = Desk(TemporalScheduler(), standby=True)
    (first,) = standby(desk.tell(Added(0, HALF), 1))
    assert (first.epoch, first.end_ns, first.after) == (1, None, ())
    assert not standby(desk.wants(0, 2))
    assert not standby(desk.went(0, 1, 2))
    assert desk.statement(0, 5).held_ns == 3 * MS
    (second,) = standby(desk.drained(0, 1, 6, wants=False))
    assert second.epoch == 2
    assert desk.idle(0, 7) == []


def test_a_limit_bounds_it() -> None:
    desk = Desk(TemporalScheduler(), standby=True)
    (lease,) = standby(desk.tell(Added(0, CAPPED), 0))
    assert (lease.end_ns, desk.allowed[0]) == (None, (lease.epoch, 46 * MS))  # its bucket, and what it gets in 12 ms
    desk.wants(0, 1)
    desk.went(0, 1, 1)
    assert desk.drained(0, 1, 60, wants=False) == []  # nothing left: it is to ask


def test_a_changed_share_changes_it() -> None:
    desk = Desk(TemporalScheduler(), HALF, standby=True)
    commands = desk.tell(Changed(0, CAPPED), 1)
    assert withdrawn(commands) == [(0, 1)]
    (lease,) = standby(commands)
    assert desk.allowed[0] == (lease.epoch, 46 * MS)
    assert lease.after == (() if lease.standby else ((0, 1),))  # that one's GO may be on the way


def test_of_two_that_ask_for_a_free_gpu_the_scheduler_chooses() -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF, standby=True)
    (lease,) = granted(desk.wants(1, 1))
    assert (lease.vgpu, lease.epoch, lease.end_ns) == (1, 2, None)
    (shorter,) = granted(desk.wants(0, 1))  # the other's lease stands, and is not granted yet
    assert (shorter.vgpu, shorter.epoch) == (1, 2)
    assert shorter.end_ns is not None
    (following,) = [lease for lease in granted(desk.went(1, 2, 1.1)) if lease.vgpu == 0]
    assert (following.epoch, following.after) == (1, ((1, 2),))


def test_one_that_began_by_itself_goes_before_what_was_granted_meanwhile() -> None:
    """vGPU 1 had no standby lease, having been throttled; its grant and the GO of vGPU 0 cross."""
    desk = Desk(TemporalScheduler(), HALF, CAPPED, standby=True)
    desk.wants(1, 0)
    desk.went(1, 2, 0)
    desk.drained(1, 2, 60)  # its bucket is empty
    (due_ms,) = [desk.due_ms]
    assert due_ms is not None
    (grant,) = granted(desk.tick(due_ms))
    assert (grant.vgpu, grant.after) == (1, ())
    assert grant.go_by_ns > grant.start_ns  # vGPU 0 may be about to begin by itself
    commands = desk.went(0, 1, due_ms + 0.1)
    assert withdrawn(commands)[0] == (1, grant.epoch)
    last = [c for c in commands if isinstance(c, Publish) and c.lease.vgpu == 0][-1]
    assert commands.index(last) > 0  # published again only once nothing else has GO beside it
    assert desk.statement(0, due_ms + 1).holds


def test_who_waits_keeps_it_until_it_is_granted() -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF, standby=True)
    desk.wants(0, 0)
    desk.went(0, 1, 0)
    commands = desk.wants(1, 1)
    assert withdrawn(commands) == []
    assert [(x.vgpu, x.epoch, x.after) for x in granted(commands)] == [(0, 1, ()), (1, 2, ((0, 1),))]


def test_no_gang_has_one() -> None:
    desk = Desk(TemporalScheduler(), HALF, standby=True)
    assert withdrawn(desk.tell(GangCalled(0, GangWindow()), 1)) == [(0, 1)]
    assert standby(desk.tell(GangCalled(0, None), 2))


def test_in_spatial_mode_nobody_has_one() -> None:
    """Where all fit, an idle vGPU keeps its lease; where they do not, rounds say who goes."""
    desk = Desk(SpatialScheduler(), HALF, HALF, standby=True)
    assert not desk.scheduler.turns([0, 1])
    (lease,) = leases(desk.wants(0, 1))
    assert lease.epoch == 1
    desk.tell(Added(2, WIDE), 2)
    assert desk.scheduler.turns([0, 1, 2]) == {0, 1, 2}


def test_of_one_that_is_over_before_it_was_heard_of_nothing_is_said() -> None:
    desk = Desk(TemporalScheduler(), CAPPED, standby=True)
    reports = [Runnable(0), LeaseStarted(0, 1, MS), Drained(0, 1, 2 * MS, idle_ns=0, wants=False)]
    (lease,) = leases(desk.tell_all(reports, 3))
    assert (lease.epoch, lease.standby) == (2, True)
    assert desk.statement(0, 3).held_ns == MS


def test_one_that_began_by_itself_is_given_an_end_once_another_one_wants() -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF, standby=True)
    lease, _ = desk.scheduler.published(0)[-1]
    desk.went(0, lease.epoch, 2)
    (held,) = [said for said in granted(desk.wants(1, 10)) if said.vgpu == 0]
    assert held.end_ns == 10 * MS + desk.scheduler.policy.decision_ns + desk.scheduler.policy.window_ns
