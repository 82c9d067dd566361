"""Events: each is recorded in the accounts, and moves vGPUs in the run queue. Decisions follow later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from gpuserver.core.scheduler.account import Account, real, virtual
from gpuserver.core.scheduler.accounts import Accounts, InvariantError
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.leases import (
    Added,
    Changed,
    Drained,
    GangCalled,
    Idle,
    LeaseStarted,
    Measured,
    Observed,
    Removed,
    Runnable,
    VgpuIndex,
)
from gpuserver.core.scheduler.limits import Limits
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.publisher import Publisher
from gpuserver.core.scheduler.quanta import Quanta
from gpuserver.core.scheduler.run_queue import RunQueue
from gpuserver.core.scheduler.temporal.virtual_time import VirtualTime
from vgpu.share import PPM


class LeaseObserver(Protocol):
    """The part that decides about leases: it gets to know when one starts and ends."""

    def alone(self, now_ns: int) -> bool:
        """Whether no vGPU has held a shared lease of late."""

    def began(self, hold: ActiveLease) -> None:
        """A standby lease has begun by itself, whatever was planned."""

    def started(self, hold: ActiveLease, planned_end_ns: int | None, now_ns: int) -> None:
        """A lease has begun. Had it begun in time, it would have ended at ``planned_end_ns``."""

    def closed(self, hold: ActiveLease) -> None:
        """A lease is over."""


class Events:
    """Takes in one event at a time."""

    def __init__(
        self,
        accounts: Accounts,
        time: VirtualTime,
        quanta: Quanta,
        limits: Limits,
        queue: RunQueue,
        publisher: Publisher,
        observer: LeaseObserver,
        policy: Policy,
    ) -> None:
        self.policy = policy
        self._accounts = accounts
        self._time = time
        self._quanta = quanta
        self._limits = limits
        self._queue = queue
        self._publisher = publisher
        self._observer = observer
        self._arrivals = 0
        self._on: dict[type, Callable[[Any, int], None]] = {
            Added: self._on_added,
            Changed: self._on_changed,
            Removed: self._on_removed,
            Runnable: self._on_runnable,
            Idle: self._on_idle,
            LeaseStarted: self._on_started,
            Drained: self._on_drained,
            Observed: self.observe,
            GangCalled: self._on_gang_called,
        }

    def apply(
        self,
        event: Runnable | Idle | LeaseStarted | Drained | Observed | Added | Changed | Removed | GangCalled,
        now_ns: int,
    ) -> None:
        accounts = self._accounts.all
        if event.vgpu in accounts:
            self._queue.refill(accounts[event.vgpu], now_ns)
        self._on[type(event)](event, now_ns)
        if event.vgpu in accounts:  # no bucket of the others has changed since
            self._queue.refill(accounts[event.vgpu], now_ns)

    def observe(self, event: Observed, now_ns: int) -> None:
        """Take in a reading of a holder."""
        account = self._accounts.all[event.vgpu]
        hold = account.holds.get(event.epoch)
        if hold is not None:
            hold.observe(event.idle_ns, event.used_ns, now_ns)
            hold.drains_by_ns = event.drains_by_ns
            self._learn(account, event)

    def measure(self, event: Measured, now_ns: int) -> bool:
        """Take in a measurement. Whether the vGPU's kind has changed: that requires a decision."""
        alone = self._observer.alone(now_ns)
        return self._accounts.all[event.vgpu].kind.measured(event, now_ns, alone=alone)

    def check(self) -> None:
        """Raise ``InvariantError`` where a lease is in the wrong account, or impossible."""
        for a in self._accounts.all.values():
            for epoch, hold in a.holds.items():
                if epoch != hold.lease.epoch or hold.lease.vgpu != a.key or epoch >= self._publisher.next_epoch:
                    raise InvariantError(f"lease {epoch} is in the wrong account: {hold}")
                if hold.lease.standby:
                    raise InvariantError(f"lease {epoch} is granted, and still standing: {hold}")
                if hold.lease.end_ns is not None and hold.lease.end_ns < hold.lease.start_ns:
                    raise InvariantError(f"lease {epoch} ends before it starts: {hold}")

    # --- vGPUs come, change and go

    def _on_added(self, event: Added, now_ns: int) -> None:
        account = Account(event.vgpu, self._arrivals, event.share, bucket_at_ns=now_ns, served_ns=now_ns)
        self._arrivals += 1
        clock = self._time.clock(now_ns)
        account.bucket = 2 * self._limits.fill_line(account) * PPM
        account.time = clock
        if event.book is not None:
            book = event.book
            account.time -= virtual(book.lag_ns, account.guarantee)
            account.restored_ns = max(0, book.lag_ns)
            account.bucket = min(account.bucket, book.bucket_ns * PPM)
            account.held_ns, account.busy_ns = book.held_ns, book.busy_ns
            account.overuse_ns, account.tokens = book.overuse_ns, book.tokens
            account.kind.restore(book.light, book.heavy_ns, book.stayed_ns, now_ns)
        self._accounts.add(account)

    def _on_changed(self, event: Changed, now_ns: int) -> None:
        """Settle under the old share, keep the lag under the new one."""
        account = self._accounts.all[event.vgpu]
        self._publisher.withdraw_standby(account)
        competing = account.competing
        self._queue.leave(account, now_ns)
        clock = self._time.clock(now_ns)
        lag = real(clock - self._time.time_at(account, now_ns), account.guarantee)
        for hold in account.holds.values():
            self._time.settle(account, hold, now_ns)
        account.take_share(event.share)
        self._accounts.sort_in(account)
        account.time = clock - virtual(lag, account.guarantee)
        account.deadline = account.time + virtual(self._quanta.quantum(account), account.guarantee)
        if competing:
            self._accounts.compete(account)
        if account.throttled and not account.capped:
            self._queue.release(account, now_ns)

    def _on_removed(self, event: Removed, now_ns: int) -> None:
        account = self._accounts.all[event.vgpu]
        for epoch, hold in list(account.holds.items()):
            del account.holds[epoch]
            self._end_overlaps(epoch, now_ns)
            self._observer.closed(hold)
        self._accounts.note_holds(account)
        self._queue.stop_wanting(account, now_ns)
        self._accounts.remove(account)

    def _on_gang_called(self, event: GangCalled, now_ns: int) -> None:
        account = self._accounts.all[event.vgpu]
        account.gang_window = event.gang_window
        self._accounts.sort_in(account)
        if account.uncalled and account.gang_window is None:
            self._queue.come_back(account, now_ns)

    # --- wishes

    def _on_runnable(self, event: Runnable, now_ns: int) -> None:
        self._queue.want(self._accounts.all[event.vgpu], now_ns)

    def _on_idle(self, event: Idle, now_ns: int) -> None:
        self._queue.stop_wanting(self._accounts.all[event.vgpu], now_ns)

    # --- leases

    def _on_started(self, event: LeaseStarted, now_ns: int) -> None:
        account = self._accounts.all[event.vgpu]
        at_ns = min(event.at_ns, now_ns)
        hold = account.holds.get(event.epoch)
        standby = account.standby
        by_itself = standby is not None and standby.lease.epoch == event.epoch
        if standby is not None and by_itself:
            self._queue.want(account, now_ns)
            lease = replace(standby.lease, standby=False, window_ns=self._publisher.window(account))
            hold = self._publisher.take_up(account, lease)
            self._observer.began(hold)
        if hold is None:
            if account.last_epoch < event.epoch < self._publisher.next_epoch:
                self._started_withdrawn(account, event.epoch, at_ns)
            return
        if hold.went_ns is not None:
            return
        self._go(hold, at_ns - event.taken_ns)
        planned_end_ns = hold.lease.end_ns
        crossed = hold.revised_ns is not None and hold.revised_ns > at_ns - self.policy.decision_ns
        self._publisher.move(hold, at_ns)
        if crossed:
            # The dispatcher may have moved the old end or the new one: publish the end that is valid.
            self._publisher.confirm(hold)
        if hold.shadows and not hold.shares_overlap:  # the bypassed lease delays no other vGPU
            for other in self._accounts.all.values():
                if other is not account and not hold.shadows.isdisjoint(other.holds):
                    self._queue.penalise(other, now_ns)
        self._observer.started(hold, planned_end_ns, now_ns)
        if by_itself:  # once no lease waits that was granted without knowledge of it
            self._publisher.confirm(hold)

    def _started_withdrawn(self, account: Account, epoch: int, at_ns: int) -> None:
        """The withdrawal crossed the GO: the lease ends as soon as it has drained, and is charged."""
        hold = self._publisher.recall(account, epoch, at_ns)
        self._go(hold, at_ns)
        self._accounts.grant(account, hold)

    def _go(self, hold: ActiveLease, at_ns: int) -> None:
        undrained = frozenset(e for key, e in hold.lease.after if self.undrained(key, e))
        hold.go(at_ns, undrained, self.policy.grace_ns, self.policy.tail_ns)

    def undrained(self, key: VgpuIndex, epoch: int) -> bool:
        """Whether that lease has begun, and work of it may be on the GPU."""
        account = self._accounts.all.get(key)
        return account is not None and epoch in account.holds and account.holds[epoch].went_ns is not None

    def _on_drained(self, event: Drained, now_ns: int) -> None:
        account = self._accounts.all[event.vgpu]
        hold = account.holds.get(event.epoch)
        if hold is None:
            return
        for epoch in [e for e in account.holds if e < event.epoch]:
            # A lease that crossed its withdrawal; no work of it is left.
            older = account.holds[epoch]
            self._time.settle(account, older, min(max(event.at_ns, older.usable_ns), now_ns))
            account.close(older, min(max(event.at_ns, older.usable_ns), now_ns))
            self._end_overlaps(epoch, now_ns)
            self._observer.closed(older)
        at_ns = self._fair_end(event.epoch, min(max(event.at_ns, hold.usable_ns), now_ns))
        hold.observe(event.idle_ns, event.used_ns, at_ns)
        self._learn(account, event)
        self._time.settle(account, hold, at_ns)
        end = hold.lease.end_ns
        account.close(hold, at_ns, not event.wants and (end is None or at_ns < end - self.policy.guard_ns))
        self._accounts.note_holds(account)
        account.deadline = self._quanta.grid(account, account.time)
        self._end_overlaps(event.epoch, at_ns)
        self._observer.closed(hold)
        self._publisher.drop_commands(account.key, event.epoch)
        if event.wants:
            self._queue.want_on(account, at_ns, now_ns)
        else:
            self._queue.stop_wanting(account, now_ns)

    def _fair_end(self, epoch: int, drained_ns: int) -> int:
        """Up to when a lease is charged that drained at ``drained_ns``. Another lease may have had GO at its tail."""
        leases = self._accounts.active_leases()
        others = [h.others_until(drained_ns) for h in leases if h.shares_overlap and epoch in h.shadows]
        return min(drained_ns, max(others, default=drained_ns))

    def _end_overlaps(self, epoch: int, at_ns: int) -> None:
        for hold in self._accounts.active_leases():
            hold.unshadow(epoch, at_ns)

    def _learn(self, account: Account, event: Drained | Observed) -> None:
        account.learn(
            event.longest_kernel_ns,
            event.handover_cost_ns,
            self.policy.handover_min_ns,
            self.policy.handover_max_ns,
        )
