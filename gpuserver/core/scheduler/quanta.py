"""How long a lease is: q, the regular length of a token, the grid of deadlines, and the period that q is a part of.

q = clamp(P·r/W, q_min, q_max) in temporal mode, and the round R in spatial mode. A token is d − v long (as real
time): it ends where v meets d; then d moves by whole q/r.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container

from gpuserver.core.scheduler.account import Account, real, virtual
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.leases import VgpuIndex
from gpuserver.core.scheduler.limits import Limits
from gpuserver.core.scheduler.policy import Policy
from vgpu.share import PPM, Priority


class Quanta(ABC):
    """The length of tokens, in nanoseconds, and what follows from it for deadlines and credit."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @abstractmethod
    def quantum(self, account: Account) -> int:
        """q: real length of a regular token of ``account`` in the present competition."""

    @property
    @abstractmethod
    def period_ns(self) -> int:
        """One round of leases takes about so long at present."""

    def adopt(self, policy: Policy) -> None:
        self.policy = policy

    def shortest(self, account: Account) -> int:
        """q_min: a shorter token would lose more to its hand-over than it is worth."""
        shortest, least = self.policy.quantum_min_ns, 10 * account.handover_ns
        return least if least > shortest else shortest

    def idle_credit(self, account: Account) -> int:
        """C: the most that the vGPU is owed for its idle time when it wakes."""
        return min(self.policy.idle_credit_ns, 2 * self.quantum(account))

    def wake_credit(self, account: Account) -> int:
        """The same where it begins to want: one with an slo may be owed a whole answer."""
        return self.idle_credit(account)

    def grid(self, account: Account, time: int) -> int:
        """The deadline of ``account`` at virtual ``time``: advanced by whole quanta until at least half a shortest
        token fits before it. Deadlines that stay on the grid compensate a token that ended a little early or late.
        """
        quantum = virtual(self.quantum(account), account.guarantee)
        missing = time + virtual(self.shortest(account) // 2, account.guarantee) - account.deadline
        return account.deadline + (-(-missing // quantum) * quantum if missing > 0 else 0)


class RoundQuanta(Quanta):
    """Spatial mode: each lease is a round long."""

    def quantum(self, account: Account) -> int:
        return self.policy.round_ns

    @property
    def period_ns(self) -> int:
        return self.policy.round_ns


class TurnQuanta(Quanta):
    """Temporal mode: a part of the period, which follows from what hand-overs cost."""

    def __init__(self, accounts: Accounts, limits: Limits, policy: Policy) -> None:
        super().__init__(policy)
        self._accounts = accounts
        self._limits = limits
        self._period_ns = policy.period_ns
        self._period_since_ns: int | None = None

    @property
    def period_ns(self) -> int:
        return self._period_ns

    def adopt(self, policy: Policy) -> None:
        super().adopt(policy)
        self._period_ns = policy.period_ns

    @property
    def least(self) -> int:
        """The lower bound of every q."""
        return min(self.policy.quantum_min_ns, self.policy.quantum_max_ns)

    def quantum(self, account: Account) -> int:
        guarantee, shortest, longest = account.guarantee, self.shortest(account), self.policy.quantum_max_ns
        weight = self._accounts.weight
        quantum = self._period_ns * guarantee // (weight if account.competing else weight + guarantee)
        if quantum < shortest:
            quantum = shortest
        return quantum if quantum < longest else longest

    def wake_credit(self, account: Account) -> int:
        """Those with an slo have a part of ``slo_credit_ns`` each: all together delay the others by that once. Below a
        higher class the credit is the usual one. Reason: it draws V back, and that class would not be eligible."""
        usual_ns = self.idle_credit(account)
        if not account.share.has_slo or account.share.priority < self._accounts.highest:
            return usual_ns
        return max(usual_ns, self.policy.slo_credit_ns // len(self._accounts.paced))

    def adapt_period(self, now_ns: int, shared: Container[VgpuIndex]) -> None:
        """Long enough for hand-overs to cost at most ``handover_loss_ppm``; short while latency matters to a vGPU.
        ``shared``: vGPUs that take no turns."""
        policy, accounts = self.policy, self._accounts
        if self._period_since_ns is not None and now_ns - self._period_since_ns < policy.period_hold_ns:
            return
        company = [a for a in accounts.company.values() if a.key not in shared]
        if len(company) < 2:
            return
        period = policy.period_ns
        sensitive = max([a.returns_ppm for a in company]) > policy.bursty_ppm
        sensitive = sensitive or any(a.share.has_slo for a in company)
        if accounts.highest is Priority.HIGH:
            sensitive = sensitive or any(a.share.priority is Priority.HIGH for a in company)
        if all(a.kind.brief for a in company):
            period = min(period, policy.period_short_ns)
        elif not sensitive:
            cost = sum([a.handover_ns for a in company])
            period = min(max(cost * PPM // policy.handover_loss_ppm, period), max(period, policy.period_max_ns))
        if abs(period - self._period_ns) * PPM > policy.period_step_ppm * self._period_ns:
            self._period_ns = period
            self._period_since_ns = now_ns

    def deadline_at(self, account: Account, at_ns: int) -> int:
        """The deadline at ``at_ns``, no further away than one and a half tokens (more vGPUs may compete now)."""
        time, deadline, guarantee = account.time, account.deadline, account.guarantee
        if account.holds:
            time = account.time_at(at_ns)
            if account.undrained:
                deadline = self.grid(account, time)
        return min(deadline, time + virtual(self.quantum(account) * 3 // 2, guarantee))

    def length(self, account: Account, deadline: int, at_ns: int) -> int:
        """How long a lease from ``at_ns`` on is that ends at the virtual ``deadline``, within the limit."""
        length = real(deadline - account.time_at(at_ns), account.guarantee)
        return self._limits.within(account, max(length, self.shortest(account) // 2), at_ns)

    def length_now(self, account: Account, now_ns: int) -> int:
        """How long a lease of ``account`` from now on is."""
        return self.length(account, self.deadline_at(account, now_ns), now_ns)
