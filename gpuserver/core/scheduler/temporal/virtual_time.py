"""The clock V, and what each vGPU is owed by it. Both modes charge time; each has its own clock.

Every reading of V charges held leases up to now first. Reason: a newcomer placed on stale accounts would get all the
time that the holder had alone. ``FairTime`` is the clock of temporal mode; ``round_time.py`` has that of spatial mode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from gpuserver.core.scheduler.account import Account, real
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.active_lease import ActiveLease


class VirtualTime(ABC):
    """V, and the charges that move each vGPU's virtual time."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._last = 0
        """V as last computed over a competition that was not empty."""

    @abstractmethod
    def clock(self, now_ns: int) -> int:
        """V: the virtual time that a vGPU without debt or credit has now."""

    @abstractmethod
    def ahead_ns(self, account: Account, now_ns: int) -> int:
        """Real time by which the debt of ``account`` would distort the others' places. 0: it distorts none."""

    def keep(self, now_ns: int) -> int:
        """Store V, for when no vGPU competes."""
        self._last = self.clock(now_ns)
        return self._last

    def time_at(self, account: Account, now_ns: int) -> int:
        """v̂: virtual time with all leases charged up to now."""
        return account.time_at(now_ns)

    def settle(self, account: Account, hold: ActiveLease, at_ns: int) -> None:
        """Charge the virtual time of a lease up to ``at_ns``, overuse included."""
        before = account.time
        self.charge(account, hold, at_ns)
        hold.settle(at_ns)
        if account.competing:
            self._accounts.moment += account.guarantee * (account.time - before)

    def charge(self, account: Account, hold: ActiveLease, at_ns: int) -> None:
        account.charge(hold.unsettled(at_ns))

    def lag(self, account: Account, clock: int, now_ns: int) -> int:
        """What the vGPU is owed at V = ``clock``, ns; a throttled one is owed no more than it was before."""
        kept_ns = account.kept_lag_ns
        lag_ns = real(clock - self.time_at(account, now_ns), account.guarantee)
        return lag_ns if kept_ns is None else max(kept_ns, min(lag_ns, 0))


class FairTime(VirtualTime):
    """Temporal mode: V = Σ r·v̂ / W, the mean of the virtual times of those that compete."""

    def clock(self, now_ns: int) -> int:
        return self.mean(now_ns)[0]

    def mean(self, now_ns: int, but: Collection[Account] = ()) -> tuple[int, int]:
        """V = Σ r·v̂ / W, and W, over the competition without ``but``. Where that is empty, V keeps its last value."""
        accounts = self._accounts
        weight, moment = accounts.weight, accounts.moment
        for a in accounts.holding.values():
            if a.competing:
                moment += a.guarantee * (a.time_at(now_ns) - a.time)
        for a in but:
            if a.competing:
                weight -= a.guarantee
                moment -= a.guarantee * a.time_at(now_ns)
        return (moment // weight if weight else self._last), weight

    def ahead_ns(self, account: Account, now_ns: int) -> int:
        """What the vGPU used beyond its share, or what the others need to catch up, whichever is less. Others of a
        small guarantee catch up soon, and one of them with idle credit is far behind in virtual time."""
        mean, weight = self.mean(now_ns, but=(account,))
        return real(account.time_at(now_ns) - mean, min(account.guarantee, weight)) if weight else 0
