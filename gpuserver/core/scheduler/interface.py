"""The one interface through which the runtime sees a scheduler, whatever the GPU's mode."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from gpuserver.core.scheduler.accounts import InvariantError
from gpuserver.core.scheduler.leases import (
    AccountSnapshot,
    AccountState,
    Command,
    Event,
    GangMemberStatus,
    Lease,
    Report,
    ServiceTotals,
    VgpuIndex,
)
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, Policy
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from vgpu.share import Mode

__all__ = ["InvariantError", "Scheduler", "make_scheduler"]


class Scheduler(Protocol):
    """Events in, commands out; no clock, no I/O. See ``gpuserver.core.scheduler.leases`` for the contract.

    ``handle`` takes ``now_ns`` on CLOCK_MONOTONIC, never earlier than before; ``handle_all`` takes several reports, in
    the order in which they came, and decides once. After each call the runtime executes the commands in order and arms
    a timer for ``next_deadline_ns()``; when it fires, it sends ``Tick``.
    """

    policy: Policy

    @property
    def next_epoch(self) -> int: ...

    @property
    def period_ns(self) -> int: ...

    def turns(self, company: Collection[VgpuIndex]) -> set[VgpuIndex]: ...

    def sharing(self, company: Collection[VgpuIndex]) -> set[VgpuIndex]: ...

    def metered(self) -> list[VgpuIndex]: ...

    def comparable(self) -> list[VgpuIndex]: ...

    def shared(self) -> list[VgpuIndex]: ...

    def skip_to(self, epoch: int) -> None: ...

    def adopt(self, policy: Policy) -> None: ...

    def handle(self, event: Event, now_ns: int) -> list[Command]: ...

    def handle_all(self, reports: Sequence[Report], now_ns: int) -> list[Command]: ...

    def next_deadline_ns(self) -> int | None: ...

    def check(self) -> None: ...

    def outlook(self, vgpu: VgpuIndex) -> GangMemberStatus: ...

    def booked(self, vgpu: VgpuIndex) -> tuple[int, int]: ...

    def published(self, vgpu: VgpuIndex) -> list[tuple[Lease, bool]]: ...

    def books(self, now_ns: int = 0) -> dict[VgpuIndex, AccountState]: ...

    def snapshot(self, now_ns: int) -> list[AccountSnapshot]: ...

    def served(self, now_ns: int) -> dict[VgpuIndex, ServiceTotals]: ...

    def at_limit(self, now_ns: int) -> frozenset[VgpuIndex]: ...


def make_scheduler(mode: Mode, policy: Policy = DEFAULT_POLICY, *, first_epoch: int = 1) -> Scheduler:
    """The scheduler of a GPU in ``mode``. ``first_epoch``: the epoch of its first lease; epochs only grow."""
    if mode is Mode.SPATIAL:
        return SpatialScheduler(policy, first_epoch=first_epoch)
    return TemporalScheduler(policy, first_epoch=first_epoch)
