"""Spatial mode: vGPUs whose SMs fit the GPU hold leases at the same time; where they do not fit, they take rounds.

All vGPUs fit where Σ s over those that want is at most the GPU. They also fit where all of them burst (they run on all
SMs, and are of one class). Then each has an open-ended lease (a finite one under a limit), and none ever waits.
Otherwise time is cut into rounds of R. All leases end at the same boundaries, so that large partitions find their SMs
free at once. With a guarantee r_i and a width s_i,

    V advances with wall time, but is never less than the least v̂ (all are ahead: faster), nor more than the mean v̂,
    weighted with r, + 400 ms (all are behind: slower)           owed_i = r_i·(V − v̂_i)

    before each boundary, forecast for it:
      late     a vGPU that is predicted to drain after the boundary keeps its SMs and is not chosen
      forced   vGPUs that waited for more than four rounds' worth of their guarantee, most owed first, while they fit
      chosen   the set with the greatest Σ s_i·(max(owed_i, −R) + R + 1 ns) that fits the rest: high ones first
      beside   late vGPUs no other one begins a kernel early. A vGPU with kernels that last beyond the boundary at which
               the late ones have drained is chosen only if it would also be chosen if none were late
    chosen and holding: the end moves one round; chosen and not holding: a lease for the next round is published;
    every other vGPU stops at the boundary. In between, free SMs are filled, most owed first: by vGPUs whose kernels fit
    the rest of the round, and by those that will be chosen for the next one anyway.

    charge: v += held/r, but planned time no further than V + R/r (filler costs at most a round); overuse in full
    credit: with kernels longer than R/2, at most R and two of them, where a vGPU with shorter ones competes

Source: MaxWeight scheduling (Tassiulas, Ephremides: Stability properties of constrained queueing systems, 1992) on owed
SM-time. It serves every set of guarantees that can be packed at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from gpuserver.core.scheduler.account import FRACTION_BITS, Account, ActiveLease, real, virtual
from gpuserver.core.scheduler.base import SchedulerBase
from gpuserver.core.scheduler.leases import Lease, VgpuIndex
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, Policy
from gpuserver.core.scheduler.run_queue import InvariantError
from vgpu.packing.knapsack import Work, best_set
from vgpu.share import CARD_MPERCENT, PPM, Priority

ROUND_STEPS = 100_000
"""The most work that the choice of one round may cost, about 10 ms; 255 vGPUs of a GPU's steps take a third of it."""


class SpatialScheduler(SchedulerBase):
    """Packs SM partitions into rounds. ``handle``, ``next_deadline_ns``, ``check``: see ``SchedulerBase``."""

    def __init__(self, policy: Policy = DEFAULT_POLICY, *, first_epoch: int = 1) -> None:
        super().__init__(policy, first_epoch=first_epoch)
        self._clock_at_ns = 0
        self._boundary_ns: int | None = None
        """The end of the present round; None while all vGPUs fit."""

    def next_deadline_ns(self) -> int | None:
        now_ns, policy = self._now_ns, self.policy
        due = [self._refill_due(a) for a in self._capped.values() if a.throttled]
        due += [
            self._patience_ends(a)
            for a in self._accounts.values()
            if not a.penalised and any(self._overdue(h, now_ns) for h in a.holds.values())
        ]
        if self._boundary_ns is not None:
            due += [self._boundary_ns - policy.round_lookahead_ns, self._boundary_ns]
        else:
            due += [
                h.lease.end_ns - policy.lookahead_ns
                for a in self._accounts.values()
                for h in a.holds.values()
                if h.lease.end_ns is not None and h.went_ns is not None
            ]
        return min((d for d in due if d > now_ns), default=None)

    def check(self) -> None:
        super().check()
        now_ns = self._now_ns
        in_force = self._in_force(now_ns)
        if sum(h.sm_mpercent for h in in_force) > CARD_MPERCENT and not all(h.bursts for h in in_force):
            raise InvariantError(f"leases of more than all SMs are in force: {in_force}")
        for a in self._accounts.values():
            for hold in a.holds.values():
                if hold.lease.end_ns is None and (a.capped or self._boundary_ns is not None):
                    raise InvariantError(f"open-ended lease in a round or beside a limit: {hold.lease}")
            if a.waiting and self._boundary_ns is None:
                raise InvariantError(f"vGPU {a.key} waits though all vGPUs fit")

    @property
    def period_ns(self) -> int:
        return self.policy.round_ns

    def turns(self, company: Collection[VgpuIndex]) -> set[VgpuIndex]:
        """Empty where all vGPUs fit the GPU together: none is in the way of another, and each keeps its lease while
        idle."""
        return set() if self._fit_together(self._accounts.values()) else set(company)

    # --- the guarantee clock

    def clock(self, now_ns: int) -> int:
        if not self._competing:
            return self._clock
        moment, times = self._moment, []  # as in _mean, which would compute the charge of each lease a second time
        for a in self._competing.values():
            time = a.time
            if a.holds:
                time = self._time_at(a, now_ns)
                moment += a.guarantee * (time - a.time)
            times.append(time)
        # The mean, not the least: a vGPU that is hard to place must not delay the clock of all others, and a round of a
        # small guarantee is a long virtual time.
        latest = moment // self._weight + (self.policy.clock_lead_ns << FRACTION_BITS)
        return max(min(self._wall_clock(now_ns), latest), min(times))

    def _wall_clock(self, now_ns: int) -> int:
        return self._clock + (max(0, now_ns - self._clock_at_ns) << FRACTION_BITS)

    def _keep_clock(self, now_ns: int) -> int:
        clock = super()._keep_clock(now_ns)
        self._clock_at_ns = now_ns
        return clock

    def _time_at(self, account: Account, now_ns: int) -> int:
        time = account.time
        for hold in account.holds.values():
            time = self._charged(account, hold, time, now_ns)
        return time

    def _charged(self, account: Account, hold: ActiveLease, time: int, at_ns: int) -> int:
        """Virtual time after the lease is charged up to ``at_ns``: planned time at most up to a round beyond V."""
        unsettled = hold.unsettled(at_ns)
        if not unsettled:
            return time
        overuse = min(unsettled, hold.overuse(at_ns))
        ahead = self._wall_clock(at_ns) + virtual(self.policy.round_ns, account.guarantee)
        planned = min(time + virtual(unsettled - overuse, account.guarantee), ahead)
        return max(time, planned) + virtual(overuse, account.guarantee)

    def _charge(self, account: Account, hold: ActiveLease, at_ns: int) -> None:
        account.time = self._charged(account, hold, account.time, at_ns)

    def _quantum(self, account: Account) -> int:
        return self.policy.round_ns

    def _deep_in_debt(self, account: Account, now_ns: int) -> bool:
        return False

    def _owed(self, account: Account, at_ns: int, clock: int) -> int:
        return real(clock - self._time_at(account, at_ns), account.guarantee)

    # --- vGPUs that do not drain

    def _overdue(self, hold: ActiveLease, now_ns: int) -> bool:
        """The lease's end has passed and it has not drained."""
        return hold.went_ns is not None and hold.lease.end_ns is not None and hold.lease.end_ns <= now_ns

    def _stuck(self, account: Account, now_ns: int) -> bool:
        """All leases of the vGPU are overdue. Its withdrawn lease may have started all the same, and a newer one since.
        The vGPU then computes under the newer one, whose drain will be that of both."""
        went = [h for h in account.holds.values() if h.went_ns is not None]
        return bool(went) and all(self._overdue(h, now_ns) for h in went)

    def _patience(self, account: Account) -> int:
        """How long others wait for the vGPU to drain: a round, more for known long kernels, at most the grace."""
        return min(self.policy.grace_ns, max(self.policy.round_ns, 2 * account.longest_kernel_ns))

    def _patience_ends(self, account: Account) -> int:
        """From when on an overdue vGPU keeps no SMs from others: its process may be stopped, or dead."""
        return max(h.lease.end_ns or 0 for h in account.holds.values()) + self._patience(account)

    # --- SMs

    def _occupied(self, at_ns: int) -> int:
        """SMs of leases that have begun and not drained, or may begin at any moment."""
        return sum(
            a.width
            for a in self._accounts.values()
            if not a.penalised and any(h.lease.early or h.lease.start_ns <= at_ns for h in a.holds.values())
        )

    def _in_force(self, at_ns: int) -> list[ActiveLease]:
        """Leases under which hooks submit work. A lease at whose tail others got GO takes no more."""
        went = [h for h in self._holds() if h.went_ns is not None]
        at_tail = {epoch for h in went for epoch in h.shadows}
        return [h for h in went if h.lease.epoch not in at_tail and (h.lease.end_ns is None or h.lease.end_ns > at_ns)]

    def _fits(self) -> bool:
        """Whether all vGPUs that want, and all that have not drained, fit the GPU."""
        return self._fit_together(
            a for a in self._accounts.values() if (a.competing and a.wants) or (a.undrained and not a.penalised)
        )

    def _fit_together(self, accounts: Iterable[Account]) -> bool:
        """Whether they fit by their widths, or because all burst and are of one class. Those run on all SMs: to keep
        some of them off the GPU would leave SMs idle and give the others nothing that is theirs."""
        accounts = list(accounts)
        if sum(a.width for a in accounts) <= CARD_MPERCENT:
            return True
        return all(a.share.bursts for a in accounts) and len({a.share.priority for a in accounts}) == 1

    # --- events

    def _went(self, hold: ActiveLease, planned_end_ns: int | None, now_ns: int) -> None:
        end = hold.lease.end_ns
        if end is not None and planned_end_ns is not None and end > planned_end_ns + self.policy.late_ns:
            # A lease that began late still ends at the boundary, or the rounds would diverge.
            nearest = max(planned_end_ns, now_ns + self.policy.decision_ns)
            if nearest < end:
                self._revise(hold, now_ns, end_ns=nearest)

    def _matters(self, withdrawn: ActiveLease, account: Account) -> bool:
        """If ``withdrawn`` started all the same, it has its SMs until it has drained. True if too few are left."""
        granted = sum(a.width for a in self._accounts.values() if a.holds and not a.penalised)
        return withdrawn.lease.vgpu == account.key or granted + account.width + withdrawn.sm_mpercent > CARD_MPERCENT

    def _closed(self, hold: ActiveLease) -> None:
        pass

    # --- decisions

    def _decide(self, now_ns: int) -> None:
        self._keep_clock(now_ns)
        for a in self._accounts.values():
            for hold in list(a.holds.values()):
                if hold.went_ns is None and not a.wants:
                    self._withdraw(a, hold)
                    self._leave(a, now_ns)
            if self._stuck(a, now_ns) and not a.penalised and now_ns >= self._patience_ends(a):
                self._penalise(a, now_ns)
        if self._fits():
            self._boundary_ns = None
            for a in self._accounts.values():
                if a.competing and (a.wants or a.capped):
                    self._let_run(a, now_ns)
        else:
            self._take_rounds(now_ns)

    def _let_run(self, account: Account, now_ns: int) -> None:
        """All vGPUs fit: this one may run now, for as long as its limit allows."""
        if not account.holds:
            self._publish(account, self._lease(account, now_ns, self._end_alone(account, now_ns)))
        for hold in account.holds.values():
            end = hold.lease.end_ns
            if hold.went_ns is None:
                if hold.lease.start_ns > now_ns or hold.lease.after or (end is None) == account.capped:
                    end = self._end_alone(account, now_ns)
                    self._revise(hold, now_ns, start_ns=now_ns, end_ns=end, after=(), go_by_ns=now_ns, early=True)
            elif self._overdue(hold, now_ns):
                continue
            elif not account.capped:
                self._revise(hold, now_ns, end_ns=None, window_ns=self._window(account))
            elif end is None:
                self._revise(hold, now_ns, end_ns=self._end_alone(account, now_ns))
            elif account.wants and end - now_ns <= self.policy.lookahead_ns and not self._dry_at(account, end):
                self._revise(hold, now_ns, end_ns=self._end_alone(account, end))

    def _end_alone(self, account: Account, at_ns: int) -> int | None:
        """Where a lease at ``at_ns`` has to end although no vGPU needs its SMs: when its limit is used up."""
        if not account.capped:
            return None
        return at_ns + max(account.bucket_at(at_ns) // PPM, self.policy.quantum_min_ns // 2)

    def _dry_at(self, account: Account, at_ns: int) -> bool:
        return account.capped and account.bucket_at(at_ns) < self._fill_line(account) * PPM

    def _lease(self, account: Account, start_ns: int, end_ns: int | None, early: bool = True) -> Lease:
        return Lease(account.key, 0, start_ns, end_ns, go_by_ns=start_ns, early=early, window_ns=self._window(account))

    # --- rounds

    def _take_rounds(self, now_ns: int) -> None:
        policy = self.policy
        if self._boundary_ns is None or self._boundary_ns <= now_ns:
            boundary = (now_ns // policy.round_ns + 1) * policy.round_ns
            if self._boundary_ns is None and boundary - now_ns < policy.decision_ns + policy.window_ns:
                boundary += policy.round_ns
            self._boundary_ns = boundary
        boundary = self._boundary_ns
        self._limit_credit()
        for a in self._accounts.values():
            for hold in a.holds.values():
                if hold.lease.end_ns is None:
                    self._revise(hold, now_ns, end_ns=boundary, window_ns=self._window(a))
        self._make_way(now_ns, boundary)
        self._fill(now_ns, boundary)
        if boundary - policy.round_lookahead_ns <= now_ns < boundary - policy.round_guard_ns:
            self._plan(now_ns, boundary)

    def _limit_credit(self) -> None:
        """Bound what vGPUs with long kernels are owed, beside vGPUs with short ones. Each time that a vGPU with long
        kernels makes way for another, it drains at any time, and its SMs idle until the boundary. Where the packing
        does not leave that much time, it would be owed ever more. vGPUs with short kernels would get ever less of their
        own share."""
        round_ns = self.policy.round_ns
        long = [a for a in self._competing.values() if 2 * a.longest_kernel_ns > round_ns]
        if len(long) == len(self._competing):
            return
        for a in long:
            least = self._clock - virtual(round_ns + 2 * a.longest_kernel_ns, a.guarantee)
            if not a.holds and a.time < least:
                self._moment += a.guarantee * (least - a.time)
                a.time = least

    def _make_way(self, now_ns: int, boundary: int) -> None:
        """A high vGPU that waits, and is not ahead of its guarantee, does not wait for the boundary."""
        if now_ns >= boundary - self.policy.round_guard_ns:
            return
        waiting = [a for a in self._accounts.values() if a.share.priority is Priority.HIGH and a.waiting]
        if not waiting:
            return
        clock = self.clock(now_ns)
        for a in self._most_owed_first(waiting, now_ns):
            if self._owed(a, now_ns, clock) >= -(self.policy.round_ns // 4):
                self._revoke_for(a, now_ns, boundary)

    def _revoke_for(self, high: Account, now_ns: int, boundary: int) -> None:
        """Take SMs back for ``high``: from the lowest class first, then from the vGPU that is most ahead."""
        clock = self.clock(now_ns)
        free = CARD_MPERCENT - self._occupied(now_ns)
        victims = [
            a
            for a in self._accounts.values()
            if a.undrained
            and not a.penalised
            and a.share.priority < Priority.HIGH
            and not self._late(a, now_ns, boundary)
        ]
        victims.sort(key=lambda a: (a.share.priority, self._owed(a, now_ns, clock), a.order))
        revoked = []
        while victims and free < high.width:
            victim = victims.pop(0)
            free += victim.width
            revoked.append(victim)
        if free < high.width:
            return
        start = now_ns
        for victim in revoked:
            end = now_ns + self.policy.decision_ns + self._window(victim)
            for hold in victim.holds.values():
                if hold.lease.end_ns is None or hold.lease.end_ns > end:
                    self._revise(hold, now_ns, end_ns=end, window_ns=self._window(victim))
            start = end
        end = boundary if boundary - start >= self.policy.fill_min_ns else boundary + self.policy.round_ns
        lease = self._lease(high, start, self._within_limit(high, start, end))
        self._publish(high, self._behind(lease, [(a.key, epoch) for a in revoked for epoch in a.holds]))

    def _behind(self, lease: Lease, after: list[tuple[VgpuIndex, int]]) -> Lease:
        """The lease, waiting for ``after`` to drain, for a bounded time."""
        if not after:
            return lease
        patience = max(self._patience(self._accounts[key]) for key, _ in after)
        return replace(lease, after=tuple(after), go_by_ns=lease.start_ns + patience)

    def _within_limit(self, account: Account, start_ns: int, end_ns: int) -> int:
        """``end_ns``, or earlier where the limit is used up before."""
        limit = self._end_alone(account, start_ns)
        return end_ns if limit is None else min(end_ns, limit)

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
        free = CARD_MPERCENT - self._occupied(now_ns)
        chosen: list[Account] | None = None
        for a in self._most_owed_first([a for a in self._accounts.values() if a.waiting], now_ns):
            if a.width > free:
                continue
            end = boundary - a.longest_kernel_ns // 2
            if a.longest_kernel_ns > left:
                chosen = self._choose(now_ns, boundary, left) if chosen is None else chosen
                if a not in chosen:
                    continue
                end = boundary + self.policy.round_ns
            free -= a.width
            self._publish(a, self._lease(a, now_ns, self._within_limit(a, now_ns, end)))

    def _most_owed_first(self, accounts: list[Account], at_ns: int) -> list[Account]:
        if len(accounts) < 2:
            return accounts
        clock = self.clock(at_ns)
        return sorted(accounts, key=lambda a: (-a.share.priority, -self._owed(a, at_ns, clock), a.order))

    # --- the next round

    def _plan(self, now_ns: int, boundary: int) -> None:
        """Choose the holders from ``boundary`` on. Publish their leases; revise those published for it before."""
        chosen = self._choose(now_ns, boundary)
        end = boundary + self.policy.round_ns
        for a in self._accounts.values():
            for hold in list(a.holds.values()):
                if a not in chosen and self._revisable(hold, now_ns):
                    self._withdraw(a, hold)
                elif self._ahead(hold, boundary):
                    continue
                elif a in chosen:
                    self._revise(hold, now_ns, end_ns=self._within_limit(a, boundary, end))
                elif hold.lease.end_ns is None or hold.lease.end_ns > boundary + self.policy.late_ns:
                    self._revise(hold, now_ns, end_ns=boundary)
        self._publish_starts(now_ns, boundary, chosen)

    def _revisable(self, hold: ActiveLease, now_ns: int) -> bool:
        """Whether the lease is published, and neither a filler nor about to start. True also for a lease of the present
        round that still waits for its predecessors: it would delay the next round."""
        waits = any(epoch in self._accounts[key].holds for key, epoch in hold.lease.after if key in self._accounts)
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
            for a in self._accounts.values()
            if not a.penalised and any(not self._ahead(h, boundary) for h in a.holds.values())
        ]
        leaving = [a for a in present if a not in chosen and not self._late(a, now_ns, boundary)]
        leaving.sort(key=lambda a: (max(h.drains_by_ns for h in a.holds.values()), a.longest_kernel_ns, a.order))
        free = CARD_MPERCENT - sum(a.width for a in present)
        after: list[tuple[VgpuIndex, int]] = []
        for a in self._most_owed_first(starting, boundary):
            free -= a.width
            while free < 0 and leaving:
                gone = leaving.pop(0)
                free += gone.width
                after += [(gone.key, epoch) for epoch in gone.holds]
            end = self._within_limit(a, boundary, boundary + self.policy.round_ns)
            lease = self._behind(self._lease(a, boundary, end, early=False), after)
            if a.holds:
                (hold,) = a.holds.values()
                self._revise(hold, now_ns, end_ns=lease.end_ns, after=lease.after, go_by_ns=lease.go_by_ns)
            else:
                self._publish(a, lease)

    def _late(self, account: Account, now_ns: int, boundary: int) -> bool:
        """Whether the vGPU will not have drained at the boundary: it then keeps its SMs and gets no lease."""
        return any(
            self._overdue(hold, now_ns)
            or (hold.went_ns is not None and hold.drains_by_ns > boundary + self.policy.late_ns)
            for hold in account.holds.values()
        )

    def _choose(self, now_ns: int, boundary: int, early_ns: int | None = None) -> list[Account]:
        """The set for the round that begins at ``boundary``, or ``early_ns`` before it. Late vGPUs keep their SMs.
        Beside them no vGPU begins a kernel early, nor one that lasts beyond the boundary at which the last of them has
        drained. Exception: the vGPU would also be chosen if they had already drained.

        Reason: vGPUs with long kernels would otherwise be late one after the other. A wide vGPU that needs the SMs of
        all of them would never find them free together."""
        revoked = {
            e for a in self._accounts.values() for h in a.holds.values() if h.lease.early for _, e in h.lease.after
        }
        late, candidates = [], []
        for a in self._accounts.values():
            if not a.penalised and self._late(a, now_ns, boundary):
                late.append(a)
            elif a.competing and a.wants and not revoked & a.holds.keys() and not self._dry_at(a, boundary):
                candidates.append(a)
        capacity = CARD_MPERCENT - sum(a.width for a in late)
        if late:
            round_ns = self.policy.round_ns
            drains_ns = max(hold.drains_by_ns for a in late for hold in a.holds.values()) - boundary
            longest_ns = max(1, -(-drains_ns // round_ns)) * round_ns if early_ns is None else early_ns
            longer = [a for a in candidates if a.longest_kernel_ns > longest_ns]
            if longer:
                drained = [a for a in late if a.competing and a.wants and not self._dry_at(a, boundary)]
                best = self._best(candidates + drained, boundary, CARD_MPERCENT)
                candidates = [a for a in candidates if a not in longer or a in best]
        return self._best(candidates, boundary, capacity)

    def _best(self, candidates: list[Account], boundary: int, capacity: int) -> list[Account]:
        """Those of ``candidates`` that are owed most at ``boundary`` and fit ``capacity`` (millipercent) together."""
        policy = self.policy
        clock = self.clock(boundary)
        owed = {a.key: self._owed(a, boundary, clock) for a in candidates}

        patience = policy.forced_rounds * policy.round_ns * PPM
        starving = [
            a
            for a in candidates
            if not a.undrained
            and a.waiting_since_ns is not None
            and (boundary - a.waiting_since_ns) * a.guarantee > patience
        ]
        chosen: list[Account] = []
        for a in sorted(starving, key=lambda a: (-owed[a.key], a.order)):
            if a.width <= capacity:
                capacity -= a.width
                chosen.append(a)
        rest = [a for a in candidates if a not in chosen]
        high = [a for a in rest if a.share.priority is Priority.HIGH and owed[a.key] >= -(policy.round_ns // 4)]
        for group in (high, [a for a in rest if a not in high]):
            values = [a.width * (max(owed[a.key], -policy.round_ns) + policy.round_ns + 1) for a in group]
            best = best_set([a.width for a in group], values, capacity, Work(ROUND_STEPS))
            capacity -= sum(group[i].width for i in best)
            chosen += [group[i] for i in best]
        return chosen
