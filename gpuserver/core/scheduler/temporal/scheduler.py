"""Temporal mode: light vGPUs side by side (``shared_leases.py``), and all others in turns, one holder at a time
(``turns.py``)."""

from __future__ import annotations

from collections.abc import Collection

from gpuserver.core.scheduler.base import SchedulerBase
from gpuserver.core.scheduler.events import Events
from gpuserver.core.scheduler.gang_rules import GangRules
from gpuserver.core.scheduler.holders import Holders
from gpuserver.core.scheduler.leases import Observed, VgpuIndex
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, Policy
from gpuserver.core.scheduler.publisher import Publisher
from gpuserver.core.scheduler.quanta import TurnQuanta
from gpuserver.core.scheduler.run_queue import RunQueue
from gpuserver.core.scheduler.standby import StandbyLeases
from gpuserver.core.scheduler.temporal.allowances import Allowances
from gpuserver.core.scheduler.temporal.eevdf import Eevdf
from gpuserver.core.scheduler.temporal.shared_leases import SharedLeases
from gpuserver.core.scheduler.temporal.sharing import Guard, Relief, sharers
from gpuserver.core.scheduler.temporal.targets import Targets
from gpuserver.core.scheduler.temporal.turns import Turns
from gpuserver.core.scheduler.temporal.virtual_time import FairTime


class TemporalScheduler(SchedulerBase):
    """Weighted fair turns on a whole GPU. ``handle``, ``next_deadline_ns``, ``check``: see ``SchedulerBase``."""

    def __init__(self, policy: Policy = DEFAULT_POLICY, *, first_epoch: int = 1) -> None:
        super().__init__(policy)
        accounts, limits = self._accounts, self._limits
        self._time = time = FairTime(accounts)
        self._quanta: TurnQuanta = TurnQuanta(accounts, limits, policy)
        quanta = self._quanta
        self._gangs = gangs = GangRules(accounts, time, quanta, limits, policy)
        self._queue = queue = RunQueue(accounts, time, quanta, limits, gangs, policy)
        self._holders = holders = Holders(accounts)
        self._relief, self._guard = relief, guard = Relief(), Guard()
        self._allowances = Allowances(accounts, holders, relief, guard, policy)
        self._publisher = publisher = Publisher(
            accounts, quanta, policy, first_epoch=first_epoch, allowances=self._allowances
        )
        self._targets = targets = Targets(accounts, quanta, policy)
        self._eevdf = eevdf = Eevdf(accounts, holders, time, quanta, limits, gangs, targets, policy)
        self._turns = turns = Turns(accounts, holders, quanta, limits, gangs, queue, eevdf, publisher, policy)
        self._shared_leases = SharedLeases(accounts, holders, time, quanta, turns, publisher, relief, guard, policy)
        self._standby = StandbyLeases(accounts, limits, publisher, policy)
        self._events = Events(accounts, time, quanta, limits, queue, publisher, turns, policy)

    def _decide(self, now_ns: int) -> None:
        self._quanta.adapt_period(now_ns, self._holders.shared)
        self._turns.drop_unwanted()
        self._shared_leases.update(now_ns)
        self._turns.decide(now_ns)
        self._standby.update(now_ns)
        for account, hold in self._allowances.due(now_ns):
            self._publisher.permit(account, hold)

    def _matters_now(self, event: Observed) -> bool:
        """A reading counts in the next decision. Only a bucket makes a decision necessary now."""
        return self._accounts.all[event.vgpu].capped

    def next_deadline_ns(self) -> int | None:
        accounts, now_ns = self._accounts, self._accounts.now_ns
        due = self._refills_due()
        if accounts.penalised or accounts.members:
            changes = (self._queue.penalty_ends_ns(now_ns), self._gangs.next_change_ns(now_ns))
            due += [at for at in changes if at is not None]
        due += self._allowances.next_due_ns()
        if self.comparable():
            due.append((now_ns // self.policy.measure_ns + 1) * self.policy.measure_ns)
        due += self._turns.next_decision_ns(now_ns)
        return min(due, default=None)

    def sharing(self, company: Collection[VgpuIndex]) -> set[VgpuIndex]:
        accounts = self._accounts.all
        return {a.key for a in sharers([accounts[key] for key in company if key in accounts])}

    def metered(self) -> list[VgpuIndex]:
        holders = self._holders
        return [account.key for account, _ in holders.open_ended() if holders.shared or account.capped]

    def shared(self) -> list[VgpuIndex]:
        return list(self._holders.shared)

    def comparable(self) -> list[VgpuIndex]:
        company = self._accounts.company.values()
        if len(company) < 2 or not any(a.share.shareable for a in company):
            return []
        return [a.key for a in company]

    def check(self) -> None:
        super().check()
        self._shared_leases.check(self._allowances)
        self._holders.check()
