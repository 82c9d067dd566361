"""The leases that matter in temporal mode: the turn under way, the turn that follows it, and shared leases.

``current`` is held or will be at once. ``next`` is published ahead while current runs, so that the dispatcher hands
over without a request to the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.accounts import Accounts, InvariantError
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.leases import VgpuIndex
from gpuserver.core.scheduler.policy import SECOND

SHARED_LATELY_NS = SECOND
"""A measurement covers less time than that."""


class Holders:
    """Which lease has which part. ``turns.py`` and ``shared_leases.py`` assign them."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.current: ActiveLease | None = None
        self.next: ActiveLease | None = None
        self.shared: dict[VgpuIndex, ActiveLease] = {}
        self.shared_ns = -SHARED_LATELY_NS
        """When a vGPU last held a shared lease."""

    def alone(self, now_ns: int) -> bool:
        """Whether no vGPU has held a shared lease of late."""
        return now_ns - self.shared_ns > SHARED_LATELY_NS

    def open_ended(self) -> list[tuple[Account, ActiveLease]]:
        """The accounts that hold open-ended leases, each with its lease."""
        accounts, current = self._accounts.all, self.current
        found = [(accounts[key], hold) for key, hold in self.shared.items()]
        if current is not None and current.lease.end_ns is None:
            found.append((accounts[current.lease.vgpu], current))
        return found

    def in_line(self) -> Iterator[Account]:
        """The accounts that wait, or have the next lease."""
        ahead = self.next.lease.vgpu if self.next is not None else None
        return (a for a in self._accounts.all.values() if a.waiting or a.uncalled or a.key == ahead)

    def forget_turn(self, hold: ActiveLease) -> None:
        if hold is self.current:
            self.current = None
        elif hold is self.next:
            self.next = None

    def forget(self, hold: ActiveLease) -> None:
        """The lease is over."""
        if self.shared.get(hold.lease.vgpu) is hold:
            del self.shared[hold.lease.vgpu]
        self.forget_turn(hold)

    def check(self) -> None:
        """Raise ``InvariantError`` where the leases contradict the accounts or each other."""
        current, following = self.current, self.next
        if following is not None and current is None:
            raise InvariantError("a next lease is published and no vGPU holds")
        for holder in self._accounts.holding.values():
            if any(hold.shared for hold in holder.holds.values()) and holder.key not in self.shared:
                raise InvariantError(f"vGPU {holder.key} holds a shared lease, and takes turns")
        waiting = any(a.waiting for a in self._accounts.all.values())
        for hold in (current, following):
            if hold is None:
                continue
            account = self._accounts.all.get(hold.lease.vgpu)
            if account is None or account.holds.get(hold.lease.epoch) is not hold:
                raise InvariantError(f"no account knows lease {hold.lease}")
            if hold.lease.end_ns is None:
                if account.always_ends or (account.capped and account.allowance_at_ns is None):
                    raise InvariantError(f"open-ended lease without an allowance for a vGPU with a limit: {hold.lease}")
                if waiting:
                    raise InvariantError(f"a vGPU waits beside the open-ended {hold.lease}")
        if current is not None and following is not None:
            if following.went_ns is not None or current.went_ns is None:
                raise InvariantError("a next lease is published for a lease that has not begun, or has itself begun")
            if current.lease.end_ns is None or following.lease.start_ns < current.lease.end_ns:
                raise InvariantError(f"{following.lease} starts before {current.lease} ends")
        if current is None and waiting:
            raise InvariantError("a vGPU waits and none holds")
