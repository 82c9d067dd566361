"""The SMs of a GPU in spatial mode: which leases take them, which fit together, and how long others wait for them."""

from __future__ import annotations

from collections.abc import Iterable

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.accounts import Accounts, InvariantError
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.policy import Policy
from vgpu.share import CARD_MPERCENT


class Card:
    """Which vGPUs have the SMs. Changes nothing."""

    def __init__(self, accounts: Accounts, policy: Policy) -> None:
        self.policy = policy
        self._accounts = accounts

    # --- vGPUs that do not drain

    def overdue(self, hold: ActiveLease, now_ns: int) -> bool:
        """The lease's end has passed and it has not drained."""
        return hold.went_ns is not None and hold.lease.end_ns is not None and hold.lease.end_ns <= now_ns

    def stuck(self, account: Account, now_ns: int) -> bool:
        """All leases of the vGPU are overdue. Its withdrawn lease may have started all the same, and a newer one since.
        The vGPU then computes under the newer one, whose drain will be that of both."""
        went = [h for h in account.holds.values() if h.went_ns is not None]
        return bool(went) and all(self.overdue(h, now_ns) for h in went)

    def patience(self, account: Account) -> int:
        """How long others wait for the vGPU to drain: a round, more for known long kernels, at most the grace."""
        return min(self.policy.grace_ns, max(self.policy.round_ns, 2 * account.longest_kernel_ns))

    def patience_ends(self, account: Account) -> int:
        """From when on an overdue vGPU keeps no SMs from others: its process may be stopped, or dead."""
        return max(h.lease.end_ns or 0 for h in account.holds.values()) + self.patience(account)

    # --- SMs

    def occupied(self, at_ns: int) -> int:
        """SMs of leases that have begun and not drained, or may begin at any moment."""
        return sum(
            a.width
            for a in self._accounts.all.values()
            if not a.penalised and any(h.lease.early or h.lease.start_ns <= at_ns for h in a.holds.values())
        )

    def in_force(self, at_ns: int) -> list[ActiveLease]:
        """Leases under which hooks submit work. A lease at whose tail others got GO takes no more."""
        went = [h for h in self._accounts.active_leases() if h.went_ns is not None]
        at_tail = {epoch for h in went for epoch in h.shadows}
        return [h for h in went if h.lease.epoch not in at_tail and (h.lease.end_ns is None or h.lease.end_ns > at_ns)]

    def fits(self) -> bool:
        """Whether all vGPUs that want, and all that have not drained, fit the GPU."""
        return self.fit_together(
            a for a in self._accounts.all.values() if (a.competing and a.wants) or (a.undrained and not a.penalised)
        )

    def fit_together(self, accounts: Iterable[Account]) -> bool:
        """Whether they fit by their widths, or because all burst and are of one class. Those run on all SMs: to keep
        some of them off the GPU would leave SMs idle and give the others nothing that is theirs."""
        accounts = list(accounts)
        if sum(a.width for a in accounts) <= CARD_MPERCENT:
            return True
        return all(a.share.bursts for a in accounts) and len({a.share.priority for a in accounts}) == 1

    def late(self, account: Account, now_ns: int, boundary: int) -> bool:
        """Whether the vGPU will not have drained at the boundary: it then keeps its SMs and gets no lease."""
        return any(
            self.overdue(hold, now_ns)
            or (hold.went_ns is not None and hold.drains_by_ns > boundary + self.policy.late_ns)
            for hold in account.holds.values()
        )

    def short_beside(self, withdrawn: ActiveLease, account: Account) -> bool:
        """If ``withdrawn`` started all the same, it has its SMs until it has drained. True if too few are left."""
        granted = sum(a.width for a in self._accounts.all.values() if a.holds and not a.penalised)
        return withdrawn.lease.vgpu == account.key or granted + account.width + withdrawn.sm_mpercent > CARD_MPERCENT

    def check(self) -> None:
        """Raise ``InvariantError`` where more leases are in force than the GPU has SMs for."""
        in_force = self.in_force(self._accounts.now_ns)
        if sum(h.sm_mpercent for h in in_force) > CARD_MPERCENT and not all(h.bursts for h in in_force):
            raise InvariantError(f"leases of more than all SMs are in force: {in_force}")
