"""One vGPU's account with a scheduler: virtual time, deadline, limit bucket, and the lease it may hold.

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
class ActiveLease:
    """A published lease that has not drained: what the scheduler knows of it."""

    lease: Lease
    sm_mpercent: int
    """The partition it was granted with; a change of the share counts from the next lease on."""
    bursts: bool = False
    """Its vGPU runs on all SMs anyway (``Share.bursts``), or has done so since the grant."""
    overrides_class: bool = False
    """No vGPU of a higher class cuts it short while its gang is called."""
    leads: bool = False
    """Nor does one that has wanted ever since its own last lease: members on other GPUs follow this lease."""
    urgent: bool = False
    """Short, because another member of its gang is late."""
    revised_ns: int | None = None
    """When it was last published with other times."""
    went_ns: int | None = None
    usable_ns: int = 0
    """Held time counts from here: GO, or later, when the predecessor that it overlapped had drained."""
    settled_ns: int = 0
    """Virtual time has been charged up to here."""
    shadows: frozenset[int] = frozenset()
    """Epochs that were not drained when GO came: they pay for the overlap."""
    shadow_until_ns: int = 0
    shares_overlap: bool = False
    """The predecessors were about to drain. False: GO came because the wait had reached its bound."""
    tail_ns: int = 0
    idle_ns: int = 0
    drains_by_ns: int = 0
    metered: bool = False
    """It is, or was, open-ended: hooks count the GPU time used under it, and do not observe each gap."""
    used_ns: int | None = None
    """Their count …"""
    used_at_ns: int = 0
    """… when it was read. Once the lease has an end, all time from then on counts as busy. Reason: the count is read
    too rarely then."""
    shared: bool = False
    """Others hold at the same time (``sharing.py``): the vGPU is charged for the GPU time that it uses …"""
    charged_ns: int | None = None
    """… beyond this. None: it began before it was shared, and no count has been read since."""
    curbed_ns: int | None = None
    """GPU time that its vGPU was last allowed under it as a curbed sharer. None: it is not curbed."""

    def go(self, at_ns: int, undrained: frozenset[int], grace_ns: int, tail_ns: int) -> None:
        """``grace_ns``: the longest overlap that predecessors pay for; ``tail_ns``: the longest that they use alone."""
        self.went_ns = self.usable_ns = self.settled_ns = at_ns
        self.shares_overlap = bool(undrained) and at_ns < self.lease.go_by_ns
        self.shadows = undrained
        self.shadow_until_ns = at_ns + grace_ns
        self.tail_ns = tail_ns

    def others_until(self, at_ns: int) -> int:
        """Where an overlap that lasted from GO until ``at_ns`` is divided. An overlap as long as a tail is the
        predecessors'. Of a longer one, which time slices cut, half is theirs."""
        assert self.went_ns is not None
        overlap_ns = at_ns - self.went_ns
        return self.went_ns + min(overlap_ns, max(self.tail_ns, overlap_ns // 2))

    def unshadow(self, epoch: int, at_ns: int) -> None:
        """The overlapped lease ``epoch`` drained at ``at_ns``: from there on this lease is charged to its own vGPU."""
        if epoch in self.shadows:
            self.usable_ns = max(self.usable_ns, min(at_ns, self.shadow_until_ns))
            self.settled_ns = max(self.settled_ns, self.usable_ns)
            self.shadows -= {epoch}

    def usable_from(self, now_ns: int) -> int:
        if self.shadows and self.shares_overlap:
            return max(self.usable_ns, self.others_until(now_ns))
        if self.shadows:
            return max(self.usable_ns, min(now_ns, self.shadow_until_ns))
        return self.usable_ns

    def observe(self, idle_ns: int, used_ns: int | None, at_ns: int) -> None:
        """Take in a reading of the lease at ``at_ns``. Neither figure ever falls."""
        self.idle_ns = max(self.idle_ns, idle_ns)
        if used_ns is not None:
            self.used_ns, self.used_at_ns = max(self.used_ns or 0, used_ns), at_ns
            if self.shared and self.charged_ns is None:
                self.charged_ns = self.used_ns

    def share(self) -> None:
        """From now on others hold at the same time. The caller has settled the time held before."""
        self.shared = True
        self.charged_ns = 0 if self.went_ns is None else None

    def settle(self, at_ns: int) -> None:
        """Virtual time has been charged up to ``at_ns``."""
        self.settled_ns = max(self.settled_ns, at_ns)
        if self.charged_ns is not None:
            self.charged_ns = max(self.charged_ns, self.used_ns or 0)

    def unsettled(self, now_ns: int) -> int:
        """Held time that virtual time does not include yet; of a shared lease, used time."""
        if self.went_ns is None:
            return 0
        if self.shared:
            return 0 if self.charged_ns is None else max(0, (self.used_ns or 0) - self.charged_ns)
        return max(0, now_ns - max(self.settled_ns, self.usable_from(now_ns)))

    def held(self, now_ns: int) -> int:
        return 0 if self.went_ns is None else max(0, now_ns - self.usable_from(now_ns))

    def overuse(self, now_ns: int) -> int:
        """Held time past the end of the lease."""
        if self.went_ns is None or self.lease.end_ns is None:
            return 0
        return max(0, now_ns - max(self.lease.end_ns, self.usable_from(now_ns)))

    def busy(self, now_ns: int) -> int:
        """The time in which the vGPU computed, as far as is known. Beside a predecessor that others had waited for long
        enough it computes from GO on, whichever vGPU pays for the overlap. At a tail, which ends before a time slice
        does, it waits."""
        if self.went_ns is None:
            return 0
        if self.metered and self.used_ns is not None:
            return self.used_ns + (0 if self.lease.end_ns is None else max(0, now_ns - self.used_at_ns))
        begin_ns = self.usable_from(now_ns) if self.shares_overlap else self.went_ns
        return max(0, now_ns - begin_ns - self.idle_ns)


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
            throttled=self.throttled or (self.capped and self.open_ended and self.bucket_at(now_ns) <= 0),
            penalised=self.penalised,
            waiting_since_ns=self.waiting_since_ns,
            lag_ns=lag_ns,
            bucket_ns=self.bucket_at(now_ns) // PPM,
            held_ns=self.held_at(now_ns),
            busy_ns=self.busy_at(now_ns),
            overuse_ns=self.overuse_ns,
            tokens=self.tokens,
            light=self.kind.light,
            shared=any(h.shared for h in self.holds.values()),
            demand_ppm=self.kind.demand_ppm,
            burst_ns=self.kind.burst_ns,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """The account that gets a lease at a given time, and its length. ``alone``: no other vGPU will wait then."""

    account: Account
    length_ns: int
    alone: bool
    overrides_class: bool = False
    """Beside a higher class (``_overrides_class``)."""
    leads: bool = False
    """Members on other GPUs follow it, and it is owed as much as one that overrides its class."""
    urgent: bool = False

    @property
    def open_ended(self) -> bool:
        return self.alone and not self.account.always_ends
