"""``vgpuctl set`` while leases are held: what changes, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.desk import MS, Desk, spans, withdrawn
from vgpu.share import PPM, Priority, Share

HALF = Share(PPM // 2, PPM, 100_000)
HIGH = replace(HALF, priority=Priority.HIGH)
LOW = replace(HALF, priority=Priority.LOW)
SOON_MS = (DEFAULT_POLICY.decision_ns + DEFAULT_POLICY.window_low_ns) / MS


def held_by_the_first() -> Desk:
    desk = Desk(TemporalScheduler(), HALF, HALF)
    desk.runs(0, 0)
    desk.wants(1, 1)
    return desk


def test_who_becomes_high_goes_as_soon_as_possible() -> None:
    desk = held_by_the_first()
    assert spans(desk.changed(1, HIGH, 3))[0] == (0, 1, 0, 3 + SOON_MS)


def test_whose_holder_becomes_low_goes_as_soon_as_possible() -> None:
    desk = held_by_the_first()
    assert spans(desk.changed(0, LOW, 3))[0] == (0, 1, 0, 3 + SOON_MS)


def test_who_becomes_low_before_its_turn_goes_after_the_others() -> None:
    desk = Desk(TemporalScheduler(), HALF, HALF, HALF)
    desk.runs(0, 0)
    desk.wants(1, 1)
    assert [span[0] for span in spans(desk.wants(2, 1.5))] == [2]  # published as the next one
    commands = desk.changed(2, LOW, 2)
    assert withdrawn(commands) == [(2, 3)]
    assert [span[0] for span in spans(commands)] == [1]


def test_a_high_one_takes_its_sms_back_in_spatial_mode() -> None:
    wide = [replace(share, guarantee_ppm=450_000, sm_mpercent=60_000) for share in (HALF, HALF)]
    desk = Desk(SpatialScheduler(), *wide)
    desk.runs(0, 0)
    desk.wants(1, 3)
    before = desk.scheduler.published(0)[0][0].end_ns
    desk.changed(1, replace(wide[1], priority=Priority.HIGH), 4)
    after = desk.scheduler.published(0)[0][0].end_ns
    assert before == 20 * MS
    assert after is not None
    assert after <= 5 * MS


def test_a_limit_that_is_taken_away_ends_the_wait() -> None:
    desk = Desk(TemporalScheduler(), Share(PPM // 10, PPM // 10)).ganged(0)
    desk.runs(0, 0)
    end_ns = desk.scheduler.published(0)[0][0].end_ns
    assert end_ns is not None
    desk.drained(0, 1, end_ns / MS)
    assert desk.statement(0, end_ns / MS + 1).throttled
    ((_, _, start_ms, end_ms),) = spans(desk.changed(0, Share(PPM // 10, PPM), end_ns / MS + 2))
    assert (start_ms, end_ms) == (end_ns / MS + 2, None)


def test_a_process_whose_hook_counts_nothing_gives_its_vgpus_lease_an_end() -> None:
    share = Share(PPM * 3 // 10, PPM * 3 // 10)
    desk = Desk(TemporalScheduler(), share)
    assert desk.runs(0, 0).end_ns is None
    desk.changed(0, replace(share, counted=False), 5)
    assert desk.scheduler.published(0)[0][0].end_ns is not None
    free = replace(share, limit_ppm=PPM, counted=False)
    assert desk.changed(0, free, 6) or desk.tick(20)
    assert desk.scheduler.published(0)[0][0].end_ns is None  # without a limit there is nothing to hold it to


@pytest.mark.parametrize("percent", [5, 40])
def test_a_debt_is_kept_while_throttled_too(percent: int) -> None:
    """In real time: what the others could not use while it held beyond its share."""
    desk = Desk(TemporalScheduler(), Share(PPM // 5, PPM // 5), Share(PPM * 4 // 5))
    lease = desk.runs(0, 0)
    desk.wants(1, 1)
    desk.drained(0, lease.epoch, 80)
    before = desk.statement(0, 80)
    assert before.throttled
    assert before.lag_ns < -50 * MS
    share = percent * PPM // 100
    desk.changed(0, Share(share, share), 80)
    after = desk.statement(0, 80)
    assert after.throttled
    assert after.lag_ns == pytest.approx(before.lag_ns, abs=1000)
    # The others' progress, of which it would have had its new share, pays it.
    desk.went(1, 2, 80)
    paid = desk.statement(0, 90).lag_ns - after.lag_ns
    assert paid == pytest.approx(10 * MS * share * PPM / (PPM * 4 // 5) / PPM, rel=0.01)


def test_a_limit_comes_and_goes_under_a_lease_without_an_end() -> None:
    """Its hooks are told at once: nothing else may ever happen on a GPU that one vGPU has for itself."""
    capped = Share(PPM // 2, PPM // 2)
    desk = Desk(TemporalScheduler(), HALF)
    assert desk.runs(0, 0).end_ns is None
    assert desk.allowed == {}
    desk.changed(0, capped, 1000)
    (epoch, allowance_ns) = desk.allowed[0]
    assert allowance_ns is not None
    assert 1000 * MS < allowance_ns < 1200 * MS  # what it has used, and a full bucket
    assert desk.due_ms == 1010
    desk.tick(1010)
    assert desk.allowed[0][1] is not None
    desk.changed(0, HALF, 1015)
    assert desk.allowed[0] == (epoch, None)
    assert desk.due_ms is None
