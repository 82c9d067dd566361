"""Rounds of spatial mode: time is cut into rounds of R where the vGPUs that want do not fit the GPU together.

All leases end at the same boundaries, so that large partitions find their SMs free at once. Before each boundary the
holders from there on are chosen (``round_choice.py``):

    chosen and holding: the end moves one round; chosen and not holding: a lease for the next round is published;
    every other vGPU stops at the boundary. In between, free SMs are filled, most owed first: by vGPUs whose kernels fit
    the rest of the round, and by those that will be chosen for the next one anyway.
"""

from __future__ import annotations

from dataclasses import replace

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.leases import Lease, VgpuIndex
from gpuserver.core.scheduler.limits import Limits
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.publisher import Publisher
from gpuserver.core.scheduler.spatial.card import Card
from gpuserver.core.scheduler.spatial.round_choice import RoundChoice
from gpuserver.core.scheduler.spatial.round_time import RoundTime
from vgpu.share import CARD_MPERCENT, Priority


class Rounds:
    """Publishes, revises and withdraws the leases of rounds."""

    def __init__(
        self,
        accounts: Accounts,
        time: RoundTime,
        limits: Limits,
        card: Card,
        choice: RoundChoice,
        publisher: Publisher,
        policy: Policy,
    ) -> None:
        self.policy = policy
        self._accounts = accounts
        self._time = time
        self._limits = limits
        self._card = card
        self._choice = choice
        self._publisher = publisher
        self.boundary_ns: int | None = None
        """The end of the present round; None while all vGPUs fit."""

    # --- events

    def alone(self, now_ns: int) -> bool:
        """No vGPU holds a shared lease in this mode."""
        return True

    def began(self, hold: ActiveLease) -> None:
        """There are no standby leases in this mode."""
        raise NotImplementedError

    def closed(self, hold: ActiveLease) -> None:
        """A lease is over."""

    def started(self, hold: ActiveLease, planned_end_ns: int | None, now_ns: int) -> None:
        """A lease has begun."""
        end = hold.lease.end_ns
        if end is not None and planned_end_ns is not None and end > planned_end_ns + self.policy.late_ns:
            # A lease that began late still ends at the boundary, or the rounds would diverge.
            nearest = max(planned_end_ns, now_ns + self.policy.decision_ns)
            if nearest < end:
                self._publisher.revise(hold, now_ns, end_ns=nearest)

    # --- rounds

    def take(self, now_ns: int) -> None:
        policy = self.policy
        if self.boundary_ns is None or self.boundary_ns <= now_ns:
            boundary = (now_ns // policy.round_ns + 1) * policy.round_ns
            if self.boundary_ns is None and boundary - now_ns < policy.decision_ns + policy.window_ns:
                boundary += policy.round_ns
            self.boundary_ns = boundary
        boundary = self.boundary_ns
        self._time.limit_credit()
        for a in self._accounts.all.values():
            for hold in a.holds.values():
                if hold.lease.end_ns is None:
                    self._publisher.revise(hold, now_ns, end_ns=boundary, window_ns=self._publisher.window(a))
        self._make_way(now_ns, boundary)
        self._fill(now_ns, boundary)
        if boundary - policy.round_lookahead_ns <= now_ns < boundary - policy.round_guard_ns:
            self._plan(now_ns, boundary)

    def _make_way(self, now_ns: int, boundary: int) -> None:
        """A high vGPU that waits, and is not ahead of its guarantee, does not wait for the boundary."""
        if now_ns >= boundary - self.policy.round_guard_ns:
            return
        waiting = [a for a in self._accounts.all.values() if a.share.priority is Priority.HIGH and a.waiting]
        if not waiting:
            return
        clock = self._time.clock(now_ns)
        for a in self._choice.most_owed_first(waiting, now_ns):
            if self._time.owed(a, now_ns, clock) >= -(self.policy.round_ns // 4):
                self._revoke_for(a, now_ns, boundary)

    def _revoke_for(self, high: Account, now_ns: int, boundary: int) -> None:
        """Take SMs back for ``high``: from the lowest class first, then from the vGPU that is most ahead."""
        clock = self._time.clock(now_ns)
        free = CARD_MPERCENT - self._card.occupied(now_ns)
        victims = [
            a
            for a in self._accounts.all.values()
            if a.undrained
            and not a.penalised
            and a.share.priority < Priority.HIGH
            and not self._card.late(a, now_ns, boundary)
        ]
        victims.sort(key=lambda a: (a.share.priority, self._time.owed(a, now_ns, clock), a.order))
        revoked = []
        while victims and free < high.width:
            victim = victims.pop(0)
            free += victim.width
            revoked.append(victim)
        if free < high.width:
            return
        start = now_ns
        for victim in revoked:
            end = now_ns + self.policy.decision_ns + self._publisher.window(victim)
            for hold in victim.holds.values():
                if hold.lease.end_ns is None or hold.lease.end_ns > end:
                    self._publisher.revise(hold, now_ns, end_ns=end, window_ns=self._publisher.window(victim))
            start = end
        end = boundary if boundary - start >= self.policy.fill_min_ns else boundary + self.policy.round_ns
        lease = self._publisher.lease(high, start, self._limits.end_within(high, start, end))
        self._publisher.publish(high, self._behind(lease, [(a.key, epoch) for a in revoked for epoch in a.holds]))

    def _behind(self, lease: Lease, after: list[tuple[VgpuIndex, int]]) -> Lease:
        """The lease, waiting for ``after`` to drain, for a bounded time."""
        if not after:
            return lease
        patience = max(self._card.patience(self._accounts.all[key]) for key, _ in after)
        return replace(lease, after=tuple(after), go_by_ns=lease.start_ns + patience)

    def _fill(self, now_ns: int, boundary: int) -> None:
        """Give free SMs to vGPUs that wait. Their leases end so long before the boundary that no kernel lasts beyond
        it: a gate starts a kernel of which half fits. Reason: a narrow vGPU that was late once would otherwise keep a
        wide one out round after round.

        A vGPU that will hold after the boundary anyway need not wait for it. Reason: a vGPU with kernels of three
        rounds drains at any time. If it waited for each boundary, it would lose a quarter of its time, and others would
        lose theirs to it.
        """
        left = boundary - now_ns
        if left < self.policy.fill_min_ns:
            return
        free = CARD_MPERCENT - self._card.occupied(now_ns)
        chosen: list[Account] | None = None
        for a in self._choice.most_owed_first([a for a in self._accounts.all.values() if a.waiting], now_ns):
            if a.width > free:
                continue
            end = boundary - a.longest_kernel_ns // 2
            if a.longest_kernel_ns > left:
                chosen = self._choice.choose(now_ns, boundary, left) if chosen is None else chosen
                if a not in chosen:
                    continue
                end = boundary + self.policy.round_ns
            free -= a.width
            self._publisher.publish(a, self._publisher.lease(a, now_ns, self._limits.end_within(a, now_ns, end)))

    # --- the next round

    def _plan(self, now_ns: int, boundary: int) -> None:
        """Choose the holders from ``boundary`` on. Publish their leases; revise those published for it before."""
        chosen = self._choice.choose(now_ns, boundary)
        end = boundary + self.policy.round_ns
        for a in self._accounts.all.values():
            for hold in list(a.holds.values()):
                if a not in chosen and self._revisable(hold, now_ns):
                    self._publisher.withdraw(a, hold)
                elif self._ahead(hold, boundary):
                    continue
                elif a in chosen:
                    self._publisher.revise(hold, now_ns, end_ns=self._limits.end_within(a, boundary, end))
                elif hold.lease.end_ns is None or hold.lease.end_ns > boundary + self.policy.late_ns:
                    self._publisher.revise(hold, now_ns, end_ns=boundary)
        self._publish_starts(now_ns, boundary, chosen)

    def _revisable(self, hold: ActiveLease, now_ns: int) -> bool:
        """Whether the lease is published, and neither a filler nor about to start. True also for a lease of the present
        round that still waits for its predecessors: it would delay the next round."""
        accounts = self._accounts.all
        waits = any(epoch in accounts[key].holds for key, epoch in hold.lease.after if key in accounts)
        if hold.went_ns is not None or (hold.lease.early and not waits):
            return False
        return not hold.lease.start_ns - self.policy.round_guard_ns <= now_ns < hold.lease.start_ns

    def _ahead(self, hold: ActiveLease, boundary: int) -> bool:
        """Whether the lease is published for the next round."""
        return hold.went_ns is None and hold.lease.start_ns >= boundary

    def _publish_starts(self, now_ns: int, boundary: int, chosen: list[Account]) -> None:
        """Publish leases from the boundary on. Each waits only for as many leaving vGPUs as it needs SMs of."""
        starting = [a for a in chosen if all(self._ahead(h, boundary) for h in a.holds.values())]
        present = [
            a
            for a in self._accounts.all.values()
            if not a.penalised and any(not self._ahead(h, boundary) for h in a.holds.values())
        ]
        leaving = [a for a in present if a not in chosen and not self._card.late(a, now_ns, boundary)]
        leaving.sort(key=lambda a: (max(h.drains_by_ns for h in a.holds.values()), a.longest_kernel_ns, a.order))
        free = CARD_MPERCENT - sum(a.width for a in present)
        after: list[tuple[VgpuIndex, int]] = []
        for a in self._choice.most_owed_first(starting, boundary):
            free -= a.width
            while free < 0 and leaving:
                gone = leaving.pop(0)
                free += gone.width
                after += [(gone.key, epoch) for epoch in gone.holds]
            end = self._limits.end_within(a, boundary, boundary + self.policy.round_ns)
            lease = self._behind(self._publisher.lease(a, boundary, end, early=False), after)
            if a.holds:
                (hold,) = a.holds.values()
                self._publisher.revise(hold, now_ns, end_ns=lease.end_ns, after=lease.after, go_by_ns=lease.go_by_ns)
            else:
                self._publisher.publish(a, lease)
