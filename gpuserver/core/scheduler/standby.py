"""Standby leases: an idle vGPU has one, which begins by itself. A request on a free GPU then waits for no decision."""

from __future__ import annotations

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.leases import FAR_NS, Lease
from gpuserver.core.scheduler.limits import Limits
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.publisher import Publisher


class StandbyLeases:
    """Which vGPUs have a standby lease."""

    def __init__(self, accounts: Accounts, limits: Limits, publisher: Publisher, policy: Policy) -> None:
        self.policy = policy
        self._accounts = accounts
        self._limits = limits
        self._publisher = publisher

    def update(self, now_ns: int) -> None:
        """Publish a standby lease for each idle vGPU for which that is safe. A vGPU that waits keeps its standby lease
        until it is granted. Reason: the scheduler must not withdraw a lease that may be in use."""
        moved = [a for a in self._accounts.resting.values() if self._may_have(a) is (a.standby is None)]
        for a in sorted(moved, key=lambda a: a.order):
            if a.standby is not None:
                self._publisher.withdraw_standby(a)
            else:
                window_ns = self._publisher.window(a)
                lease = Lease(a.key, 0, now_ns, None, go_by_ns=FAR_NS, window_ns=window_ns, standby=True)
                self._publisher.stand_by(a, lease)

    def _may_have(self, account: Account) -> bool:
        """Whether the vGPU may have a standby lease, or keep it."""
        if account.holds or account.penalised or account.uncalled or account.gang_window is not None:
            return False
        return self.policy.standby and not (account.capped and (account.throttled or self._limits.dry(account)))
