"""vGPUs that hold shared leases, for the tests of sharing."""

from __future__ import annotations

from dataclasses import replace

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.desk import MS, Desk, share
from vgpu.share import Priority, Share

LIGHT, HEAVY = 0.2, 0.9
NANOSECOND = 1 / (200 * MS)
"""As a part of a window of 200 ms."""


def sharer(guarantee: float = 0.3, limit: float = 1.0, priority: Priority = Priority.NORMAL) -> Share:
    return replace(share(guarantee, 100, limit, priority), shareable=True)


def sharing(*shares: Share) -> Desk:
    """All of them are light, want the GPU, and hold shared leases by 100 ms."""
    desk = Desk(TemporalScheduler(), *shares)
    desk.measured(0, *(LIGHT for _ in shares))
    desk.runs(0, 0)
    for key in range(1, len(shares)):
        desk.wants(key, 1)
        desk.went(key, held(desk, key)[0], 1)
    assert sorted(desk.scheduler.shared()) == list(range(len(shares)))
    return desk


def held(desk: Desk, key: int) -> tuple[int, int | None]:
    """Epoch and end of the newest lease of ``key``, in ns."""
    lease, _ = desk.scheduler.published(key)[-1]
    return lease.epoch, lease.end_ns


def exclusive(guarantee: float = 0.1) -> Share:
    return replace(sharer(guarantee), shareable=False)


def accounts(*guarantees: float) -> list[Account]:
    return [Account(key, key, sharer(guarantee)) for key, guarantee in enumerate(guarantees)]
