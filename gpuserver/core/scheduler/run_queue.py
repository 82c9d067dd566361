"""The vGPUs that compete for a GPU: how each enters the competition, and what keeps it out.

A vGPU is in one of six states, which its account shows:

    idle        wants nothing, holds nothing; its virtual time does not advance and never goes down (debt is kept)
    waiting     wants a token and may get one at once
    holding     has a lease that has not drained
    throttled   wants, but its limit bucket is below its fill line; keeps its credit until the bucket is refilled, and
                the others' progress pays its debt
    penalised   wants, but is deep in debt (a holder that overran the others' patience); comes back when the others'
                virtual time has caught up with its own, so that its debt distorts no other vGPU's place
    uncalled    wants, but its gang is not called (``gang_rules.py``); once called, it is placed like one that was idle

Waiting and holding vGPUs are the competition: the scheduler takes its clock V and its weight W over them alone
(``virtual_time.py``).
"""

from __future__ import annotations

from gpuserver.core.scheduler.account import Account, real, virtual
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.gang_rules import GangRules
from gpuserver.core.scheduler.limits import Limits
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.quanta import Quanta
from gpuserver.core.scheduler.temporal.virtual_time import VirtualTime


class RunQueue:
    """Moves vGPUs between the states above."""

    def __init__(
        self,
        accounts: Accounts,
        time: VirtualTime,
        quanta: Quanta,
        limits: Limits,
        gangs: GangRules,
        policy: Policy,
    ) -> None:
        self.policy = policy
        self._accounts = accounts
        self._time = time
        self._quanta = quanta
        self._limits = limits
        self._gangs = gangs

    # --- a vGPU wants, and ceases to want

    def want(self, account: Account, now_ns: int) -> None:
        if account.wants:
            return
        account.wants = True
        self._accounts.note_wish(account)
        if account.waiting_since_ns is None:
            account.waiting_since_ns = now_ns
        if account.competing or account.penalised or account.uncalled:
            return
        self.place(account, now_ns)
        self._enqueue(account, now_ns)

    def want_on(self, account: Account, at_ns: int, now_ns: int) -> None:
        """A lease of it drained at ``at_ns``, and it wants another one."""
        account.wants = True
        self._accounts.note_wish(account)
        account.waiting_since_ns = at_ns
        self._enqueue(account, now_ns)

    def stop_wanting(self, account: Account, now_ns: int) -> None:
        account.wants = account.uncalled = False
        self._accounts.note_wish(account)
        account.waiting_since_ns = None
        if account.throttled:
            self.rejoin(account, now_ns)
        self._accounts.set_penalised(account, account.penalised and bool(account.holds))
        if not account.holds:
            self.leave(account, now_ns)

    # --- in and out of the competition

    def place(self, account: Account, now_ns: int) -> None:
        """The vGPU wants again. Its v is at most the idle credit behind V, and never decreases: idling keeps debts."""
        clock = self._time.keep(now_ns)
        quantum = self._quanta.quantum(account)
        credit = max(self._quanta.wake_credit(account), account.restored_ns)
        account.restored_ns = 0
        account.time = max(account.time, clock - virtual(credit, account.guarantee))
        account.deadline = account.time + virtual(quantum, account.guarantee)
        self._accounts.compete(account)

    def leave(self, account: Account, now_ns: int) -> None:
        if account.competing:
            self._time.keep(now_ns)
            self._accounts.retire(account)

    def _enqueue(self, account: Account, now_ns: int) -> None:
        """The vGPU wants a token and holds nothing: make it throttled, penalised, or waiting."""
        if account.holds or account.throttled:
            return
        self._accounts.set_penalised(account, False)
        if self._limits.dry(account):
            self._throttle(account, now_ns)
        else:
            self._enter(account, now_ns)

    def _enter(self, account: Account, now_ns: int) -> None:
        """Enter the competition, unless the vGPU's debt would distort the others' places there."""
        if self._deep_in_debt(account, now_ns):
            self.penalise(account, now_ns)
        else:
            self._accounts.compete(account)

    def _deep_in_debt(self, account: Account, now_ns: int) -> bool:
        """Whether the vGPU has to wait outside the competition until the others have caught up. It owes nothing for
        what one with an slo is owed for its idle time."""
        ahead_ns = self._time.ahead_ns(account, now_ns)
        if any(other.competing and other is not account for other in self._accounts.paced.values()):
            ahead_ns -= self.policy.slo_credit_ns
        return ahead_ns > self.policy.grace_ns and ahead_ns > 2 * self._quanta.quantum(account)

    # --- limits

    def refill_all(self, now_ns: int) -> None:
        """Refill the buckets of vGPUs with a limit. The bucket of another is brought up to date at its own events."""
        for a in self._accounts.capped.values():
            self.refill(a, now_ns)

    def refill(self, account: Account, now_ns: int) -> None:
        account.refill(now_ns, self._limits.full(account))
        if account.throttled and not self._limits.dry(account):
            self.release(account, now_ns)

    def _throttle(self, account: Account, now_ns: int) -> None:
        """Take the vGPU out of the competition. It keeps its lag against V of the *other* vGPUs. Reason: against a V
        that counts the vGPU itself, every throttling would forgive a part of its debt.

        The others do not owe it what its own limit kept it from using. Reason: beside a vGPU with a small guarantee
        that takes the rest, its lag would grow for ever, and draw V apart from all others. The others' progress pays
        its debt meanwhile. Reason: a vGPU that waited for its bucket first, and then for the others, would have 8 % of
        10.
        """
        self.leave(account, now_ns)
        lag = self._time.lag(account, self._time.clock(now_ns), now_ns)
        account.kept_lag_ns = min(lag, self._quanta.idle_credit(account))

    def release(self, account: Account, now_ns: int) -> None:
        """The bucket is refilled. The vGPU enters the competition again, with the credit that it left with, or the rest
        of its debt."""
        self.rejoin(account, now_ns)
        self._enter(account, now_ns)

    def rejoin(self, account: Account, now_ns: int) -> None:
        """The vGPU is throttled no more; it is placed by what it is owed, and does not compete yet."""
        clock = self._time.clock(now_ns)
        account.shift_to(clock - virtual(self._time.lag(account, clock, now_ns), account.guarantee))
        account.kept_lag_ns = None

    # --- debts

    def penalise(self, account: Account, now_ns: int) -> None:
        self.leave(account, now_ns)
        self._accounts.set_penalised(account, True)

    def lift_penalties(self, now_ns: int) -> None:
        """Let back in vGPUs whose debt the others' progress has paid; if none competes, the least indebted one."""
        penalised = [a for a in self._accounts.penalised.values() if not a.holds]
        if not penalised:
            return
        if self._accounts.competing:
            clock = self._time.clock(now_ns)
            penalised = [a for a in penalised if a.time <= clock]
        else:
            penalised = [min(penalised, key=lambda a: (a.time, a.order))]
        for a in penalised:
            self._accounts.set_penalised(a, False)
            self._accounts.compete(a)

    def penalty_ends_ns(self, now_ns: int) -> int | None:
        """When the first penalised vGPU comes back, if the competition goes on as it does now."""
        debts = [a.time for a in self._accounts.penalised.values() if not a.holds]
        if not debts:
            return None
        return now_ns + max(1, real(min(debts) - self._time.clock(now_ns), self._accounts.weight))

    # --- gangs

    def follow_calls(self, now_ns: int) -> None:
        """Enqueue members that wait and are called; take out of the competition those that wait and are not."""
        self._gangs.lapse(now_ns)
        for a in self._accounts.members.values():
            if a.uncalled and (a.holds or self._gangs.admits(a, now_ns)):  # its GO may have crossed the withdrawal
                self.come_back(a, now_ns)
            elif a.waiting and not self._gangs.admits(a, now_ns):
                self._step_aside(a, now_ns)

    def come_back(self, account: Account, now_ns: int) -> None:
        """The vGPU is uncalled no more."""
        account.uncalled = False
        self.place(account, now_ns)
        self._enqueue(account, now_ns)

    def _step_aside(self, account: Account, now_ns: int) -> None:
        self.leave(account, now_ns)
        account.uncalled = True

    def withdrawn(self, account: Account, now_ns: int) -> None:
        """A lease that was published for the vGPU has been withdrawn."""
        if not account.wants:
            self.leave(account, now_ns)
        elif not account.holds and not self._gangs.admits(account, now_ns):
            self._step_aside(account, now_ns)

    def admit_chosen(self, account: Account, now_ns: int) -> None:
        """The vGPU was chosen although it does not compete: it is called when its lease begins, or it is urgent."""
        if account.uncalled:
            account.uncalled = False
            self.place(account, now_ns)
        elif account.throttled:  # urgent; its debt stays outside of the competition
            self.rejoin(account, now_ns)
            self._accounts.set_penalised(account, True)
