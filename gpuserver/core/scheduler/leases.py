"""What the scheduler hears and what it says: events in, commands out. Times are CLOCK_MONOTONIC nanoseconds.

The scheduler (``temporal.py``, ``rounds.py``) never does I/O. The runtime turns what the native dispatcher saw into
events and hands the commands back to the dispatcher, which executes them in microseconds: it writes leases into the
grants pages and gives GO when the predecessors of a lease have drained or its ``go_by_ns`` has passed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple

from gpuserver.core.scheduler.policy import PPM

VgpuIndex = int
"""The vGPU's slot number on its GPU, 0 ≤ key < 256: the index of its entry in the relay page."""


FAR_NS = 1 << 62
"""The end of an open-ended lease, where there has to be one."""


class Mode(StrEnum):
    """One vGPU at a time on the whole card, or as many as their SMs fit on it."""

    TEMPORAL = "temporal"
    SPATIAL = "spatial"


class Priority(IntEnum):
    """Who goes first among vGPUs that are entitled to run."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(frozen=True, slots=True)
class Share:
    """What one vGPU was promised. Ratios in parts per million of one GPU's time; SMs in millipercent.

    ``guarantee_ppm`` ≤ ``limit_ppm`` ≤ 1_000_000. Temporal mode: both already multiplied with the SM share, and
    ``sm_mpercent`` is 100_000. Spatial mode: ``sm_mpercent`` is what MPS *granted*, as a share of the card;
    ``bursts``: its processes run on all SMs nevertheless.
    """

    guarantee_ppm: int
    limit_ppm: int = 1_000_000
    sm_mpercent: int = 100_000
    priority: Priority = Priority.NORMAL
    bursts: bool = False
    shareable: bool = False
    """In temporal mode it may hold a shared lease, while it is light (``kinds.py``)."""
    counted: bool = True
    """The hooks of its processes count the GPU time that they use: an allowance holds them to its limit."""


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Added:
    """A vGPU was created, or restored from the journal: then ``book`` carries its old debt and bucket."""

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
    """No process of the vGPU wants a token any more (it died or gave up). What it holds ends with ``Drained``."""

    vgpu: VgpuIndex


@dataclass(frozen=True, slots=True)
class Tick:
    """``next_deadline_ns()`` has come."""


@dataclass(frozen=True, slots=True)
class LeaseStarted:
    """GO was given at ``at_ns``: from here on the lease is usable, and charged. Reported for every lease that got GO,
    also where a ``Withdraw`` crossed it on the way. ``taken_ns``: a standing lease before it was granted, it was in use
    for so long already, which is charged as well."""

    vgpu: VgpuIndex
    epoch: int
    at_ns: int
    taken_ns: int = 0


@dataclass(frozen=True, slots=True)
class Drained:
    """Everything submitted under ``epoch`` has finished on the GPU; nothing more will be submitted under it.

    ``idle_ns``: sum of observed idle gaps inside the lease (held − idle_ns = busy; unknown is busy: 0). ``wants``:
    whether a process of the vGPU still wants a token; False is the early return of a vGPU that went idle. Final: an
    epoch that has drained is over, with every older one of the vGPU, even if a new end for it was on its way. Also what
    the runtime reports for a holder that died (``at_ns``: when its work was seen gone, which may be in the past; the
    books settle there).
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
    kernels launched lately. ``handover_cost_ns``: idle time that the first 8 ms of the lease before had more than the
    rest of leases has, the price of a hand-over to this vGPU. ``drains_by_ns``: predicted completion of everything
    submitted. 0: nothing was learned. ``used_ns``: GPU time used under the lease, as the hooks' meters count it; None:
    they do not.
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
    """What the vGPU's hooks measured (``cython_ext/logic/demand.pxd``): its demand (0: not measured), its mean burst,
    the part of the time in which it waited for the GPU, and the GPU time that all its launches so far take alone."""

    vgpu: VgpuIndex
    demand_ppm: int
    burst_ns: int = 0
    waits_ppm: int = 0
    work_ns: int = 0


@dataclass(frozen=True, slots=True)
class GangWindow:
    """When a member of a gang is to hold; see ``gangs.py``.

    Inside [``start_ns``, ``end_ns``) it goes before others of its class. ``binding``: outside it stays away.
    ``urgent``: another member has not drained after its lease and may be waiting for this one, which goes now.
    ``lapses_ns``: unless renewed before, neither holds from here on; that bounds every wait for another GPU's word.
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
    """What the vGPU's gang is called to. None: it is in no gang."""

    vgpu: VgpuIndex
    muster: GangWindow | None


Report = Runnable | Idle | LeaseStarted | Drained | Observed | Measured
"""What the dispatcher saw."""

Event = Report | Added | Changed | Removed | GangCalled | Tick


# --- commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lease:
    """One token: the right to submit on the vGPU's SM partition during [start, end).

    ``epoch`` grows by one per lease of a GPU. ``end_ns`` None: open-ended, revocable by ``Publish``-ing the same epoch
    with an end. ``after``: (vgpu, epoch) pairs that must have drained before GO is given; a pair that is not live
    (drained, withdrawn, its vGPU removed) counts as drained. GO comes when they have, at the latest at ``go_by_ns`` (no
    wait is unbounded), and not before ``start_ns`` unless ``early``, or 0.7 ms before it once all of a not empty
    ``after`` have drained: who held took no more work then, and nobody else is let in so late.

    A lease is usable from GO on and keeps its length: GO at g moves ``end_ns`` by g − start_ns. Only one that has those
    0.7 ms keeps its end. ``window_ns``: the most predicted GPU time the vGPU may have in flight while others wait.

    A ``standing`` lease is published while the vGPU is idle, and begins by itself: it has GO once the vGPU wants a
    token, unless a lease of anybody is in force then, one that is not standing waits for GO, or another vGPU wants as
    well: who goes first is for the scheduler to say. Once it went, no other lease has GO beside it, before its own
    ``go_by_ns``, until it has been published again: the scheduler may have granted that one before it heard of this.
    """

    vgpu: VgpuIndex
    epoch: int
    start_ns: int
    end_ns: int | None
    after: tuple[tuple[VgpuIndex, int], ...] = ()
    go_by_ns: int = 0
    early: bool = True
    window_ns: int = 1_000_000
    standing: bool = False

    def begun(self, at_ns: int) -> Lease:
        """The lease as it is from GO at ``at_ns`` on."""
        end_ns = self.end_ns
        if end_ns is not None and (at_ns > self.start_ns or self.early or self.standing):
            end_ns += at_ns - self.start_ns
        return self._like(self.epoch, at_ns, end_ns)

    def under(self, epoch: int) -> Lease:
        """The same lease with that epoch."""
        return self if epoch == self.epoch else self._like(epoch, self.start_ns, self.end_ns)

    def _like(self, epoch: int, start_ns: int, end_ns: int | None) -> Lease:
        """As ``replace`` makes it, in less than half the time: this is done twice for each lease."""
        return Lease(
            vgpu=self.vgpu,
            epoch=epoch,
            start_ns=start_ns,
            end_ns=end_ns,
            after=self.after,
            go_by_ns=self.go_by_ns,
            early=self.early,
            window_ns=self.window_ns,
            standing=self.standing,
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
    """Take back a published lease that has not started. If its GO was given a moment ago, it ends now and is reported
    like any other (``LeaseStarted``, ``Drained``)."""

    vgpu: VgpuIndex
    epoch: int


@dataclass(frozen=True, slots=True)
class Allow:
    """Under its open-ended lease ``epoch`` the vGPU may use ``allowance_ns`` of GPU time in all, and then waits for
    more. None: as much as it can. Where that lease has not gone yet, what it used before does not count."""

    vgpu: VgpuIndex
    epoch: int
    allowance_ns: int | None


Command = Publish | Withdraw | Allow


# --- what another GPU has to know ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GangMemberStatus:
    """Of one vGPU, for the other members of its gang.

    ``bound``: it wants a token or holds a finite lease, so the others' leases are to be at the time of its own.
    ``start_ns``, ``end_ns``: of its oldest lease, or of the one that it will have as soon as its limit lets it (0, 0:
    neither is known). ``late``: that has begun, and has not drained
    long after its end. ``ready``: it could go if it were called; False: its limit or its debt keep it for a while.
    """

    bound: bool = False
    start_ns: int = 0
    end_ns: int = 0
    late: bool = False
    ready: bool = True


# --- books ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AccountState:
    """The journalled part of one vGPU's account. ``lag`` is r·(V − v) in ns: positive, the vGPU is owed time.

    ``light``, ``heavy_ns`` and ``stayed_ns`` are its kind: how much longer it is heavy at least, and how long it had
    to be the last time (``kinds.py``)."""

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
        """The same when ``passed_ns`` have passed without a lease: the limit goes on filling the bucket. One that is on
        the card for shorter stays than its debt lasts would else never run again."""
        return replace(self, bucket_ns=self.bucket_ns + limit_ppm * passed_ns // PPM)

    def overrun(self, held_ns: int) -> AccountState:
        """The same when a lease that it has no more kept the GPU for ``held_ns`` after its end."""
        return replace(
            self,
            lag_ns=self.lag_ns - held_ns,
            bucket_ns=self.bucket_ns - held_ns,
            held_ns=self.held_ns + held_ns,
            busy_ns=self.busy_ns + held_ns,
            overuse_ns=self.overuse_ns + held_ns,
        )


class ServiceTotals(NamedTuple):
    """What one vGPU has had of the GPU so far, and in how many leases."""

    held_ns: int
    busy_ns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class AccountSnapshot:
    """One vGPU as shown by ``vgpuctl``. Times in nanoseconds; ``lag_ns`` > 0: it is owed time, < 0: it is in debt."""

    vgpu: VgpuIndex
    guarantee_ppm: int
    limit_ppm: int
    priority: Priority
    wants: bool
    holds: bool
    open_ended: bool
    throttled: bool
    barred: bool
    waiting_since_ns: int | None
    lag_ns: int
    bucket_ns: int
    held_ns: int
    busy_ns: int
    overuse_ns: int
    tokens: int
    light: bool = False
    shared: bool = False
    """It holds a shared lease."""
    demand_ppm: int = 0
    """0: not measured."""
    burst_ns: int = 0
