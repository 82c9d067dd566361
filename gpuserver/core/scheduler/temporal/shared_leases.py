"""Sharing in temporal mode: light vGPUs (``kinds.py``) hold open-ended leases at the same time, beside turns.

a vGPU may share      (``sharing.py``) it holds an open-ended lease at once, beside current and next; these are of
                      the others
it may no longer      its shared lease gets an end. It is current if no other is, and turns go on from there
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gpuserver.core.scheduler.account import Account, virtual
from gpuserver.core.scheduler.accounts import Accounts, InvariantError
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.holders import Holders
from gpuserver.core.scheduler.leases import Lease, VgpuIndex
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.publisher import Publisher
from gpuserver.core.scheduler.quanta import TurnQuanta
from gpuserver.core.scheduler.temporal.allowances import Allowances
from gpuserver.core.scheduler.temporal.sharing import Guard, Relief, sharers
from gpuserver.core.scheduler.temporal.turns import Turns
from gpuserver.core.scheduler.temporal.virtual_time import FairTime


class SharedLeases:
    """Publishes shared leases, ends them, and charges what sharers use."""

    def __init__(
        self,
        accounts: Accounts,
        holders: Holders,
        time: FairTime,
        quanta: TurnQuanta,
        turns: Turns,
        publisher: Publisher,
        relief: Relief,
        guard: Guard,
        policy: Policy,
    ) -> None:
        self.policy = policy
        self._accounts = accounts
        self._holders = holders
        self._time = time
        self._quanta = quanta
        self._turns = turns
        self._publisher = publisher
        self._relief = relief
        self._guard = guard

    def update(self, now_ns: int) -> None:
        """Which vGPUs share may have changed."""
        sharing = sharers(self._accounts.company.values())
        self.end_sharing({a.key for a in sharing}, now_ns)
        if sharing:
            self._share(sharing, now_ns)

    def _share(self, sharing: list[Account], now_ns: int) -> None:
        """Each of them holds an open-ended lease. The other vGPUs take turns beside them."""
        begins, self._holders.shared_ns = not self._holders.shared, now_ns
        for hold in (self._holders.next, self._holders.current):
            if hold is not None and self._accounts.all[hold.lease.vgpu] in sharing:
                self._share_turn(hold, now_ns)
        for account in sharing:
            if account.waiting:
                window_ns = self.policy.shared_window_ns
                lease = Lease(account.key, 0, now_ns, None, go_by_ns=now_ns, window_ns=window_ns)
                self._let_share(account, self._publisher.publish(account, lease))
        holders = [self._accounts.all[key] for key in self._holders.shared]
        if begins:
            self._relief.reset(holders, now_ns)
        else:
            self._relief.update(holders, now_ns)
        self._guard.update(holders, [a for a in self._accounts.company.values() if a not in sharing], now_ns)
        self._settle_shared(now_ns)

    def _share_turn(self, hold: ActiveLease, now_ns: int) -> None:
        """The current or next lease becomes a shared one, unless it is about to end. One that has not begun waits for
        no other lease."""
        account, end = self._accounts.all[hold.lease.vgpu], hold.lease.end_ns
        self._holders.forget_turn(hold)
        changes: dict[str, Any] = {"end_ns": None, "window_ns": self.policy.shared_window_ns}
        if hold.went_ns is None:
            changes |= {"start_ns": now_ns, "go_by_ns": now_ns, "after": (), "early": True}
        elif end is not None and end <= now_ns + self.policy.decision_ns:
            return
        self._time.settle(account, hold, now_ns)
        self._let_share(account, hold)
        self._publisher.revise(hold, now_ns, **changes)
        following = self._holders.next
        if following is not None:  # the next lease waited for this one to drain
            after = tuple(one for one in following.lease.after if one != (account.key, hold.lease.epoch))
            self._publisher.revise(following, now_ns, after=after)

    def _let_share(self, account: Account, hold: ActiveLease) -> None:
        hold.share()
        self._holders.shared[account.key] = hold

    def _settle_shared(self, now_ns: int) -> None:
        """Charge what the sharers have used. While none is short, each lag stays within the idle credit: what one vGPU
        does not use, the others may have. Beside vGPUs in turns a sharer saves up nothing: its virtual time keeps up
        with the clock."""
        for key, hold in self._holders.shared.items():
            self._time.settle(self._accounts.all[key], hold, now_ns)
        if self._relief.curbed is not None:
            return
        clock = self._time.keep(now_ns)
        beside_turns = len(self._holders.shared) < len(self._accounts.company)
        for key in self._holders.shared:
            account = self._accounts.all[key]
            apart = virtual(self._quanta.idle_credit(account), account.guarantee)
            earliest = clock if beside_turns else clock - apart
            self._accounts.shift(account, min(max(account.time, earliest), clock + apart))

    def end_sharing(self, but: Collection[VgpuIndex], now_ns: int) -> None:
        """Those that share, except ``but``, take turns from now on. A vGPU that is alone keeps its lease as it is."""
        alone = len(self._accounts.company) == 1
        for key in [key for key in self._holders.shared if key not in but]:
            hold, account = self._holders.shared.pop(key), self._accounts.all[key]
            self._time.settle(account, hold, now_ns)
            hold.shared = False
            if alone:
                self._holders.current = hold
            elif hold.went_ns is None:
                self._turns.take_back(hold)
            else:
                end = now_ns + self.policy.decision_ns + self.policy.shared_window_ns
                self._publisher.revise(hold, now_ns, end_ns=end)
                self._holders.current = self._holders.current or hold
        if not self._holders.shared:
            self._relief.curbed = None
            self._guard.curbed = {}

    def check(self, allowances: Allowances) -> None:
        """Raise ``InvariantError`` where a vGPU shares that may not, or takes turns that may share."""
        shared = self._holders.shared
        sharing = {a.key for a in sharers(self._accounts.company.values())}
        if not sharing.issuperset(shared):
            raise InvariantError(f"vGPUs hold shared leases that may not: {shared.keys() - sharing}")
        for hold in (self._holders.current, self._holders.next):
            if hold is not None and hold.lease.vgpu in sharing:
                raise InvariantError(f"a vGPU takes turns that may share: {hold}")
        for key, hold in shared.items():
            account = self._accounts.all[key]
            if not hold.shared or hold.lease.end_ns is not None or account.holds.get(hold.lease.epoch) is not hold:
                raise InvariantError(f"no shared lease, or one that no account knows: {hold}")
            if allowances.limited(account) and account.allowance_at_ns is None:
                raise InvariantError(f"a shared lease without an allowance for a vGPU with a limit: {hold.lease}")
        if any(self._accounts.all[key].waiting for key in sharing):
            raise InvariantError("a vGPU waits that may share")
