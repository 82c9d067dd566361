"""A lease that is published and has not drained: what virtual time and the limit bucket are charged for it.

Held time counts from GO, or from the drain of a predecessor that the lease overlapped. ``account.py`` explains held,
used and busy time.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuserver.core.scheduler.leases import Lease


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
