"""Turns of temporal mode: one holder at a time. ``eevdf.py`` chooses the next holder, and for how long.

While vGPUs take turns, at most two leases matter (``holders.py``). The scheduler may revise ``next`` until just before
its start; the forecast behind it charges the holder to its end.

    the GPU is free       grant the best; open-ended where it is alone. With a limit it is allowed GPU time in parts
    holder open-ended     gets an end as soon as another vGPU waits, or has a tpot and had the GPU lately
    holder finite         the best at its end: the holder itself → a later end; another → next
    higher class waits    the holder's end moves to the nearest time possible; so it does for one of the same class
                          with an slo that is due before (``targets.py``)
    gang is called        (``gangs.py``) leases of others end where the call begins. The called member precedes its
                          class until the call ends, unless it is more than a token ahead of its share
    holder does not drain next gets GO after a bounded wait; the holder is charged on, and is penalised meanwhile
"""

from __future__ import annotations

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.gang_rules import GangRules
from gpuserver.core.scheduler.holders import Holders
from gpuserver.core.scheduler.leases import FAR_NS, Lease
from gpuserver.core.scheduler.limits import Limits
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.publisher import Publisher
from gpuserver.core.scheduler.quanta import TurnQuanta
from gpuserver.core.scheduler.run_queue import RunQueue
from gpuserver.core.scheduler.temporal.eevdf import Decision, Eevdf
from vgpu.share import PPM


class Turns:
    """Publishes, revises and withdraws the current and the next lease."""

    def __init__(
        self,
        accounts: Accounts,
        holders: Holders,
        quanta: TurnQuanta,
        limits: Limits,
        gangs: GangRules,
        queue: RunQueue,
        eevdf: Eevdf,
        publisher: Publisher,
        policy: Policy,
    ) -> None:
        self.policy = policy
        self._accounts = accounts
        self._holders = holders
        self._quanta = quanta
        self._limits = limits
        self._gangs = gangs
        self._queue = queue
        self._eevdf = eevdf
        self._publisher = publisher

    # --- events

    def alone(self, now_ns: int) -> bool:
        """Whether no vGPU has held a shared lease of late."""
        return self._holders.alone(now_ns)

    def began(self, hold: ActiveLease) -> None:
        """A standby lease has begun by itself, whatever was planned."""
        for published in (self._holders.next, self._holders.current):
            if published is not None and published.went_ns is None:
                self.take_back(published)
        self._holders.current = hold

    def started(self, hold: ActiveLease, planned_end_ns: int | None, now_ns: int) -> None:
        """A lease has begun."""
        account = self._accounts.all[hold.lease.vgpu]
        account.urgent_turns = account.urgent_turns + 1 if hold.urgent else 0
        if hold is self._holders.next:
            self._holders.current, self._holders.next = hold, None

    def closed(self, hold: ActiveLease) -> None:
        """A lease is over."""
        self._holders.forget(hold)

    # --- how long others wait, and when to decide

    def next_decision_ns(self, now_ns: int) -> list[int]:
        """When to choose what follows the current lease."""
        current = self._holders.current
        if current is None or current.went_ns is None or self._holders.next is not None:
            return []
        end = current.lease.end_ns
        if end is None:
            return []
        lookaheads = self._lookaheads(self._accounts.all[current.lease.vgpu])
        return [end - before_ns for before_ns in lookaheads if end - before_ns > now_ns]

    def _beside_tpot(self, holder: Account) -> bool:
        return self._accounts.beside_tpot(holder, self.policy.slo_active_ns)

    # --- decisions

    def decide(self, now_ns: int) -> None:
        """Publish, revise and withdraw leases after an event."""
        holders = self._holders
        if holders.current is None and holders.next is not None:
            holders.current, holders.next = holders.next, None
            if holders.current.lease.start_ns > now_ns:
                # Its predecessor drained early, so its GO is on the way.
                self._publisher.move(holders.current, now_ns)
        if holders.current is None:
            choice = self._eevdf.pick(now_ns, None)
            if choice is not None:
                holders.current = self._grant(choice, now_ns)
            return
        self._bound(holders.current, now_ns)
        self._keep_step(holders.current, now_ns)
        if holders.current.went_ns is not None and holders.current.lease.end_ns is not None:
            self._follow(holders.current, now_ns)

    def _patience(self, account: Account) -> int:
        """How long others wait for the vGPU to drain: a token's length, more for known long kernels, at most the grace.
        A member of a gang that does not drain waits for another member, which this wait may keep from running."""
        if account.gang_window is not None:
            return self.policy.quantum_min_ns
        patience = max(self._quanta.quantum(account), 2 * account.longest_kernel_ns)
        return min(self.policy.grace_ns, patience + len(self._holders.shared) * self.policy.slice_ns)

    def _lookahead(self, holder: Account) -> int:
        """How long before its end the scheduler decides whether a holder goes on. A hook submits nothing more under a
        lease once less than half of a kernel fits (``cython_ext/logic/gate/gate.pxd``): to move the end after that has
        no effect. A gang's kernels are as long as it waits for its members."""
        usual = self.policy.lookahead_ns
        if holder.gang_window is not None:
            return usual
        if self._beside_tpot(holder) and not any(self._holders.in_line()):
            usual = max(usual, self._quanta.quantum(holder) // 2)  # it goes on: a late decision costs nothing then
        return max(usual, holder.longest_kernel_ns // 2 + self.policy.guard_ns)

    def _lookaheads(self, holder: Account) -> list[int]:
        """How long before its end the scheduler chooses a holder's successor. The holder on a follower's GPU needs a
        window's time to drain. If a leader's lease were published as late as others, a short one would be over by
        then."""
        lookahead = self._lookahead(holder)
        if not any(a.waiting and self._gangs.leads(a) for a in self._accounts.members.values()):
            return [lookahead]
        return [lookahead, lookahead + self.policy.decision_ns + self.policy.window_ns]

    def drop_unwanted(self) -> None:
        """Take back leases that were published for a vGPU that wants none any more."""
        for hold in (self._holders.current, self._holders.next, *self._holders.shared.values()):
            if hold is not None and hold.went_ns is None and not self._accounts.all[hold.lease.vgpu].wants:
                self.take_back(hold)

    def take_back(self, hold: ActiveLease) -> None:
        """Withdraw a lease that has not begun."""
        account = self._accounts.all[hold.lease.vgpu]
        self._publisher.withdraw(account, hold)
        self._holders.forget(hold)
        self._queue.withdrawn(account, self._accounts.now_ns)

    def _bound(self, current: ActiveLease, now_ns: int) -> None:
        """Give the current lease an end while others wait, the nearest one possible for a higher class."""
        holder = self._accounts.all[current.lease.vgpu]
        nearest = now_ns + self.policy.decision_ns + self._publisher.window(holder)
        end = current.lease.end_ns
        if end is None and holder.capped:  # from now on no allowance limits it
            nearest = min(nearest, now_ns + max(self.policy.decision_ns, holder.bucket_at(now_ns) // PPM))
        if end is None and (holder.always_ends or self._beside_tpot(holder) or any(self._holders.in_line())):
            end = max(nearest, current.lease.start_ns + self.policy.minimum_stay_handovers * holder.handover_ns)
        outranked = bool(
            (self._accounts.paced or holder.share.priority < self._accounts.highest)
            and not (current.overrides_class and self._gangs.called(holder, now_ns))
            and any(
                self._eevdf.outranks(a, holder, now_ns) and not self._had_its_turn(a, current)
                for a in self._holders.in_line()
            )
        )
        if outranked or not self._gangs.admits(holder, now_ns):
            end = nearest if end is None else min(end, nearest)
        if self._gangs.any_urgent(but=holder):
            at_once = now_ns + self.policy.decision_ns
            end = at_once if end is None else min(end, at_once)
        call = self._gangs.next_call(now_ns, holder)
        if call is not None:
            end = max(nearest, call) if end is None else min(end, max(nearest, call))
        window_ns = self._publisher.window(holder)
        shorter = bool(self._accounts.paced) and window_ns < current.lease.window_ns
        if end is not None and (end != current.lease.end_ns or shorter):
            self._publisher.revise(current, now_ns, end_ns=end, window_ns=window_ns)

    def _keep_step(self, current: ActiveLease, now_ns: int) -> None:
        """A follower's lease ends when its leader's does, to the nanosecond. Reason: one might otherwise submit a
        kernel that waits for the other's, and the other not. Both GPUs would then be blocked for the next vGPUs."""
        holder, end = self._accounts.all[current.lease.vgpu], current.lease.end_ns
        gang_window, nearest = holder.gang_window, now_ns + self.policy.decision_ns
        if gang_window is None or end is None or current.went_ns is None or end < nearest:
            return
        if not gang_window.start_ns <= now_ns < gang_window.end_ns or self._gangs.any_urgent():
            return
        if self._holders.next is not None and now_ns >= self._holders.next.lease.start_ns - self.policy.guard_ns:
            return
        longest = self._limits.within(holder, self.policy.quantum_max_ns, current.went_ns)
        step = max(nearest, min(gang_window.end_ns, current.went_ns + longest))
        if self._gangs.next_call(now_ns, holder) is not None:
            step = min(step, end)
        self._publisher.revise(current, now_ns, end_ns=step)

    def _had_its_turn(self, account: Account, current: ActiveLease) -> bool:
        """Whether ``account`` has wanted ever since it held last, and the scheduler chose a leader over it. Entitled
        again a moment later, it would end that lease, and those on all the other GPUs. A vGPU that was idle before does
        not wait."""
        return current.leads and (account.waiting_since_ns or 0) <= account.served_ns

    def _follow(self, current: ActiveLease, now_ns: int) -> None:
        """Decide what happens at the end of a finite lease that is running."""
        end = current.lease.end_ns
        assert end is not None
        following = self._holders.next
        at_ns = max(end, now_ns)
        if following is not None and now_ns >= following.lease.start_ns - self.policy.guard_ns:
            if following.lease.end_ns is None:
                choice = self._eevdf.pick(at_ns, current if now_ns < end else None, following)
                if choice is None or not choice.open_ended:
                    length = self._quanta.length_now(self._accounts.all[following.lease.vgpu], now_ns)
                    self._publisher.revise(following, now_ns, end_ns=following.lease.start_ns + length)
            return
        choice = self._eevdf.pick(at_ns, current if now_ns < end else None, following)
        holder = self._accounts.all[current.lease.vgpu]
        if following is not None and (choice is None or choice.account.key != following.lease.vgpu):
            self.take_back(following)
            following = None
        if choice is None:
            return
        if choice.account is holder:
            if choice.open_ended:
                self._publisher.revise(current, now_ns, end_ns=None)
            elif now_ns >= end - self._lookahead(holder):
                self._publisher.revise(current, now_ns, end_ns=end + choice.length_ns)
        elif following is None:
            self._holders.next = self._grant(choice, at_ns)
        else:
            patience = min(self._patience(holder), self.policy.gang_late_ns if choice.urgent else FAR_NS)
            following.overrides_class, following.leads, following.urgent = (
                choice.overrides_class,
                choice.leads,
                choice.urgent,
            )
            self._publisher.revise(
                following,
                now_ns,
                start_ns=at_ns,
                end_ns=None if choice.open_ended else at_ns + choice.length_ns,
                go_by_ns=at_ns + patience,
                window_ns=self._publisher.window(choice.account),
            )

    def _grant(self, choice: Decision, start_ns: int) -> ActiveLease:
        """Publish a lease that waits for all work that may be on the GPU, except that of holders that were bypassed."""
        account = choice.account
        self._queue.admit_chosen(account, self._accounts.now_ns)
        before = [
            (a.key, epoch)
            for a in sorted(self._accounts.holding.values(), key=lambda a: a.order)
            for epoch, hold in a.holds.items()
            if not hold.shared and (not a.penalised or hold is self._holders.current)
        ]
        # A standby lease that began a moment ago is not in its account yet; until it is, this lease waits.
        patience = max(
            (self._patience(self._accounts.all[key]) for key, _ in before), default=self.policy.quantum_min_ns
        )
        if self._gangs.urgent(account):  # the holder may be waiting for its own gang in turn
            patience = min(patience, self.policy.gang_late_ns)
        lease = Lease(
            vgpu=account.key,
            epoch=self._publisher.next_epoch if account.standby is None else account.standby.lease.epoch,
            start_ns=start_ns,
            end_ns=None if choice.open_ended else start_ns + choice.length_ns,
            after=tuple(before),
            go_by_ns=start_ns + patience,
            window_ns=self._publisher.window(account),
        )
        hold = self._publisher.publish(account, lease)
        hold.overrides_class, hold.leads, hold.urgent = choice.overrides_class, choice.leads, choice.urgent
        return hold
