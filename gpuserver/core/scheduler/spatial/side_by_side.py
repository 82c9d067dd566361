"""Spatial mode while all vGPUs fit the GPU: each has an open-ended lease (a finite one under a limit); none waits."""

from __future__ import annotations

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.limits import Limits
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.publisher import Publisher
from gpuserver.core.scheduler.spatial.card import Card


class SideBySide:
    """Publishes and revises leases that no boundary ends."""

    def __init__(self, limits: Limits, card: Card, publisher: Publisher, policy: Policy) -> None:
        self.policy = policy
        self._limits = limits
        self._card = card
        self._publisher = publisher

    def let_run(self, account: Account, now_ns: int) -> None:
        """All vGPUs fit: this one may run now, for as long as its limit allows."""
        if not account.holds:
            self._publisher.publish(
                account, self._publisher.lease(account, now_ns, self._limits.end_alone(account, now_ns))
            )
        for hold in account.holds.values():
            end = hold.lease.end_ns
            if hold.went_ns is None:
                if hold.lease.start_ns > now_ns or hold.lease.after or (end is None) == account.capped:
                    end = self._limits.end_alone(account, now_ns)
                    self._publisher.revise(
                        hold, now_ns, start_ns=now_ns, end_ns=end, after=(), go_by_ns=now_ns, early=True
                    )
            elif self._card.overdue(hold, now_ns):
                continue
            elif not account.capped:
                self._publisher.revise(hold, now_ns, end_ns=None, window_ns=self._publisher.window(account))
            elif end is None:
                self._publisher.revise(hold, now_ns, end_ns=self._limits.end_alone(account, now_ns))
            elif account.wants and end - now_ns <= self.policy.lookahead_ns and not self._limits.dry_at(account, end):
                self._publisher.revise(hold, now_ns, end_ns=self._limits.end_alone(account, end))
