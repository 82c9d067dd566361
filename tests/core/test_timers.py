"""Who waits has a timer, whatever is read when that is due: readings come every 10 ms, and decide nothing."""

from __future__ import annotations

from gpuserver.core.scheduler.leases import GangCalled, GangWindow
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, SECOND, with_period
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.desk import MS, Desk, leases, spans
from vgpu.share import PPM, Share

MOST, LEAST = Share(PPM * 9 // 10), Share(PPM // 10)


def test_a_reading_does_not_take_the_place_of_the_decision_that_is_due() -> None:
    """The holder, which is to go on at the end of its lease, is stopped before it hears of that: it never drains."""
    desk = Desk(TemporalScheduler(), MOST, LEAST)
    desk.runs(0, 0)
    desk.wants(1, 1)
    assert desk.due_ms == 11.2
    assert desk.observed(0, 1, 11.3) == []
    assert desk.due_ms == 11.2
    assert spans(desk.tick(11.3))[0][:3] == (0, 1, 0)
    assert desk.due_ms is not None
    while desk.due_ms is not None:
        late_ms = desk.due_ms + 0.1
        desk.observed(0, 1, late_ms)
        granted = spans(desk.tick(late_ms))
    assert [vgpu for vgpu, *_ in granted] == [1]


def test_nor_of_a_call_to_a_gang() -> None:
    """Somebody holds where it is to follow; until it is called nobody else is."""
    desk = Desk(TemporalScheduler(), MOST, LEAST)
    desk.runs(0, 0)
    desk.tell(GangCalled(1, GangWindow(40 * MS, 60 * MS, binding=True, lapses_ns=500 * MS)), 1)
    desk.wants(1, 1)
    due_ms = desk.due_ms
    assert due_ms is not None
    desk.observed(0, 1, due_ms + 0.1)
    assert desk.due_ms == due_ms


def test_nobody_waits_for_a_withdrawn_lease_longer_than_for_another() -> None:
    """Its GO may have crossed the withdrawal; with a long period a token is longer than anybody's patience."""
    desk = Desk(TemporalScheduler(with_period(DEFAULT_POLICY, SECOND)), LEAST, LEAST, LEAST)
    desk.runs(0, 0)
    desk.wants(1, 20)
    desk.idle(1, 21)
    (lease,) = (lease for lease in leases(desk.wants(2, 22)) if lease.vgpu == 2)
    assert lease.after == ((0, 1), (1, 2))
    assert lease.go_by_ns <= lease.start_ns + DEFAULT_POLICY.grace_ns


def test_who_leaves_its_gang_while_it_is_away_is_away_no_more() -> None:
    """The process that was in several vGPUs has ended; another one of this vGPU wants a token."""
    desk = Desk(TemporalScheduler(), MOST, LEAST)
    desk.tell(GangCalled(1, GangWindow(binding=True, lapses_ns=500 * MS)), 0)
    desk.runs(0, 0)
    desk.wants(1, 1)
    assert desk.scheduler.published(1) == []
    desk.tell(GangCalled(1, None), 2)
    while not desk.scheduler.published(1):
        assert desk.due_ms is not None, "it waits for ever"
        desk.tick(desk.due_ms)
