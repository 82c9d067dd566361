"""Events, commands and accounts of a scheduler: the part that both modes share.

``run_queue.py`` decides which vGPUs compete; a mode adds its clock and its decisions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from gpuserver.core.scheduler.account import Account, ActiveLease, virtual
from gpuserver.core.scheduler.leases import (
    FAR_NS,
    AccountSnapshot,
    AccountState,
    Added,
    Changed,
    Command,
    Drained,
    Event,
    GangCalled,
    Idle,
    Lease,
    LeaseStarted,
    Measured,
    Observed,
    Publish,
    Removed,
    Report,
    Runnable,
    ServiceTotals,
    Tick,
    VgpuIndex,
    Withdraw,
)
from gpuserver.core.scheduler.policy import SECOND, Policy
from gpuserver.core.scheduler.run_queue import InvariantError, RunQueue
from vgpu.share import PPM

SHARED_LATELY_NS = SECOND
"""A measurement covers less time than that."""


class SchedulerBase(RunQueue):
    """Dispatch of events, accounts and commands; a mode adds its clock and its decisions.

    ``handle`` and ``handle_all`` raise ``KeyError`` for a vGPU that was never added and ``ValueError`` for one added
    twice; they change nothing then. Both ignore reports of leases that are over: these crossed a decision on the way.
    """

    def __init__(self, policy: Policy, *, first_epoch: int) -> None:
        super().__init__(policy)
        self._next_epoch = first_epoch
        self._arrivals = 0
        self._commands: list[Command] = []
        self._shared_ns = -SHARED_LATELY_NS
        """When a vGPU last held a shared lease."""
        self._withdrawn: list[tuple[int, ActiveLease]] = []
        """The last withdrawals, each with its time."""
        self._on: dict[type, Callable[[Any, int], None]] = {
            Added: self._on_added,
            Changed: self._on_changed,
            Removed: self._on_removed,
            Runnable: self._on_wants,
            Idle: self._on_idle,
            LeaseStarted: self._on_went,
            Drained: self._on_drained,
            Observed: self._on_observed,
            GangCalled: self._on_gang_called,
        }

    # --- the interface of both modes

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take in ``event`` at ``now_ns`` (never earlier than the call before). Returns what to publish or withdraw."""
        if isinstance(event, Added):
            if event.vgpu in self._accounts:
                raise ValueError(f"vGPU {event.vgpu} was added twice")
        elif not isinstance(event, Tick) and event.vgpu not in self._accounts:
            raise KeyError(f"vGPU {event.vgpu} is unknown to the scheduler")
        return self._take_in((event,), now_ns)

    def handle_all(self, reports: Sequence[Report], now_ns: int) -> list[Command]:
        """Take in ``reports``, oldest first, and return once what to publish or withdraw. Reason: a drain and the GO
        that follows it come together."""
        for report in reports:
            if report.vgpu not in self._accounts:
                raise KeyError(f"vGPU {report.vgpu} is unknown to the scheduler")
        return self._take_in(reports, now_ns)

    def _take_in(self, events: Sequence[Event], now_ns: int) -> list[Command]:
        now_ns = max(now_ns, self._now_ns)
        news = False
        for event in events:
            if isinstance(event, Observed) and not self._matters_now(event):
                self._on_observed(event, now_ns)
                continue
            if isinstance(event, Measured) and not self._take_measure(event, now_ns):
                continue
            if not news:
                self._now_ns = now_ns  # not for readings alone: a decision that is due would be overdue, and never made
                self._refill(now_ns)
                news = True
            if not isinstance(event, Tick | Measured):
                self._apply(event, now_ns)
        if not news:
            return []
        self._lift_penalties(now_ns)
        self._gang_window(now_ns)
        self._decide(now_ns)
        self._publish_standby(now_ns)
        self._allow(now_ns)
        commands, self._commands = self._commands, []
        return commands

    def _apply(
        self,
        event: Runnable | Idle | LeaseStarted | Drained | Observed | Added | Changed | Removed | GangCalled,
        now_ns: int,
    ) -> None:
        if event.vgpu in self._accounts:
            self._refill_one(self._accounts[event.vgpu], now_ns)
        self._on[type(event)](event, now_ns)
        if event.vgpu in self._accounts:  # no bucket of the others has changed since
            self._refill_one(self._accounts[event.vgpu], now_ns)

    @abstractmethod
    def next_deadline_ns(self) -> int | None:
        """When ``Tick`` is due at the latest; None: only another event can change a decision."""

    @property
    @abstractmethod
    def period_ns(self) -> int:
        """One round of leases takes about so long at present."""

    def adopt(self, policy: Policy) -> None:
        """Follow another policy, from the next decision on."""
        self.policy = policy

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

    @property
    def next_epoch(self) -> int:
        """Above every epoch that was issued. A scheduler after this one has to begin here or later."""
        return self._next_epoch

    def skip_to(self, epoch: int) -> None:
        """Issue no epoch before ``epoch`` any more. Reason: a vGPU arrives whose hooks know epochs of another GPU."""
        self._next_epoch = max(self._next_epoch, epoch)

    def booked(self, vgpu: VgpuIndex) -> tuple[int, int]:
        """Held and busy time, in ns, of the leases of ``vgpu`` that are over."""
        account = self._accounts[vgpu]
        return account.held_ns, account.busy_ns

    def published(self, vgpu: VgpuIndex) -> list[tuple[Lease, bool]]:
        """The leases of ``vgpu`` that are not over, and whether each has started."""
        account = self._accounts[vgpu]
        holds = [*account.holds.values(), *([account.standby] if account.standby is not None else [])]
        return [(hold.lease, hold.went_ns is not None) for hold in holds]

    def books(self, now_ns: int = 0) -> dict[VgpuIndex, AccountState]:
        """The accounts for the journal: charged and refilled up to ``now_ns``, or the last event if that is later."""
        now_ns = max(now_ns, self._now_ns)
        clock = self.clock(now_ns)
        books = {}
        for key, account in self._accounts.items():
            lag = self._lag(account, clock, now_ns)
            if not account.wants and not account.holds:
                lag = min(lag, self._idle_credit(account))
            books[key] = account.book(lag, now_ns)
        return books

    def snapshot(self, now_ns: int) -> list[AccountSnapshot]:
        """Every vGPU for display, charged up to ``now_ns``. Changes nothing."""
        clock = self.clock(now_ns)
        return [a.statement(self._lag(a, clock, now_ns), now_ns) for a in self._accounts.values()]

    def served(self, now_ns: int) -> dict[VgpuIndex, ServiceTotals]:
        """The totals from which callers compute rates, several times a second."""
        return {a.key: ServiceTotals(a.held_at(now_ns), a.busy_at(now_ns), a.tokens) for a in self._accounts.values()}

    def check(self) -> None:
        """Raise ``InvariantError`` where the accounts contradict each other."""
        super().check()
        for a in self._accounts.values():
            for epoch, hold in a.holds.items():
                if epoch != hold.lease.epoch or hold.lease.vgpu != a.key or epoch >= self._next_epoch:
                    raise InvariantError(f"lease {epoch} is in the wrong account: {hold}")
                if hold.lease.standby:
                    raise InvariantError(f"lease {epoch} is granted, and still standing: {hold}")
                if hold.lease.end_ns is not None and hold.lease.end_ns < hold.lease.start_ns:
                    raise InvariantError(f"lease {epoch} ends before it starts: {hold}")

    def _allow(self, now_ns: int) -> None:
        """Allow vGPUs with a limit more, under leases without an end."""

    @abstractmethod
    def _decide(self, now_ns: int) -> None:
        """Publish, revise and withdraw leases after an event."""

    def _matters_now(self, event: Observed) -> bool:
        """Whether a reading of a holder requires a decision."""
        return True

    # --- events

    def _on_added(self, event: Added, now_ns: int) -> None:
        account = Account(event.vgpu, self._arrivals, event.share, bucket_at_ns=now_ns, served_ns=now_ns)
        self._arrivals += 1
        clock = self.clock(now_ns)
        account.bucket = 2 * self._fill_line(account) * PPM
        account.time = clock
        if event.book is not None:
            book = event.book
            account.time -= virtual(book.lag_ns, account.guarantee)
            account.restored_ns = max(0, book.lag_ns)
            account.bucket = min(account.bucket, book.bucket_ns * PPM)
            account.held_ns, account.busy_ns = book.held_ns, book.busy_ns
            account.overuse_ns, account.tokens = book.overuse_ns, book.tokens
            account.kind.restore(book.light, book.heavy_ns, book.stayed_ns, now_ns)
        self._accounts[event.vgpu] = account
        self._sort_in(account)
        self._note_wish(account)

    def _on_changed(self, event: Changed, now_ns: int) -> None:
        """Settle under the old share, keep the lag under the new one."""
        account = self._accounts[event.vgpu]
        self._withdraw_standby(account)
        competing = account.competing
        self._leave(account, now_ns)
        clock = self.clock(now_ns)
        lag = self._lag_after(account, self._time_at(account, now_ns), clock)
        for hold in account.holds.values():
            self._settle(account, hold, now_ns)
        account.take_share(event.share)
        self._sort_in(account)
        account.time = clock - virtual(lag, account.guarantee)
        account.deadline = account.time + virtual(self._quantum(account), account.guarantee)
        if competing:
            self._compete(account)
        if account.throttled and not account.capped:
            self._release(account, now_ns)

    def _on_removed(self, event: Removed, now_ns: int) -> None:
        account = self._accounts[event.vgpu]
        for epoch, hold in list(account.holds.items()):
            del account.holds[epoch]
            self._unshadow(epoch, now_ns)
            self._closed(hold)
        self._note_holds(account)
        self._stop_wanting(account, now_ns)
        for accounts in (self._accounts, self._capped, self._members, self._resting, self._company):
            accounts.pop(event.vgpu, None)
        self._rank()

    def _on_wants(self, event: Runnable, now_ns: int) -> None:
        account = self._accounts[event.vgpu]
        if account.wants:
            return
        account.wants = True
        self._note_wish(account)
        if account.waiting_since_ns is None:
            account.waiting_since_ns = now_ns
        if account.competing or account.penalised or account.uncalled:
            return
        self._place(account, now_ns)
        self._enqueue(account, now_ns)

    def _on_idle(self, event: Idle, now_ns: int) -> None:
        self._stop_wanting(self._accounts[event.vgpu], now_ns)

    def _on_went(self, event: LeaseStarted, now_ns: int) -> None:
        account = self._accounts[event.vgpu]
        at_ns = min(event.at_ns, now_ns)
        hold = account.holds.get(event.epoch)
        standby = account.standby
        by_itself = standby is not None and standby.lease.epoch == event.epoch
        if standby is not None and by_itself:
            if not account.wants:
                self._on_wants(Runnable(account.key), now_ns)
            hold = self._take_up(account, replace(standby.lease, standby=False, window_ns=self._window(account)))
            self._began(hold, now_ns)
        if hold is None:
            if account.last_epoch < event.epoch < self._next_epoch:
                self._went_withdrawn(account, event.epoch, at_ns)
            return
        if hold.went_ns is not None:
            return
        self._go(hold, at_ns - event.taken_ns)
        planned_end_ns = hold.lease.end_ns
        crossed = hold.revised_ns is not None and hold.revised_ns > at_ns - self.policy.decision_ns
        self._move(hold, at_ns)
        if crossed:
            # The dispatcher may have moved the old end or the new one: publish the end that is valid.
            self._commands.append(Publish(hold.lease))
        if hold.shadows and not hold.shares_overlap:  # the bypassed lease delays no other vGPU
            for other in self._accounts.values():
                if other is not account and not hold.shadows.isdisjoint(other.holds):
                    self._penalise(other, now_ns)
        self._went(hold, planned_end_ns, now_ns)
        if by_itself:  # once no lease waits that was granted without knowledge of it
            self._commands.append(Publish(hold.lease))

    def _began(self, hold: ActiveLease, now_ns: int) -> None:
        """A standby lease has begun by itself, whatever was planned."""
        raise NotImplementedError

    def _go(self, hold: ActiveLease, at_ns: int) -> None:
        undrained = frozenset(e for key, e in hold.lease.after if self._undrained(key, e))
        hold.go(at_ns, undrained, self.policy.grace_ns, self.policy.tail_ns)

    @abstractmethod
    def _went(self, hold: ActiveLease, planned_end_ns: int | None, now_ns: int) -> None:
        """A lease has begun. Had it begun in time, it would have ended at ``planned_end_ns``."""

    def _went_withdrawn(self, account: Account, epoch: int, at_ns: int) -> None:
        """The withdrawal crossed the GO: the lease ends as soon as it has drained, and is charged."""
        known = (h for _, h in self._withdrawn if h.lease.epoch == epoch)
        hold = next(known, account.hold(Lease(account.key, epoch, at_ns, at_ns)))
        hold.lease = replace(hold.lease, start_ns=at_ns, end_ns=at_ns, standby=False)
        self._go(hold, at_ns)
        account.holds[epoch] = hold
        self._note_holds(account)

    def _undrained(self, key: VgpuIndex, epoch: int) -> bool:
        account = self._accounts.get(key)
        return account is not None and epoch in account.holds and account.holds[epoch].went_ns is not None

    def _on_drained(self, event: Drained, now_ns: int) -> None:
        account = self._accounts[event.vgpu]
        hold = account.holds.get(event.epoch)
        if hold is None:
            return
        for epoch in [e for e in account.holds if e < event.epoch]:
            # A lease that crossed its withdrawal; no work of it is left.
            older = account.holds[epoch]
            self._settle(account, older, min(max(event.at_ns, older.usable_ns), now_ns))
            account.close(older, min(max(event.at_ns, older.usable_ns), now_ns))
            self._unshadow(epoch, now_ns)
            self._closed(older)
        at_ns = self._fair_end(event.epoch, min(max(event.at_ns, hold.usable_ns), now_ns))
        hold.observe(event.idle_ns, event.used_ns, at_ns)
        self._learn(account, event)
        self._settle(account, hold, at_ns)
        end = hold.lease.end_ns
        account.close(hold, at_ns, not event.wants and (end is None or at_ns < end - self.policy.guard_ns))
        self._note_holds(account)
        account.deadline = self._grid(account, account.time)
        self._unshadow(event.epoch, at_ns)
        self._closed(hold)
        if self._commands:  # of a lease that drained before its commands left
            self._commands = [c for c in self._commands if not _concerns(c, account.key, event.epoch)]
        if not event.wants:
            self._stop_wanting(account, now_ns)
            return
        account.wants = True
        self._note_wish(account)
        account.waiting_since_ns = at_ns
        self._enqueue(account, now_ns)

    def _fair_end(self, epoch: int, drained_ns: int) -> int:
        """Up to when a lease is charged that drained at ``drained_ns``. Another lease may have had GO at its tail."""
        others = [h.others_until(drained_ns) for h in self._holds() if h.shares_overlap and epoch in h.shadows]
        return min(drained_ns, max(others, default=drained_ns))

    def _unshadow(self, epoch: int, at_ns: int) -> None:
        for hold in self._holds():
            hold.unshadow(epoch, at_ns)

    def _holds(self) -> list[ActiveLease]:
        """Every granted lease that is not over."""
        return [hold for a in self._holding.values() for hold in a.holds.values()]

    @abstractmethod
    def _closed(self, hold: ActiveLease) -> None:
        """A lease is over: the mode forgets it."""

    def _on_observed(self, event: Observed, now_ns: int) -> None:
        account = self._accounts[event.vgpu]
        hold = account.holds.get(event.epoch)
        if hold is not None:
            hold.observe(event.idle_ns, event.used_ns, now_ns)
            hold.drains_by_ns = event.drains_by_ns
            self._learn(account, event)

    def _take_measure(self, event: Measured, now_ns: int) -> bool:
        """Whether the vGPU's kind has changed: that requires a decision."""
        alone = now_ns - self._shared_ns > SHARED_LATELY_NS
        return self._accounts[event.vgpu].kind.measured(event, now_ns, alone=alone)

    def _on_gang_called(self, event: GangCalled, now_ns: int) -> None:
        account = self._accounts[event.vgpu]
        account.gang_window = event.gang_window
        self._sort_in(account)
        if account.uncalled and account.gang_window is None:
            self._come_back(account, now_ns)

    def _learn(self, account: Account, event: Drained | Observed) -> None:
        account.learn(
            event.longest_kernel_ns,
            event.handover_cost_ns,
            self.policy.handover_min_ns,
            self.policy.handover_max_ns,
        )

    # --- commands

    def _window(self, account: Account) -> int:
        return self.policy.window_low_ns if account.share.priority < self._highest else self.policy.window_ns

    def _publish(self, account: Account, lease: Lease) -> ActiveLease:
        """A new lease for ``account``; its epoch is the next one, or that of its standby lease. It also waits for
        leases that were withdrawn a moment ago: their GO may have crossed the withdrawal."""
        now_ns = self._now_ns
        crossing = [
            (h.lease.vgpu, h.lease.epoch)
            for at_ns, h in self._withdrawn
            if now_ns - at_ns < self.policy.lookahead_ns
            and self._matters(h, account)
            and not h.lease.standby  # no lease has GO beside one that is
        ]
        if crossing:
            patience_ns = min(self.policy.grace_ns, self._quantum(account))
            go_by_ns = max(lease.go_by_ns, lease.start_ns + patience_ns)
            lease = replace(lease, after=(*lease.after, *crossing), go_by_ns=go_by_ns)
        if account.standby is not None:  # no lease has GO beside it, even if it has begun already
            hold = self._take_up(account, lease.under(account.standby.lease.epoch))
            hold.revised_ns = now_ns
            if lease.end_ns is None:
                self._permit(account, hold)
            self._commands.append(Publish(hold.lease))
            return hold
        hold = self._issue(account, lease)
        account.holds[hold.lease.epoch] = hold
        self._note_holds(account)
        return hold

    def _issue(self, account: Account, lease: Lease) -> ActiveLease:
        hold = account.hold(lease.under(self._next_epoch))
        self._next_epoch += 1
        if lease.end_ns is None:
            self._permit(account, hold)
        self._commands.append(Publish(hold.lease))
        return hold

    # --- standby leases

    def _publish_standby(self, now_ns: int) -> None:
        """Publish a lease that begins by itself for each idle vGPU for which that is safe. A vGPU that waits keeps its
        standby lease until it is granted. Reason: the scheduler must not withdraw a lease that may be in use."""
        moved = [a for a in self._resting.values() if self._may_stand_by(a) is (a.standby is None)]
        for a in sorted(moved, key=lambda a: a.order):
            if a.standby is not None:
                self._withdraw_standby(a)
            else:
                window_ns = self._window(a)
                a.standby = self._issue(
                    a, Lease(a.key, 0, now_ns, None, go_by_ns=FAR_NS, window_ns=window_ns, standby=True)
                )

    def _may_stand_by(self, account: Account) -> bool:
        """Whether the vGPU may have a standby lease, or keep it."""
        return False

    def _take_up(self, account: Account, lease: Lease) -> ActiveLease:
        """The standby lease is granted, or has started: from now on it is ``lease``, one like any other."""
        hold = account.standby
        assert hold is not None
        account.standby = None
        self._note_wish(account)
        hold.lease = lease
        account.holds[lease.epoch] = hold
        self._note_holds(account)
        return hold

    def _withdraw_standby(self, account: Account) -> None:
        hold, account.standby = account.standby, None
        if hold is not None:
            self._note_wish(account)
            self._take_from(hold)

    def _revise(self, hold: ActiveLease, now_ns: int, **changes: Any) -> None:
        """Publish a lease again with other times, unless they have not changed."""
        if any(getattr(hold.lease, name) != value for name, value in changes.items()):
            hold.lease = replace(hold.lease, **changes)
            hold.revised_ns = now_ns
            if hold.lease.end_ns is None:
                self._permit(self._accounts[hold.lease.vgpu], hold)
            self._commands.append(Publish(hold.lease))

    def _permit(self, account: Account, hold: ActiveLease) -> None:
        """An open-ended lease is about to be published. The hooks have to get its allowance before."""

    def _move(self, hold: ActiveLease, start_ns: int) -> None:
        """The dispatcher starts the lease at another time than was planned: record that, send no command."""
        hold.lease = hold.lease.begun(start_ns)

    def _withdraw(self, account: Account, hold: ActiveLease) -> None:
        del account.holds[hold.lease.epoch]
        self._note_holds(account)
        self._take_from(hold)

    def _take_from(self, hold: ActiveLease) -> None:
        now_ns = self._now_ns
        self._withdrawn = [w for w in self._withdrawn if now_ns - w[0] < self.policy.lookahead_ns]
        self._withdrawn.append((now_ns, hold))
        self._commands.append(Withdraw(hold.lease.vgpu, hold.lease.epoch))

    @abstractmethod
    def _matters(self, withdrawn: ActiveLease, account: Account) -> bool:
        """Whether a lease of ``account`` has to wait for the ``withdrawn`` one."""


def _concerns(command: Command, vgpu: VgpuIndex, epoch: int) -> bool:
    """Whether ``command`` concerns that lease of ``vgpu``, or an older one."""
    lease = command.lease if isinstance(command, Publish) else command
    return lease.vgpu == vgpu and lease.epoch <= epoch
