"""All accounts of a GPU, sorted by what events ask for: the vGPUs that compete, hold, want, or have a limit.

The sets and sums are kept up to date. Reason: each event needs them several times, and there may be hundreds of vGPUs.
``run_queue.py`` decides which vGPU competes; here that is only recorded.
"""

from __future__ import annotations

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.leases import VgpuIndex
from vgpu.share import Priority


class InvariantError(AssertionError):
    """The scheduler's own accounts contradict each other: a bug here, never a vGPU's fault."""


class Accounts:
    """Every vGPU's account as of ``now_ns``, the last event, with sets and sums over them."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.all: dict[VgpuIndex, Account] = {}
        self.capped: dict[VgpuIndex, Account] = {}
        self.members: dict[VgpuIndex, Account] = {}
        """Those with a gang window, in force or lapsed."""
        self.paced: dict[VgpuIndex, Account] = {}
        """Those with an slo."""
        self.competing: dict[VgpuIndex, Account] = {}
        self.holding: dict[VgpuIndex, Account] = {}
        """Those with a granted lease that is not over."""
        self.penalised: dict[VgpuIndex, Account] = {}
        self.resting: dict[VgpuIndex, Account] = {}
        """Those that want nothing, or have a standby lease still."""
        self.company: dict[VgpuIndex, Account] = {}
        """Those that want or hold, also while they do not compete."""
        self.weight = 0
        """W = Σ r over the competition …"""
        self.moment = 0
        """… and Σ r·v, without held time that is not charged yet."""
        self.classes: set[Priority] = set()
        """All that vGPUs have now …"""
        self.highest = Priority.NORMAL
        """… and the highest of them."""

    def check(self) -> None:
        """Raise ``InvariantError`` where the accounts contradict each other."""
        for name, counted in self.counted().items():
            if (noted := getattr(self, name)) != counted:
                raise InvariantError(f"{name} is noted as {noted}, and counted as {counted}")
        for a in self.all.values():
            if a.competing and not (a.wants or a.holds):
                raise InvariantError(f"vGPU {a.key} competes though it wants nothing and holds nothing")
            if a.competing and (a.throttled or a.penalised or a.uncalled):
                raise InvariantError(f"vGPU {a.key} competes though it is throttled, penalised or uncalled")
            if a.uncalled and (a.gang_window is None or a.holds):
                raise InvariantError(f"vGPU {a.key} is uncalled though nothing binds it, or it holds")
            if a.wants and not (a.competing or a.throttled or a.penalised or a.uncalled):
                raise InvariantError(f"vGPU {a.key} wants a token, and is neither competing nor kept out")
            if a.standby is not None and (a.holds or a.throttled or a.penalised or a.uncalled):
                raise InvariantError(f"vGPU {a.key} has a standby lease and holds, or may not hold")
            if a.throttled and not a.capped:
                raise InvariantError(f"vGPU {a.key} is throttled without a limit")
            if a.throttled and not a.wants:
                raise InvariantError(f"vGPU {a.key} is throttled though it wants nothing")

    def counted(self) -> dict[str, object]:
        """The sets and sums, by name, computed anew from the accounts."""
        accounts = self.all.values()
        classes = {a.share.priority for a in accounts}
        return {
            "capped": {a.key: a for a in accounts if a.capped},
            "members": {a.key: a for a in accounts if a.gang_window is not None},
            "paced": {a.key: a for a in accounts if a.share.has_slo},
            "competing": {a.key: a for a in accounts if a.competing},
            "holding": {a.key: a for a in accounts if a.holds},
            "penalised": {a.key: a for a in accounts if a.penalised},
            "resting": {a.key: a for a in accounts if a.standby is not None or not a.wants},
            "company": {a.key: a for a in accounts if a.wants or a.holds},
            "weight": sum(a.guarantee for a in accounts if a.competing),
            "moment": sum(a.guarantee * a.time for a in accounts if a.competing),
            "classes": classes,
            "highest": max(classes, default=Priority.NORMAL),
        }

    def active_leases(self) -> list[ActiveLease]:
        """Every granted lease that is not over."""
        return [hold for a in self.holding.values() for hold in a.holds.values()]

    def beside_tpot(self, account: Account, lately_ns: int) -> bool:
        """Whether another vGPU with a tpot, of the same class or a higher one, has the GPU, wants it, or had it in the
        last ``lately_ns``. What ``account`` has in flight would delay its next step or request."""
        return any(
            other is not account
            and other.share.tpot_ns > 0
            and other.share.priority >= account.share.priority
            and (other.wants or bool(other.holds) or self.now_ns - other.served_ns < lately_ns)
            for other in self.paced.values()
        )

    # --- vGPUs come, change and go

    def add(self, account: Account) -> None:
        self.all[account.key] = account
        self.sort_in(account)
        self.note_wish(account)

    def remove(self, account: Account) -> None:
        """The account wants nothing and holds nothing any more."""
        for accounts in (self.all, self.capped, self.members, self.paced, self.resting, self.company):
            accounts.pop(account.key, None)
        self._rank()

    def sort_in(self, account: Account) -> None:
        """Its share or its gang has changed."""
        for some, one_of_them in (
            (self.capped, account.capped),
            (self.members, account.gang_window is not None),
            (self.paced, account.share.has_slo),
        ):
            if one_of_them:
                some[account.key] = account
            else:
                some.pop(account.key, None)
        self._rank()

    def _rank(self) -> None:
        self.classes = {a.share.priority for a in self.all.values()}
        self.highest = max(self.classes, default=Priority.NORMAL)

    # --- the competition

    def compete(self, account: Account) -> None:
        """Count the account in V and W, with its present virtual time."""
        if not account.competing:
            account.competing = True
            self.competing[account.key] = account
            self.weight += account.guarantee
            self.moment += account.guarantee * account.time

    def retire(self, account: Account) -> None:
        """Count a competing account in V and W no more."""
        account.competing = False
        del self.competing[account.key]
        self.weight -= account.guarantee
        self.moment -= account.guarantee * account.time

    def shift(self, account: Account, time: int) -> None:
        """Move virtual time, and the deadline with it, without a charge."""
        if account.competing:
            self.moment += account.guarantee * (time - account.time)
        account.shift_to(time)

    def set_penalised(self, account: Account, penalised: bool) -> None:
        account.penalised = penalised
        if penalised:
            self.penalised[account.key] = account
        else:
            self.penalised.pop(account.key, None)

    # --- what an account wants and holds

    def grant(self, account: Account, hold: ActiveLease) -> None:
        account.holds[hold.lease.epoch] = hold
        self.note_holds(account)

    def note_wish(self, account: Account) -> None:
        """The vGPU began or ceased to want, or got or lost its standby lease."""
        if account.standby is not None or not account.wants:
            self.resting[account.key] = account
        else:
            self.resting.pop(account.key, None)
        self._note_company(account)

    def note_holds(self, account: Account) -> None:
        """The vGPU was granted a lease, or one of its leases is over."""
        if account.holds:
            self.holding[account.key] = account
        else:
            self.holding.pop(account.key, None)
        self._note_company(account)

    def _note_company(self, account: Account) -> None:
        if account.wants or account.holds:
            self.company[account.key] = account
        else:
            self.company.pop(account.key, None)
