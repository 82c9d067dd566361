"""One vGPU's account with a scheduler: virtual time, deadline, limit bucket, and its leases (``active_lease.py``).

An account counts two quantities. *Held* time (a lease was usable and not yet drained) moves virtual time: the others
could not use it. Under a shared lease other vGPUs use the GPU, too, so there *used* time moves virtual time. *Busy*
time empties the limit bucket: the limit promises a bound on it. Busy time is held time less observed idle gaps. Under
an open-ended lease in temporal mode it is the GPU time that the hooks' meters count
(``cython_ext/logic/meter/meter.pxd``).

Numbers are integers throughout. Virtual time is nanoseconds with 20 fraction bits. The account carries the remainder of
a division by the guarantee, so that rounding loses no share. A bucket is nanoseconds × parts per million.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.kinds import Kind
from gpuserver.core.scheduler.leases import AccountSnapshot, AccountState, GangWindow, Lease, VgpuIndex
from vgpu.share import PPM, Share

FRACTION_BITS = 20
VIRTUAL_PER_REAL = PPM << FRACTION_BITS
HANDOVER_SAMPLE_MOST = 4
"""One lease's hand-over cost counts for at most so many times the upper bound of their mean."""


def virtual(real_ns: int, guarantee_ppm: int) -> int:
    """Real time as virtual time of a vGPU: t / r, rounded down."""
    return real_ns * VIRTUAL_PER_REAL // guarantee_ppm


def real(virtual_time: int, guarantee_ppm: int) -> int:
    """Virtual time of a vGPU as real time in nanoseconds: v · r, rounded down."""
    return virtual_time * guarantee_ppm // VIRTUAL_PER_REAL


@dataclass(slots=True)
class Account:
    """One vGPU. ``order`` is its place in the order of arrival, the last tie-breaker (keys are only names)."""

    key: VgpuIndex
    order: int
    share: Share
    time: int = 0
    """v, virtual."""
    deadline: int = 0
    """d, virtual."""
    bucket: int = 0
    """b, nanoseconds × ppm. May fall below zero without bound: a limit forgives nothing."""
    bucket_at_ns: int = 0
    wants: bool = False
    competing: bool = False
    """Wants or holds, and counts in V and W: not throttled, not penalised."""
    kept_lag_ns: int | None = None
    """While throttled: the lag with which it comes back."""
    penalised: bool = False
    """Deep in debt or bypassed: it waits outside the competition until the others have caught up."""
    gang_window: GangWindow | None = None
    """When its gang is called. None: no gang binds it."""
    uncalled: bool = False
    """Wants, but its gang is not called: it waits outside the competition."""
    urgent_turns: int = 0
    """How many of its latest leases were urgent ones, in a row."""
    holds: dict[int, ActiveLease] = field(default_factory=dict)
    standby: ActiveLease | None = None
    """A lease that begins by itself when the vGPU wants; it is in ``holds`` once it is granted, or has started."""
    waiting_since_ns: int | None = None
    served_ns: int = 0
    returns_ppm: int = 0
    """The part of its latest leases that it gave back early."""
    restored_ns: int = 0
    """What it was owed when the journal was written: its credit when it first wants a token."""
    last_epoch: int = 0
    """The newest epoch that drained; no report of an older one follows."""
    longest_kernel_ns: int = 0
    handover_ns: int = 0
    """c: what a hand-over to it costs, clamped."""
    held_ns: int = 0
    busy_ns: int = 0
    overuse_ns: int = 0
    tokens: int = 0
    allowance_at_ns: int | None = None
    """When the scheduler last allowed its hooks more under an open-ended lease. None: the hooks have no limit."""
    guarantee: int = field(init=False)
    capped: bool = field(init=False)
    kind: Kind = field(default_factory=Kind)
    _carry: int = 0
    _handover_mean_ns: int = 0

    def __post_init__(self) -> None:
        self.take_share(self.share)

    def take_share(self, share: Share) -> None:
        self.share = share
        self.guarantee = max(1, share.guarantee_ppm)
        self.capped = share.limit_ppm < PPM
        for hold in self.holds.values():
            hold.bursts = hold.bursts or share.bursts

    @property
    def always_ends(self) -> bool:
        """Each of its leases has an end, for it has a limit. The members of a gang stop together, by their leases. A
        vGPU whose hooks count nothing stops by its lease alone."""
        return self.capped and (self.gang_window is not None or not self.share.counted)

    @property
    def throttled(self) -> bool:
        return self.kept_lag_ns is not None

    @property
    def width(self) -> int:
        """SMs that it takes from the others, in millipercent: of its share, or of a lease from before a change."""
        width = self.share.sm_mpercent
        for hold in self.holds.values():
            width = max(width, hold.sm_mpercent)
        return width

    @property
    def undrained(self) -> bool:
        """Work of it may be on the GPU."""
        return bool(self.holds) and any(h.went_ns is not None for h in self.holds.values())

    @property
    def open_ended(self) -> bool:
        """A lease of it that has begun has no end."""
        return any(h.went_ns is not None and h.lease.end_ns is None for h in self.holds.values())

    @property
    def waiting(self) -> bool:
        """It wants, may be granted a lease at once, and holds nothing."""
        return self.competing and self.wants and not self.holds

    def hold(self, lease: Lease) -> ActiveLease:
        """``lease``, granted under the present share."""
        return ActiveLease(lease, self.share.sm_mpercent, self.share.bursts)

    def time_at(self, now_ns: int) -> int:
        """v̂: virtual time with all leases charged up to now."""
        if not self.holds:
            return self.time
        return self.time + virtual(sum([h.unsettled(now_ns) for h in self.holds.values()]), self.guarantee)

    def charge(self, held_ns: int) -> None:
        total = held_ns * VIRTUAL_PER_REAL + self._carry
        self.time += total // self.guarantee
        self._carry = total % self.guarantee

    def shift_to(self, time: int) -> None:
        """Move virtual time, and the deadline with it."""
        self.deadline += time - self.time
        self.time = time

    def bucket_at(self, now_ns: int) -> int:
        """The bucket refilled up to now, with its leases charged, not clamped."""
        filled = self.bucket + self.share.limit_ppm * (now_ns - self.bucket_at_ns)
        return filled - PPM * sum([h.busy(now_ns) for h in self.holds.values()])

    def refill(self, now_ns: int, full_ns: int) -> None:
        """Let the bucket grow up to now, to ``full_ns`` at most after its leases are charged. Before that charge the
        bucket may be fuller. Reason: a clamp before it would take away what the limit promised during a long kernel.
        The clamp also applies while a lease is undrained. Reason: a lease that goes on for long would otherwise save up
        what its gaps left."""
        self.bucket += self.share.limit_ppm * (now_ns - self.bucket_at_ns)
        self.bucket_at_ns = now_ns
        spare = (self.bucket_at(now_ns) if self.holds else self.bucket) - full_ns * PPM
        if spare > 0:
            self.bucket -= spare

    def learn(self, longest_kernel_ns: int, handover_ns: int, low_ns: int, high_ns: int) -> None:
        """Take in what the hooks measured under a lease. The hand-over cost is averaged over about sixteen leases and
        then clamped. Reason: a trainer loses nothing in one lease and 3 ms in the next. The kernel length decays as
        slowly."""
        if longest_kernel_ns:
            self.longest_kernel_ns = max(longest_kernel_ns, self.longest_kernel_ns * 7 // 8)
        if handover_ns:
            sample = min(handover_ns, HANDOVER_SAMPLE_MOST * high_ns)
            mean = self._handover_mean_ns
            self._handover_mean_ns = (mean * 15 + sample) // 16 if mean else sample
            self.handover_ns = min(max(self._handover_mean_ns, low_ns), high_ns)

    def close(self, hold: ActiveLease, at_ns: int, early: bool = False) -> None:
        """The lease drained at ``at_ns``, or was given back ``early``: add it to the totals. The caller has charged its
        virtual time."""
        busy = hold.busy(at_ns)
        del self.holds[hold.lease.epoch]
        self.bucket -= busy * PPM
        self.held_ns += hold.held(at_ns)
        self.busy_ns += busy
        self.tokens += 1
        self.overuse_ns += hold.overuse(at_ns)
        self.returns_ppm += ((PPM if early else 0) - self.returns_ppm) // 16
        self.served_ns = at_ns
        self.last_epoch = max(self.last_epoch, hold.lease.epoch)

    def held_at(self, now_ns: int) -> int:
        """Held time of all its leases, those under way up to now."""
        return self.held_ns + sum(h.held(now_ns) for h in self.holds.values())

    def busy_at(self, now_ns: int) -> int:
        return self.busy_ns + sum(h.busy(now_ns) for h in self.holds.values())

    def at_limit(self, now_ns: int) -> bool:
        """Its limit keeps it waiting: the scheduler does, or under an open-ended lease its hooks do."""
        return self.throttled or (self.capped and self.open_ended and self.bucket_at(now_ns) <= 0)

    def book(self, lag_ns: int, now_ns: int) -> AccountState:
        """The state for the journal, with its leases charged up to now."""
        return AccountState(
            lag_ns=lag_ns,
            bucket_ns=self.bucket_at(now_ns) // PPM,
            held_ns=self.held_at(now_ns),
            busy_ns=self.busy_at(now_ns),
            overuse_ns=self.overuse_ns,
            tokens=self.tokens,
            light=self.kind.light,
            heavy_ns=max(0, self.kind.heavy_until_ns - now_ns),
            stayed_ns=self.kind.stayed_ns,
        )

    def statement(self, lag_ns: int, now_ns: int) -> AccountSnapshot:
        """The state for display, likewise."""
        return AccountSnapshot(
            vgpu=self.key,
            guarantee_ppm=self.share.guarantee_ppm,
            limit_ppm=self.share.limit_ppm,
            priority=self.share.priority,
            wants=self.wants,
            holds=bool(self.holds),
            open_ended=self.open_ended,
            throttled=self.at_limit(now_ns),
            penalised=self.penalised,
            waiting_since_ns=self.waiting_since_ns,
            lag_ns=lag_ns,
            bucket_ns=self.bucket_at(now_ns) // PPM,
            held_ns=self.held_at(now_ns),
            busy_ns=self.busy_at(now_ns),
            overuse_ns=self.overuse_ns,
            tokens=self.tokens,
            runs=self.undrained,
            light=self.kind.light,
            shared=any(h.shared for h in self.holds.values()),
            demand_ppm=self.kind.demand_ppm,
            burst_ns=self.kind.burst_ns,
        )
