"""Limits: the bucket of busy time that a vGPU may still use, and when one that used it up may go on.

bucket:    b grows by l · dt always; b −= busy
full:      2 L, or max(2 L, wait_bucket · l) while it wants       L = max(quantum_min, period · l)
throttled: b < L
"""

from __future__ import annotations

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.policy import Policy
from vgpu.share import PPM


class Limits:
    """What a vGPU's limit allows. Changes nothing."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def fill_line(self, account: Account) -> int:
        """L, nanoseconds: a bucket below it throttles."""
        policy = self.policy
        return max(policy.quantum_min_ns, policy.period_ns * account.share.limit_ppm // PPM)

    def full(self, account: Account) -> int:
        """The most that the bucket may hold after its leases are charged."""
        full = 2 * self.fill_line(account)
        if account.wants:
            full = max(full, self.policy.wait_bucket_ns * account.share.limit_ppm // PPM)
        return full

    def dry(self, account: Account) -> bool:
        return account.capped and account.bucket < self.fill_line(account) * PPM

    def dry_at(self, account: Account, at_ns: int) -> bool:
        """Whether the bucket will throttle the vGPU when its leases have been charged up to ``at_ns``."""
        return account.capped and account.bucket_at(at_ns) < self.fill_line(account) * PPM

    def refill_due(self, account: Account) -> int:
        """When a throttled vGPU's bucket reaches its fill line."""
        missing = self.fill_line(account) * PPM - account.bucket
        return account.bucket_at_ns + -(-missing // max(1, account.share.limit_ppm))

    def within(self, account: Account, length_ns: int, at_ns: int) -> int:
        """``length_ns``, or less where the limit is used up before, for a lease at ``at_ns``."""
        return min(length_ns, self._left(account, at_ns)) if account.capped else length_ns

    def end_alone(self, account: Account, at_ns: int) -> int | None:
        """Where a lease at ``at_ns`` has to end although no vGPU needs its SMs: when its limit is used up."""
        return at_ns + self._left(account, at_ns) if account.capped else None

    def end_within(self, account: Account, start_ns: int, end_ns: int) -> int:
        """``end_ns``, or earlier where the limit is used up before."""
        return min(end_ns, start_ns + self._left(account, start_ns)) if account.capped else end_ns

    def _left(self, account: Account, at_ns: int) -> int:
        return max(account.bucket_at(at_ns) // PPM, self.policy.quantum_min_ns // 2)
