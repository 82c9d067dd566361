"""The clock of spatial mode, and the time that each vGPU is owed by it.

With a guarantee r_i and leases charged up to now,

    V advances with wall time, but is never less than the least v̂ (all are ahead: faster), nor more than the mean v̂,
    weighted with r, + 400 ms (all are behind: slower)           owed_i = r_i·(V − v̂_i)

    charge: v += held/r, but planned time no further than V + R/r (filler costs at most a round); overuse in full
    credit: with kernels longer than R/2, at most R and two of them, where a vGPU with shorter ones competes
"""

from __future__ import annotations

from gpuserver.core.scheduler.account import FRACTION_BITS, Account, real, virtual
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.temporal.virtual_time import VirtualTime


class RoundTime(VirtualTime):
    """Spatial mode: V follows wall time."""

    def __init__(self, accounts: Accounts, policy: Policy) -> None:
        super().__init__(accounts)
        self.policy = policy
        self._last_ns = 0
        """When V was last stored."""

    def clock(self, now_ns: int) -> int:
        accounts = self._accounts
        if not accounts.competing:
            return self._last
        moment, times = accounts.moment, []
        for a in accounts.competing.values():
            time = a.time
            if a.holds:
                time = self.time_at(a, now_ns)
                moment += a.guarantee * (time - a.time)
            times.append(time)
        # The mean, not the least: a vGPU that is hard to place must not delay the clock of all others, and a round of a
        # small guarantee is a long virtual time.
        latest = moment // accounts.weight + (self.policy.clock_lead_ns << FRACTION_BITS)
        return max(min(self._wall_clock(now_ns), latest), min(times))

    def _wall_clock(self, now_ns: int) -> int:
        return self._last + (max(0, now_ns - self._last_ns) << FRACTION_BITS)

    def keep(self, now_ns: int) -> int:
        clock = super().keep(now_ns)
        self._last_ns = now_ns
        return clock

    def time_at(self, account: Account, now_ns: int) -> int:
        time = account.time
        for hold in account.holds.values():
            time = self.charged(account, hold, time, now_ns)
        return time

    def charged(self, account: Account, hold: ActiveLease, time: int, at_ns: int) -> int:
        """Virtual time after the lease is charged up to ``at_ns``: planned time at most up to a round beyond V."""
        unsettled = hold.unsettled(at_ns)
        if not unsettled:
            return time
        overuse = min(unsettled, hold.overuse(at_ns))
        ahead = self._wall_clock(at_ns) + virtual(self.policy.round_ns, account.guarantee)
        planned = min(time + virtual(unsettled - overuse, account.guarantee), ahead)
        return max(time, planned) + virtual(overuse, account.guarantee)

    def charge(self, account: Account, hold: ActiveLease, at_ns: int) -> None:
        account.time = self.charged(account, hold, account.time, at_ns)

    def ahead_ns(self, account: Account, now_ns: int) -> int:
        """The vGPUs of a round are chosen by what each is owed: a debt distorts no other's place."""
        return 0

    def owed(self, account: Account, at_ns: int, clock: int) -> int:
        return real(clock - self.time_at(account, at_ns), account.guarantee)

    def limit_credit(self) -> None:
        """Bound what vGPUs with long kernels are owed, beside vGPUs with short ones. Each time that a vGPU with long
        kernels makes way for another, it drains at any time, and its SMs idle until the boundary. Where the packing
        does not leave that much time, it would be owed ever more. vGPUs with short kernels would get ever less of their
        own share."""
        round_ns, competing = self.policy.round_ns, self._accounts.competing
        long = [a for a in competing.values() if 2 * a.longest_kernel_ns > round_ns]
        if len(long) == len(competing):
            return
        for a in long:
            least = self._last - virtual(round_ns + 2 * a.longest_kernel_ns, a.guarantee)
            if not a.holds and a.time < least:
                self._accounts.moment += a.guarantee * (least - a.time)
                a.time = least
