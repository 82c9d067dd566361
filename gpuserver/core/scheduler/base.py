"""What both modes are made of. A mode adds its clock, its lengths and its decisions (``temporal/``, ``spatial/``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.events import Events
from gpuserver.core.scheduler.gang_rules import GangRules
from gpuserver.core.scheduler.leases import (
    AccountSnapshot,
    AccountState,
    Added,
    Command,
    Event,
    GangMemberStatus,
    Lease,
    Measured,
    Observed,
    Report,
    ServiceTotals,
    Tick,
    VgpuIndex,
)
from gpuserver.core.scheduler.limits import Limits
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.publisher import Publisher
from gpuserver.core.scheduler.quanta import Quanta
from gpuserver.core.scheduler.run_queue import RunQueue
from gpuserver.core.scheduler.temporal.virtual_time import VirtualTime


class SchedulerBase(ABC):
    """Passes events to the parts, in order, and returns the commands that the mode's decisions make.

    ``handle`` and ``handle_all`` raise ``KeyError`` for a vGPU that was never added and ``ValueError`` for one added
    twice; they change nothing then. Both ignore reports of leases that are over: these crossed a decision on the way.
    """

    _time: VirtualTime
    _quanta: Quanta
    _gangs: GangRules
    _queue: RunQueue
    _publisher: Publisher
    _events: Events

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._accounts = Accounts()
        self._limits = Limits(policy)

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take in ``event`` at ``now_ns`` (never earlier than the call before). Returns what to publish or withdraw."""
        if isinstance(event, Added):
            if event.vgpu in self._accounts.all:
                raise ValueError(f"vGPU {event.vgpu} was added twice")
        elif not isinstance(event, Tick) and event.vgpu not in self._accounts.all:
            raise KeyError(f"vGPU {event.vgpu} is unknown to the scheduler")
        return self._take_in((event,), now_ns)

    def handle_all(self, reports: Sequence[Report], now_ns: int) -> list[Command]:
        """Take in ``reports``, oldest first, and return once what to publish or withdraw. Reason: a drain and the GO
        that follows it come together."""
        for report in reports:
            if report.vgpu not in self._accounts.all:
                raise KeyError(f"vGPU {report.vgpu} is unknown to the scheduler")
        return self._take_in(reports, now_ns)

    def _take_in(self, events: Sequence[Event], now_ns: int) -> list[Command]:
        now_ns = max(now_ns, self._accounts.now_ns)
        news = False
        for event in events:
            if isinstance(event, Observed) and not self._matters_now(event):
                self._events.observe(event, now_ns)
                continue
            if isinstance(event, Measured) and not self._events.measure(event, now_ns):
                continue
            if not news:
                # Not for readings alone: a decision that is due would be overdue, and never made.
                self._accounts.now_ns = now_ns
                self._queue.refill_all(now_ns)
                news = True
            if not isinstance(event, Tick | Measured):
                self._events.apply(event, now_ns)
        if not news:
            return []
        self._queue.lift_penalties(now_ns)
        self._queue.follow_calls(now_ns)
        self._decide(now_ns)
        return self._publisher.take_commands()

    @abstractmethod
    def _decide(self, now_ns: int) -> None:
        """Publish, revise and withdraw leases after an event."""

    def _matters_now(self, event: Observed) -> bool:
        """Whether a reading of a holder requires a decision."""
        return True

    @abstractmethod
    def next_deadline_ns(self) -> int | None:
        """When ``Tick`` is due at the latest; None: only another event can change a decision."""

    def _refills_due(self) -> list[int]:
        return [self._limits.refill_due(a) for a in self._accounts.capped.values() if a.throttled]

    def adopt(self, policy: Policy) -> None:
        """Follow another policy, from the next decision on."""
        self.policy = policy
        for part in self._parts():
            part.policy = policy
        self._quanta.adopt(policy)

    def _parts(self) -> list[Any]:
        """The parts that follow a policy."""
        return [part for part in vars(self).values() if hasattr(part, "policy")]

    # --- which vGPUs take turns, and which share

    def turns(self, company: Collection[VgpuIndex]) -> set[VgpuIndex]:
        """Those of ``company`` that take turns, where all of it wants the GPU. They gain when one of them gives its
        lease back while it is idle."""
        return {*company} - self.sharing(company)

    def sharing(self, company: Collection[VgpuIndex]) -> set[VgpuIndex]:
        """Those of ``company`` that hold shared leases, where all of it wants the GPU."""
        return set()

    def metered(self) -> list[VgpuIndex]:
        """Those that get GPU time in parts, or share: the caller observes what they used before ``Tick``."""
        return []

    def shared(self) -> list[VgpuIndex]:
        """Those that hold shared leases."""
        return []

    def comparable(self) -> list[VgpuIndex]:
        """Those whose demand decides which vGPUs share: the caller measures it before ``Tick``."""
        return []

    # --- leases

    @property
    def period_ns(self) -> int:
        """One round of leases takes about so long at present."""
        return self._quanta.period_ns

    @property
    def next_epoch(self) -> int:
        """Above every epoch that was issued. A scheduler after this one has to begin here or later."""
        return self._publisher.next_epoch

    def skip_to(self, epoch: int) -> None:
        """Issue no epoch before ``epoch`` any more. Reason: a vGPU arrives whose hooks know epochs of another GPU."""
        self._publisher.next_epoch = max(self._publisher.next_epoch, epoch)

    def outlook(self, vgpu: VgpuIndex) -> GangMemberStatus:
        """The status of ``vgpu`` for the other members of its gang, as of the last event."""
        return self._gangs.status(self._accounts.all[vgpu])

    def published(self, vgpu: VgpuIndex) -> list[tuple[Lease, bool]]:
        """The leases of ``vgpu`` that are not over, and whether each has started."""
        account = self._accounts.all[vgpu]
        holds = [*account.holds.values(), *([account.standby] if account.standby is not None else [])]
        return [(hold.lease, hold.went_ns is not None) for hold in holds]

    # --- accounts

    def booked(self, vgpu: VgpuIndex) -> tuple[int, int]:
        """Held and busy time, in ns, of the leases of ``vgpu`` that are over."""
        account = self._accounts.all[vgpu]
        return account.held_ns, account.busy_ns

    def books(self, now_ns: int = 0) -> dict[VgpuIndex, AccountState]:
        """The accounts for the journal: charged and refilled up to ``now_ns``, or the last event if that is later."""
        now_ns = max(now_ns, self._accounts.now_ns)
        clock = self._time.clock(now_ns)
        books = {}
        for key, account in self._accounts.all.items():
            lag = self._time.lag(account, clock, now_ns)
            if not account.wants and not account.holds:
                lag = min(lag, self._quanta.idle_credit(account))
            books[key] = account.book(lag, now_ns)
        return books

    def snapshot(self, now_ns: int) -> list[AccountSnapshot]:
        """Every vGPU for display, charged up to ``now_ns``. Changes nothing."""
        clock = self._time.clock(now_ns)
        return [a.statement(self._time.lag(a, clock, now_ns), now_ns) for a in self._accounts.all.values()]

    def served(self, now_ns: int) -> dict[VgpuIndex, ServiceTotals]:
        """The totals from which callers compute rates, several times a second."""
        accounts = self._accounts.all.values()
        return {a.key: ServiceTotals(a.held_at(now_ns), a.busy_at(now_ns), a.tokens) for a in accounts}

    def at_limit(self, now_ns: int) -> frozenset[VgpuIndex]:
        """The vGPUs that their limits keep waiting."""
        return frozenset(a.key for a in self._accounts.capped.values() if a.at_limit(now_ns))

    def check(self) -> None:
        """Raise ``InvariantError`` where the accounts contradict each other."""
        self._accounts.check()
        self._events.check()
