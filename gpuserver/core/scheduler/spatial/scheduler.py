"""Spatial mode: vGPUs whose SMs fit the GPU hold leases at the same time; where they do not fit, they take rounds.

All vGPUs fit where Σ s over those that want is at most the GPU. They also fit where all of them burst (they run on all
SMs, and are of one class). ``side_by_side.py`` and ``rounds.py`` have what follows from it.
"""

from __future__ import annotations

from collections.abc import Collection

from gpuserver.core.scheduler.accounts import InvariantError
from gpuserver.core.scheduler.base import SchedulerBase
from gpuserver.core.scheduler.events import Events
from gpuserver.core.scheduler.gang_rules import GangRules
from gpuserver.core.scheduler.leases import VgpuIndex
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, Policy
from gpuserver.core.scheduler.publisher import Publisher
from gpuserver.core.scheduler.quanta import RoundQuanta
from gpuserver.core.scheduler.run_queue import RunQueue
from gpuserver.core.scheduler.spatial.card import Card
from gpuserver.core.scheduler.spatial.round_choice import RoundChoice
from gpuserver.core.scheduler.spatial.round_time import RoundTime
from gpuserver.core.scheduler.spatial.rounds import Rounds
from gpuserver.core.scheduler.spatial.side_by_side import SideBySide


class SpatialScheduler(SchedulerBase):
    """Packs SM partitions into rounds. ``handle``, ``next_deadline_ns``, ``check``: see ``SchedulerBase``."""

    def __init__(self, policy: Policy = DEFAULT_POLICY, *, first_epoch: int = 1) -> None:
        super().__init__(policy)
        accounts, limits = self._accounts, self._limits
        self._time = time = RoundTime(accounts, policy)
        self._quanta = quanta = RoundQuanta(policy)
        self._gangs = gangs = GangRules(accounts, time, quanta, limits, policy)
        self._queue = queue = RunQueue(accounts, time, quanta, limits, gangs, policy)
        self._card = card = Card(accounts, policy)
        self._publisher = publisher = Publisher(accounts, quanta, policy, first_epoch=first_epoch, card=card)
        self._choice = RoundChoice(accounts, time, limits, card, policy)
        self._rounds = Rounds(accounts, time, limits, card, self._choice, publisher, policy)
        self._side_by_side = SideBySide(limits, card, publisher, policy)
        self._events = Events(accounts, time, quanta, limits, queue, publisher, self._rounds, policy)

    def _decide(self, now_ns: int) -> None:
        self._time.keep(now_ns)
        for a in self._accounts.all.values():
            for hold in list(a.holds.values()):
                if hold.went_ns is None and not a.wants:
                    self._publisher.withdraw(a, hold)
                    self._queue.leave(a, now_ns)
            if self._card.stuck(a, now_ns) and not a.penalised and now_ns >= self._card.patience_ends(a):
                self._queue.penalise(a, now_ns)
        if self._card.fits():
            self._rounds.boundary_ns = None
            for a in self._accounts.all.values():
                if a.competing and (a.wants or a.capped):
                    self._side_by_side.let_run(a, now_ns)
        else:
            self._rounds.take(now_ns)

    def next_deadline_ns(self) -> int | None:
        accounts, now_ns, policy = self._accounts.all.values(), self._accounts.now_ns, self.policy
        due = self._refills_due()
        due += [
            self._card.patience_ends(a)
            for a in accounts
            if not a.penalised and any(self._card.overdue(h, now_ns) for h in a.holds.values())
        ]
        boundary_ns = self._rounds.boundary_ns
        if boundary_ns is not None:
            due += [boundary_ns - policy.round_lookahead_ns, boundary_ns]
        else:
            due += [
                h.lease.end_ns - policy.lookahead_ns
                for a in accounts
                for h in a.holds.values()
                if h.lease.end_ns is not None and h.went_ns is not None
            ]
        return min((d for d in due if d > now_ns), default=None)

    def turns(self, company: Collection[VgpuIndex]) -> set[VgpuIndex]:
        """Empty where all vGPUs fit the GPU together: none is in the way of another, and each keeps its lease while
        idle."""
        return set() if self._card.fit_together(self._accounts.all.values()) else set(company)

    def check(self) -> None:
        super().check()
        self._card.check()
        in_rounds = self._rounds.boundary_ns is not None
        for a in self._accounts.all.values():
            for hold in a.holds.values():
                if hold.lease.end_ns is None and (a.capped or in_rounds):
                    raise InvariantError(f"open-ended lease in a round or beside a limit: {hold.lease}")
            if a.waiting and not in_rounds:
                raise InvariantError(f"vGPU {a.key} waits though all vGPUs fit")
