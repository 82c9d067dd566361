"""A scheduler driven by hand: one event after the other, at the milliseconds that a test names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuserver.core.scheduler.interface import Scheduler
from gpuserver.core.scheduler.leases import (
    AccountSnapshot,
    AccountState,
    Added,
    Allow,
    Changed,
    Command,
    Drained,
    Event,
    GangCalled,
    GangWindow,
    Idle,
    Lease,
    LeaseStarted,
    Measured,
    Observed,
    Publish,
    Removed,
    Report,
    Runnable,
    Tick,
    Withdraw,
)
from gpuserver.core.scheduler.policy import Policy
from vgpu.share import PPM, Priority, Share

MS = 1_000_000
GRANTED_ONLY = Policy(standby=False)
"""Without standby leases: every lease is one that the test has asked for."""


class Desk:
    """vGPUs 0, 1, … have ``shares``. Each call tells one event at ``at_ms``, checks the books, returns the commands.

    ``standby``: with standby leases, which take epochs while no vGPU wants the GPU."""

    def __init__(self, scheduler: Scheduler, *shares: Share, standby: bool = False) -> None:
        self.scheduler = scheduler
        scheduler.adopt(replace(scheduler.policy, standby=standby))
        self.allowed: dict[int, tuple[int, int | None]] = {}
        """What the hooks of each know last: epoch, and the GPU time that they may use under it."""
        for key, share in enumerate(shares):
            scheduler.handle(Added(key, share), 0)

    def tell(self, event: Event, at_ms: float) -> list[Command]:
        return self._noted(self.scheduler.handle(event, round(at_ms * MS)))

    def _noted(self, commands: list[Command]) -> list[Command]:
        self.scheduler.check()
        self.allowed.update({c.vgpu: (c.epoch, c.allowance_ns) for c in commands if isinstance(c, Allow)})
        return commands

    def tell_all(self, reports: list[Report], at_ms: float) -> list[Command]:
        return self._noted(self.scheduler.handle_all(reports, round(at_ms * MS)))

    def wants(self, key: int, at_ms: float) -> list[Command]:
        return self.tell(Runnable(key), at_ms)

    def ganged(self, key: int) -> Desk:
        """``key`` is in a gang that binds it to nothing: under a limit each of its leases has an end."""
        self.tell(GangCalled(key, GangWindow()), 0)
        return self

    def idle(self, key: int, at_ms: float) -> list[Command]:
        return self.tell(Idle(key), at_ms)

    def went(self, key: int, epoch: int, at_ms: float) -> list[Command]:
        return self.tell(LeaseStarted(key, epoch, round(at_ms * MS)), at_ms)

    def runs(self, key: int, at_ms: float) -> Lease:
        """``key`` wants a token, is given one at once, and gets GO."""
        (lease,) = leases(self.wants(key, at_ms))
        assert lease.vgpu == key
        self.went(key, lease.epoch, at_ms)
        return lease

    def drained(
        self, key: int, epoch: int, at_ms: float, *, wants: bool = True, idle_ms: float = 0, **learned: int
    ) -> list[Command]:
        at_ns, idle_ns = round(at_ms * MS), round(idle_ms * MS)
        return self.tell(Drained(key, epoch, at_ns, idle_ns, wants, **learned), at_ms)

    def observed(self, key: int, epoch: int, at_ms: float, **what: Any) -> list[Command]:
        return self.tell(Observed(key, epoch, **{"idle_ns": 0, **what}), at_ms)

    def measured(self, at_ms: float, *demands: float, waits: dict[int, float] | None = None) -> list[Command]:
        """What hooks measure of each vGPU, as ratios, and then a tick."""
        waits = waits or {}
        measures = [Measured(k, round(d * PPM), waits_ppm=round(waits.get(k, 0) * PPM)) for k, d in enumerate(demands)]
        return self.tell_all([*measures], at_ms) + self.tick(at_ms)

    def added(self, key: int, share: Share, at_ms: float) -> list[Command]:
        return self.tell(Added(key, share), at_ms)

    def changed(self, key: int, share: Share, at_ms: float) -> list[Command]:
        return self.tell(Changed(key, share), at_ms)

    def removed(self, key: int, at_ms: float) -> list[Command]:
        return self.tell(Removed(key), at_ms)

    def tick(self, at_ms: float) -> list[Command]:
        return self.tell(Tick(), at_ms)

    @property
    def due_ms(self) -> float | None:
        due = self.scheduler.next_deadline_ns()
        return None if due is None else due / MS

    def statement(self, key: int, at_ms: float) -> AccountSnapshot:
        return next(s for s in self.scheduler.snapshot(round(at_ms * MS)) if s.vgpu == key)


def share(guarantee: float, sm_percent: int, limit: float = 1.0, priority: Priority = Priority.NORMAL) -> Share:
    """``guarantee`` and ``limit``: of the time, as ratios; ``sm_percent``: of the SMs, its partition."""
    return Share(round(guarantee * PPM), round(limit * PPM), sm_percent * 1000, priority)


def owed(lag_ms: int) -> AccountState:
    """What a journal has kept of a vGPU with that lag."""
    return AccountState(lag_ns=lag_ms * MS, bucket_ns=10**9, held_ns=0, busy_ns=0, overuse_ns=0, tokens=0)


def leases(commands: list[Command]) -> list[Lease]:
    """What is published, the last word on each lease only."""
    said = {c.lease.epoch: c.lease for c in commands if isinstance(c, Publish)}
    return list(said.values())


def spans(commands: list[Command]) -> list[tuple[int, int, float, float | None]]:
    """(vGPU, epoch, start, end) of ``leases``, in milliseconds."""
    return [(x.vgpu, x.epoch, x.start_ns / MS, None if x.end_ns is None else x.end_ns / MS) for x in leases(commands)]


def withdrawn(commands: list[Command]) -> list[tuple[int, int]]:
    return [(c.vgpu, c.epoch) for c in commands if isinstance(c, Withdraw)]
