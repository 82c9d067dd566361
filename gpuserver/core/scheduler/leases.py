"""The words between runtime and scheduler: events, commands, accounts. Times are CLOCK_MONOTONIC nanoseconds.

The scheduler (``temporal/``, ``spatial/``) never does I/O. The runtime turns the native dispatcher's reports into
events, and hands the commands back to the dispatcher, which executes them in microseconds. The dispatcher writes leases
into the grants pages. It gives GO when the predecessors of a lease have drained or its ``go_by_ns`` has passed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from vgpu.share import PPM, Priority, Share

VgpuIndex = int
"""The vGPU's slot number on its GPU, 0 ≤ key < 256: the index of its entry in the relay page."""


FAR_NS = 1 << 62
"""The end of an open-ended lease, where there has to be one."""


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Added:
    """A vGPU was created, or restored from the journal; ``book`` then carries its old debt and bucket."""

    vgpu: VgpuIndex
    share: Share
    book: AccountState | None = None


@dataclass(frozen=True, slots=True)
class Changed:
    """``vgpuctl set``: a new share, effective at the next token."""

    vgpu: VgpuIndex
    share: Share


@dataclass(frozen=True, slots=True)
class Removed:
    """The vGPU is gone; its lease, if any, is over now."""

    vgpu: VgpuIndex


@dataclass(frozen=True, slots=True)
class Runnable:
    """A process of the vGPU waits for a token (or holds one and has work)."""

    vgpu: VgpuIndex


@dataclass(frozen=True, slots=True)
class Idle:
    """No process of the vGPU wants a token any more (it died or gave up). A held lease ends with ``Drained``."""

    vgpu: VgpuIndex


@dataclass(frozen=True, slots=True)
class Tick:
    """``next_deadline_ns()`` has come."""


@dataclass(frozen=True, slots=True)
class LeaseStarted:
    """The dispatcher gave GO at ``at_ns``: from here on the lease is usable, and charged. The dispatcher reports every
    lease that got GO, also where a ``Withdraw`` crossed it on the way. ``taken_ns``: the vGPU had used a standby lease
    for so long before it was granted; the scheduler charges that as well."""

    vgpu: VgpuIndex
    epoch: int
    at_ns: int
    taken_ns: int = 0


@dataclass(frozen=True, slots=True)
class Drained:
    """Everything submitted under ``epoch`` has finished on the GPU; nothing more will be submitted under it.

    ``idle_ns``: sum of observed idle gaps inside the lease (held − idle_ns = busy; unknown is busy: 0). ``wants``:
    whether a process of the vGPU still wants a token; False is the early return of a vGPU that became idle. Final: an
    epoch that has drained is over, with every older one of the vGPU, even if a new end for it was on its way. The
    runtime also reports this for a holder that died. ``at_ns`` is then when its work was seen gone, which may be in the
    past; the scheduler settles its account up to there.
    ``longest_kernel_ns``, ``handover_cost_ns``, ``used_ns``: as in ``Observed``; 0: nothing was learned.
    """

    vgpu: VgpuIndex
    epoch: int
    at_ns: int
    idle_ns: int
    wants: bool
    longest_kernel_ns: int = 0
    handover_cost_ns: int = 0
    used_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """A mid-lease reading of a holder.

    ``idle_ns``: observed idle gaps since the lease began. ``longest_kernel_ns``: the longest of the learned lengths of
    kernels launched lately. ``handover_cost_ns``: the price of a hand-over to this vGPU. It is the idle time that the
    first 8 ms of the previous lease had beyond that of the rest of leases. ``drains_by_ns``: predicted completion of
    everything submitted. 0: nothing was learned. ``used_ns``: GPU time used under the lease, as the hooks' meters count
    it; None: they do not.
    """

    vgpu: VgpuIndex
    epoch: int
    idle_ns: int
    longest_kernel_ns: int = 0
    handover_cost_ns: int = 0
    drains_by_ns: int = 0
    used_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What the vGPU's hooks measured (``cython_ext/logic/meter/demand.pxd``): its demand (0: not measured) and its mean
    burst. ``waits_ppm``: the part of the time in which it waited for the GPU. ``work_ns``: the GPU time that all its
    launches so far take alone."""

    vgpu: VgpuIndex
    demand_ppm: int
    burst_ns: int = 0
    waits_ppm: int = 0
    work_ns: int = 0


@dataclass(frozen=True, slots=True)
class GangWindow:
    """When a member of a gang is to hold; see ``gangs.py``.

    Inside [``start_ns``, ``end_ns``) it precedes other vGPUs of its class. ``binding``: outside it stays uncalled.
    ``urgent``: another member has not drained after its lease and may be waiting for this one, which runs now.
    ``lapses_ns``: unless renewed before, ``binding`` and ``urgent`` end here. That bounds every wait for a message from
    another GPU.
    """

    start_ns: int = 0
    end_ns: int = 0
    binding: bool = False
    urgent: bool = False
    lapses_ns: int = 0
    leader: int = -1
    """The GPU of the lease that it stands for."""


@dataclass(frozen=True, slots=True)
class GangCalled:
    """The vGPU's gang window has changed. None: it is in no gang."""

    vgpu: VgpuIndex
    gang_window: GangWindow | None


Report = Runnable | Idle | LeaseStarted | Drained | Observed | Measured
"""A report of the dispatcher."""

Event = Report | Added | Changed | Removed | GangCalled | Tick


# --- commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lease:
    """One token: the right to submit on the vGPU's SM partition during [start, end).

    ``epoch`` grows by one per lease of a GPU. ``end_ns`` None: open-ended, revocable by ``Publish``-ing the same epoch
    with an end. ``after``: (vgpu, epoch) pairs that must have drained before GO is given. A pair that is not live
    (drained, withdrawn, its vGPU removed) counts as drained. GO comes when they have drained, at the latest at
    ``go_by_ns`` (no wait is unbounded). It does not come before ``start_ns``, with two exceptions. One is ``early``.
    The other is 0.7 ms before ``start_ns``, once all pairs of an ``after`` that is not empty have drained. Reason: so
    late the previous holders take no more work, and no other vGPU gets a lease.

    A lease is usable from GO on and keeps its length: GO at g moves ``end_ns`` by g − start_ns. Only a lease that
    starts in those 0.7 ms keeps its end. ``window_ns``: the most predicted GPU time the vGPU may have in flight while
    others wait.

    A ``standby`` lease is published while the vGPU is idle, and begins by itself. The dispatcher gives it GO once the
    vGPU wants a token. In three cases it does not, and the scheduler decides which vGPU runs first: a lease of any vGPU
    is in force, a lease that is not a standby lease waits for GO, or another vGPU wants a token as well. Once a standby
    lease has started, another lease has GO beside it only at that other lease's ``go_by_ns``, until the standby lease
    has been published again. Reason: the scheduler may have granted the other lease before it received the report of
    this start.
    """

    vgpu: VgpuIndex
    epoch: int
    start_ns: int
    end_ns: int | None
    after: tuple[tuple[VgpuIndex, int], ...] = ()
    go_by_ns: int = 0
    early: bool = True
    window_ns: int = 1_000_000
    standby: bool = False

    def begun(self, at_ns: int) -> Lease:
        """The lease as it is from GO at ``at_ns`` on."""
        end_ns = self.end_ns
        if end_ns is not None and (at_ns > self.start_ns or self.early or self.standby):
            end_ns += at_ns - self.start_ns
        return self._like(self.epoch, at_ns, end_ns)

    def under(self, epoch: int) -> Lease:
        """The same lease with that epoch."""
        return self if epoch == self.epoch else self._like(epoch, self.start_ns, self.end_ns)

    def _like(self, epoch: int, start_ns: int, end_ns: int | None) -> Lease:
        """As ``replace`` makes it, in less than half the time: the scheduler does this twice for each lease."""
        return Lease(
            vgpu=self.vgpu,
            epoch=epoch,
            start_ns=start_ns,
            end_ns=end_ns,
            after=self.after,
            go_by_ns=self.go_by_ns,
            early=self.early,
            window_ns=self.window_ns,
            standby=self.standby,
        )


@dataclass(frozen=True, slots=True)
class Publish:
    """Make ``lease`` known to its vGPU.

    A new epoch is a new lease (the vGPU's current one, or its next one where it still holds an older epoch). A known
    epoch whose GO was not given is replaced whole. A known epoch whose GO was given takes ``end_ns`` and ``window_ns``
    as they stand (absolute, not moved again); an end that has passed ends it now. A drained epoch ignores it.
    """

    lease: Lease


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take back a published lease that has not started. If its GO was given a moment ago, it ends now. The dispatcher
    then reports it like any other (``LeaseStarted``, ``Drained``)."""

    vgpu: VgpuIndex
    epoch: int


@dataclass(frozen=True, slots=True)
class Allow:
    """Under its open-ended lease ``epoch`` the vGPU may use ``allowance_ns`` of GPU time in all, and then waits for
    more. None: as much as it can. Where that lease has not started yet, what the vGPU used before does not count."""

    vgpu: VgpuIndex
    epoch: int
    allowance_ns: int | None


Command = Publish | Withdraw | Allow


# --- sent to the servers of other GPUs ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GangMemberStatus:
    """The status of one vGPU, for the other members of its gang.

    ``bound``: it wants a token or holds a finite lease, so the others' leases are to be at the time of its own.
    ``start_ns``, ``end_ns``: of its oldest lease, or of the one that it will have as soon as its limit allows it (0, 0:
    neither is known). ``late``: that lease has begun, and has not drained long after its end. ``ready``: it could run
    if it were called; False: its limit or its debt keep it out for a while.
    """

    bound: bool = False
    start_ns: int = 0
    end_ns: int = 0
    late: bool = False
    ready: bool = True


# --- accounts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AccountState:
    """The journalled part of one vGPU's account. ``lag`` is r·(V − v) in ns: positive, the vGPU is owed time.

    ``light``, ``heavy_ns`` and ``stayed_ns`` are its kind: how much longer it is heavy at least, and how long it had
    to stay heavy the last time (``kinds.py``)."""

    lag_ns: int
    bucket_ns: int
    held_ns: int
    busy_ns: int
    overuse_ns: int
    tokens: int
    light: bool = False
    heavy_ns: int = 0
    stayed_ns: int = 0

    def refilled(self, limit_ppm: int, passed_ns: int) -> AccountState:
        """The same when ``passed_ns`` have passed without a lease: the limit goes on filling the bucket. Reason: a vGPU
        that is on the GPU for shorter stays than its debt lasts would otherwise never run again."""
        return replace(self, bucket_ns=self.bucket_ns + limit_ppm * passed_ns // PPM)

    def overrun(self, held_ns: int) -> AccountState:
        """The same when a lease that the vGPU no longer has kept the GPU for ``held_ns`` after its end."""
        return replace(
            self,
            lag_ns=self.lag_ns - held_ns,
            bucket_ns=self.bucket_ns - held_ns,
            held_ns=self.held_ns + held_ns,
            busy_ns=self.busy_ns + held_ns,
            overuse_ns=self.overuse_ns + held_ns,
        )


class ServiceTotals(NamedTuple):
    """The GPU time that one vGPU has had so far, and in how many leases."""

    held_ns: int
    busy_ns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class AccountSnapshot:
    """One vGPU as shown by ``vgpuctl``. Times in nanoseconds; ``lag_ns`` > 0: it is owed time, < 0: it is in debt.
    ``holds``: a lease is published for it, perhaps ahead. ``runs``: a lease of it has begun, and has not drained."""

    vgpu: VgpuIndex
    guarantee_ppm: int
    limit_ppm: int
    priority: Priority
    wants: bool
    holds: bool
    open_ended: bool
    throttled: bool
    penalised: bool
    waiting_since_ns: int | None
    lag_ns: int
    bucket_ns: int
    held_ns: int
    busy_ns: int
    overuse_ns: int
    tokens: int
    runs: bool = False
    light: bool = False
    shared: bool = False
    """It holds a shared lease."""
    demand_ppm: int = 0
    """0: not measured."""
    burst_ns: int = 0
