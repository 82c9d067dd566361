"""A limit is not saved up: what a vGPU may do beyond it at once is in its full bucket, whatever it did before."""

from __future__ import annotations

import pytest

from gpuserver.core.scheduler.base import SchedulerBase
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.desk import MS, Desk, leases
from vgpu.share import PPM, Share

BOTH = pytest.mark.parametrize("kind", [TemporalScheduler, SpatialScheduler])
HALF = Share(PPM // 2, PPM // 2, 50_000)
FULL_MS = DEFAULT_POLICY.wait_bucket_ns / 2 / MS


def works_now_and_then(desk: Desk, until_ms: int) -> int:
    """0 is alone, and computes a tenth of its time in a lease that goes on and on: in its gaps it wants on."""
    lease = desk.runs(0, 0)
    for now_ms in range(10, until_ms + 1, 10):
        desk.observed(0, lease.epoch, now_ms, idle_ns=now_ms * MS * 9 // 10)
        while desk.due_ms is not None and desk.due_ms < now_ms + 10:
            desk.tick(max(desk.due_ms, now_ms))
    ((held, _),) = desk.scheduler.published(0)
    assert held.epoch == lease.epoch
    return lease.epoch


@BOTH
def test_by_a_lease_that_goes_on_and_on(kind: type[SchedulerBase]) -> None:
    desk = Desk(kind(), HALF)
    works_now_and_then(desk, 5000)
    assert desk.statement(0, 5000).bucket_ns <= FULL_MS * MS


@BOTH
def test_by_a_lease_without_an_end_before_there_was_a_limit(kind: type[SchedulerBase]) -> None:
    desk = Desk(kind(), Share(PPM, PPM, 50_000))
    epoch = works_now_and_then(desk, 5000)
    changed = leases(desk.changed(0, HALF, 5000))
    most_ms = 2 * FULL_MS  # full by the limit that it had until now
    if kind is TemporalScheduler:
        used_ms, ahead_ms = 5000 / 10, DEFAULT_POLICY.allowance_ahead_ns / 2 / MS
        assert changed == []
        (allowed_epoch, allowance_ns) = desk.allowed[0]
        assert allowed_epoch == epoch
        assert allowance_ns is not None
        assert used_ms * MS < allowance_ns <= (used_ms + most_ms + ahead_ms) * MS
        return
    (lease,) = changed
    assert lease.epoch == epoch
    assert lease.end_ns is not None
    assert lease.end_ns <= (5000 + most_ms) * MS
