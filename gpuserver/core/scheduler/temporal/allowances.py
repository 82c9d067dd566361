"""Limits under open-ended leases: the scheduler allows a vGPU a sum of GPU time, and the hooks' meters count it.

A vGPU with a limit is allowed what its bucket has, and gets until the next allowance. A sharer that is *curbed* because
another vGPU is short (``sharing.py``) is allowed its part of the time.
"""

from __future__ import annotations

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.holders import Holders
from gpuserver.core.scheduler.leases import Allow
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.temporal.sharing import Guard, Relief
from vgpu.share import PPM


class Allowances:
    """How much GPU time each open-ended lease is allowed, and when more is due."""

    def __init__(self, accounts: Accounts, holders: Holders, relief: Relief, guard: Guard, policy: Policy) -> None:
        self.policy = policy
        self._accounts = accounts
        self._holders = holders
        self._relief = relief
        self._guard = guard

    def limited(self, account: Account) -> bool:
        """Whether ``account`` may not use all of the time, by its limit or because others are short."""
        return self._allowed_ppm(account) < PPM

    def _curbed_ppm(self, account: Account) -> int:
        """The part of the time that ``account`` may use because others are short."""
        if account.key not in self._holders.shared:
            return PPM
        relieved = account.guarantee if account.key == self._relief.curbed else PPM
        return min(relieved, self._guard.curbed.get(account.key, PPM))

    def _allowed_ppm(self, account: Account) -> int:
        return min(self._curbed_ppm(account), account.share.limit_ppm)

    def _due_ns(self, account: Account) -> int:
        return (account.allowance_at_ns or 0) + self.policy.allowance_ns

    def next_due_ns(self) -> list[int]:
        """When each of them needs more."""
        return [self._due_ns(account) for account, _ in self._holders.open_ended() if self.limited(account)]

    def due(self, now_ns: int) -> list[tuple[Account, ActiveLease]]:
        """Those that need more now, or have no limit any more."""
        return [
            (account, hold)
            for account, hold in self._holders.open_ended()
            if (now_ns >= self._due_ns(account) if self.limited(account) else account.allowance_at_ns is not None)
        ]

    def allow(self, account: Account, hold: ActiveLease) -> Allow | None:
        """Allow what the vGPU's bucket has, and gets until the next allowance. From here on the hooks' meters count.
        What a curbed sharer's last kernel used beyond its allowance counts against the next one."""
        now_ns = self._accounts.now_ns
        hold.metered = True
        curbed_ppm = self._curbed_ppm(account)
        allowed_ppm = min(curbed_ppm, account.share.limit_ppm)
        if allowed_ppm < PPM:
            ahead_ns, used_ns = self.policy.allowance_ahead_ns, hold.busy(now_ns)
            allowance_ns = used_ns + allowed_ppm * ahead_ns // PPM
            if hold.curbed_ns is not None and account.allowance_at_ns is not None:
                earned_ns = curbed_ppm * (now_ns - account.allowance_at_ns) // PPM
                allowance_ns = min(allowance_ns, hold.curbed_ns + earned_ns)
            hold.curbed_ns = allowance_ns if curbed_ppm < PPM else None
            if account.capped:
                filled = account.bucket_at(now_ns) + account.share.limit_ppm * ahead_ns
                limit_ns = used_ns + filled // PPM
                allowance_ns = limit_ns if curbed_ppm == PPM else min(allowance_ns, limit_ns)
            account.allowance_at_ns = now_ns
            return Allow(account.key, hold.lease.epoch, max(0, allowance_ns))
        if account.allowance_at_ns is None:
            return None
        account.allowance_at_ns = hold.curbed_ns = None
        return Allow(account.key, hold.lease.epoch, None)
