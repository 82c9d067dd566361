"""Commands: leases are published, revised and withdrawn, each under an epoch of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.leases import Command, Lease, Publish, VgpuIndex, Withdraw
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.quanta import Quanta
from gpuserver.core.scheduler.spatial.card import Card
from gpuserver.core.scheduler.temporal.allowances import Allowances
from vgpu.share import Priority


class Publisher:
    """Keeps accounts and commands in step: what it publishes is in its vGPU's account from then on.

    ``allowances``: how a vGPU with a limit gets GPU time under an open-ended lease; None: such leases have no limit.
    ``card``: whether its SMs allow a lease beside a withdrawn one; None: there is one holder at a time.
    """

    def __init__(
        self,
        accounts: Accounts,
        quanta: Quanta,
        policy: Policy,
        *,
        first_epoch: int,
        allowances: Allowances | None = None,
        card: Card | None = None,
    ) -> None:
        self.policy = policy
        self.next_epoch = first_epoch
        self._accounts = accounts
        self._quanta = quanta
        self._allowances = allowances
        self._card = card
        self._commands: list[Command] = []
        self._withdrawn: list[tuple[int, ActiveLease]] = []
        """The last withdrawals, each with its time."""

    def take_commands(self) -> list[Command]:
        """The commands since the last call, in order."""
        commands, self._commands = self._commands, []
        return commands

    def drop_commands(self, vgpu: VgpuIndex, epoch: int) -> None:
        """That lease of ``vgpu`` drained before its commands left, or those of an older one."""
        if self._commands:
            self._commands = [c for c in self._commands if not _concerns(c, vgpu, epoch)]

    def window(self, account: Account) -> int:
        """The most predicted GPU time that the vGPU may have in flight while others wait, ns."""
        mine, policy, accounts = account.share.priority, self.policy, self._accounts
        paced = accounts.beside_tpot(account, policy.slo_active_ns)
        if mine < accounts.highest and (not paced or any(_above(mine, other) for other in accounts.all.values())):
            return policy.window_low_ns
        return min(policy.window_ns, policy.slo_window_ns) if paced else policy.window_ns

    # --- new leases

    def lease(self, account: Account, start_ns: int, end_ns: int | None, early: bool = True) -> Lease:
        """A lease that waits for no other, to be published."""
        window_ns = self.window(account)
        return Lease(account.key, 0, start_ns, end_ns, go_by_ns=start_ns, early=early, window_ns=window_ns)

    def publish(self, account: Account, lease: Lease) -> ActiveLease:
        """A new lease for ``account``; its epoch is the next one, or that of its standby lease. It also waits for
        leases that were withdrawn a moment ago: their GO may have crossed the withdrawal."""
        now_ns = self._accounts.now_ns
        crossing = [
            (h.lease.vgpu, h.lease.epoch)
            for at_ns, h in self._withdrawn
            if now_ns - at_ns < self.policy.lookahead_ns
            and (self._card is None or self._card.short_beside(h, account))
            and not h.lease.standby  # no lease has GO beside one that is
        ]
        if crossing:
            patience_ns = min(self.policy.grace_ns, self._quanta.quantum(account))
            go_by_ns = max(lease.go_by_ns, lease.start_ns + patience_ns)
            lease = replace(lease, after=(*lease.after, *crossing), go_by_ns=go_by_ns)
        if account.standby is not None:  # no lease has GO beside it, even if it has begun already
            hold = self.take_up(account, lease.under(account.standby.lease.epoch))
            hold.revised_ns = now_ns
            self._send(account, hold)
            return hold
        hold = self._issue(account, lease)
        self._accounts.grant(account, hold)
        return hold

    def stand_by(self, account: Account, lease: Lease) -> None:
        """A standby lease for ``account``."""
        account.standby = self._issue(account, lease)
        self._accounts.note_wish(account)

    def take_up(self, account: Account, lease: Lease) -> ActiveLease:
        """The standby lease is granted, or has started: from now on it is ``lease``, one like any other."""
        hold = account.standby
        assert hold is not None
        account.standby = None
        self._accounts.note_wish(account)
        hold.lease = lease
        self._accounts.grant(account, hold)
        return hold

    def _issue(self, account: Account, lease: Lease) -> ActiveLease:
        hold = account.hold(lease.under(self.next_epoch))
        self.next_epoch += 1
        self._send(account, hold)
        return hold

    # --- leases that were published

    def revise(self, hold: ActiveLease, now_ns: int, **changes: Any) -> None:
        """Publish a lease again with other times, unless they have not changed."""
        if any(getattr(hold.lease, name) != value for name, value in changes.items()):
            hold.lease = replace(hold.lease, **changes)
            hold.revised_ns = now_ns
            self._send(self._accounts.all[hold.lease.vgpu], hold)

    def confirm(self, hold: ActiveLease) -> None:
        """Publish a lease again as it is."""
        self._commands.append(Publish(hold.lease))

    def move(self, hold: ActiveLease, start_ns: int) -> None:
        """The dispatcher starts the lease at another time than was planned: record that, send no command."""
        hold.lease = hold.lease.begun(start_ns)

    def permit(self, account: Account, hold: ActiveLease) -> None:
        """Allow the vGPU the GPU time that its limit grants by now under an open-ended lease."""
        allow = None if self._allowances is None else self._allowances.allow(account, hold)
        if allow is not None:
            self._commands.append(allow)

    def withdraw(self, account: Account, hold: ActiveLease) -> None:
        """Take back a granted lease that has not started."""
        del account.holds[hold.lease.epoch]
        self._accounts.note_holds(account)
        self._take_from(hold)

    def withdraw_standby(self, account: Account) -> None:
        """Take back the vGPU's standby lease, if it has one."""
        hold, account.standby = account.standby, None
        if hold is not None:
            self._accounts.note_wish(account)
            self._take_from(hold)

    def recall(self, account: Account, epoch: int, at_ns: int) -> ActiveLease:
        """The lease that was withdrawn under ``epoch``, or one like it: its GO at ``at_ns`` crossed the withdrawal."""
        known = (h for _, h in self._withdrawn if h.lease.epoch == epoch)
        hold = next(known, account.hold(Lease(account.key, epoch, at_ns, at_ns)))
        hold.lease = replace(hold.lease, start_ns=at_ns, end_ns=at_ns, standby=False)
        return hold

    def _send(self, account: Account, hold: ActiveLease) -> None:
        if hold.lease.end_ns is None:  # the hooks have to get its allowance before
            self.permit(account, hold)
        self._commands.append(Publish(hold.lease))

    def _take_from(self, hold: ActiveLease) -> None:
        now_ns = self._accounts.now_ns
        self._withdrawn = [w for w in self._withdrawn if now_ns - w[0] < self.policy.lookahead_ns]
        self._withdrawn.append((now_ns, hold))
        self._commands.append(Withdraw(hold.lease.vgpu, hold.lease.epoch))


def _above(priority: Priority, other: Account) -> bool:
    """Whether ``other`` is of a higher class, and wants or holds the GPU, or has no tpot: as without targets, a window
    is then as short as possible."""
    return other.share.priority > priority and (other.wants or bool(other.holds) or not other.share.tpot_ns)


def _concerns(command: Command, vgpu: VgpuIndex, epoch: int) -> bool:
    """Whether ``command`` concerns that lease of ``vgpu``, or an older one."""
    lease = command.lease if isinstance(command, Publish) else command
    return lease.vgpu == vgpu and lease.epoch <= epoch
