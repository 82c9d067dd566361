"""Whether a gang's member may run: the rules that ``gangs.py`` explains. The run queue asks them.

A member is *called* inside its gang window. A gang that binds its member keeps it out of the competition at other
times. An *urgent* member runs at once, because another member may be waiting for it.
"""

from __future__ import annotations

from dataclasses import replace

from gpuserver.core.scheduler.account import Account, real, virtual
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.leases import GangMemberStatus
from gpuserver.core.scheduler.limits import Limits
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.quanta import Quanta
from gpuserver.core.scheduler.temporal.virtual_time import VirtualTime

LATE_DOUBLINGS = 6
"""Of ``Policy.gang_late_ns``, at most."""


class GangRules:
    """What its gang lets a vGPU do, now or at a time to come. Only ``lapse`` changes anything."""

    def __init__(self, accounts: Accounts, time: VirtualTime, quanta: Quanta, limits: Limits, policy: Policy) -> None:
        self.policy = policy
        self._accounts = accounts
        self._time = time
        self._quanta = quanta
        self._limits = limits

    def lapse(self, now_ns: int) -> None:
        """Gang windows that no message has renewed bind no member any more."""
        for a in self._accounts.members.values():
            gang_window = a.gang_window
            if gang_window is None or now_ns < gang_window.lapses_ns:
                continue
            if gang_window.binding or gang_window.urgent:
                a.gang_window = replace(gang_window, binding=False, urgent=False)

    def next_change_ns(self, now_ns: int) -> int | None:
        """When a gang window begins, ends or lapses, or a member of a gang is late."""
        due: list[int] = []
        for a in self._accounts.members.values():
            if a.gang_window is not None and (a.wants or a.holds):
                due += [a.gang_window.start_ns, a.gang_window.end_ns]
                due += [a.gang_window.lapses_ns] if a.gang_window.binding or a.gang_window.urgent else []
                late = (self._turn_ends(a, now_ns) if a.uncalled else None, self._overdue_ns(a))
                due += [at for at in late if at is not None]
                due += [h.lease.end_ns + self._late_ns(a) for h in a.holds.values() if h.lease.end_ns is not None]
        return min((at for at in due if at > now_ns), default=None)

    # --- may it run?

    def admits(self, account: Account, at_ns: int) -> bool:
        """Whether its gang lets the vGPU compete. Where no other vGPU wants, one without a limit takes nothing from
        others, and does not have to do later what it does too early. One with a limit would use its limit up."""
        gang_window = account.gang_window
        if gang_window is None or not gang_window.binding or self.urgent(account) or self.called(account, at_ns):
            return True
        return not account.capped and not any(a is not account for a in self._accounts.company.values())

    def called(self, account: Account, at_ns: int) -> bool:
        """Whether its gang will run at ``at_ns``, as far as is known. The last ``fill_min_ns`` before the call count as
        well: they are not worth a lease of another vGPU."""
        gang_window = account.gang_window
        return gang_window is not None and gang_window.start_ns - self.policy.fill_min_ns <= at_ns < gang_window.end_ns

    def urgent(self, account: Account) -> bool:
        """Whether another member may be waiting for this one, past its own lease. The time that the other one holds
        meanwhile costs all vGPUs more than the short lease that ends the wait. So neither limit nor debt prevents that
        lease; it is charged all the same."""
        if account.gang_window is None or not account.wants or account.undrained:
            return False
        overdue_ns = self._overdue_ns(account)
        return account.gang_window.urgent or (overdue_ns is not None and self._accounts.now_ns >= overdue_ns)

    def any_urgent(self, but: Account | None = None) -> bool:
        return any(self.urgent(a) for a in self._accounts.members.values() if a is not but)

    def most_urgent(self, free: set[int]) -> Account | None:
        """The vGPU that runs at once because another member of its gang waits for it. It precedes all classes. Reason:
        the waiting member meanwhile holds another GPU, for a multiple of the short lease that ends the wait.
        ``free``: ids of the leases that keep no vGPU from another one."""
        members = self._accounts.members.values()
        urgent = [a for a in members if self.urgent(a) and all(id(h) in free for h in a.holds.values())]
        return min(urgent, key=lambda a: (-a.share.priority, a.served_ns, a.order), default=None)

    def overrides_class(self, account: Account) -> bool:
        """Whether ``account``, once called, precedes all classes: it is owed half of the idle credit or more. It cannot
        wait until the higher classes are not entitled, as others do: its gang runs only when it is called."""
        now_ns = self._accounts.now_ns
        return self._time.lag(account, self._time.clock(now_ns), now_ns) >= self._quanta.idle_credit(account) // 2

    def leads(self, account: Account) -> bool:
        """Whether the other members of its gang may follow its leases."""
        return account.gang_window is not None and account.gang_window.leader < 0

    def called_ns(self, account: Account) -> int:
        assert account.gang_window is not None
        return account.gang_window.start_ns

    def next_call(self, after_ns: int, but: Account) -> int | None:
        """When the next gang is called that precedes ``but``, at ``after_ns`` or later. Of two that are called at the
        same time, the one that was called last runs: the other has held for long enough (``_turn_ends``)."""
        starts = [
            max(a.gang_window.start_ns, after_ns)
            for a in self._accounts.members.values()
            if a.gang_window is not None
            and a is not but
            and (a.waiting or a.uncalled)
            and (a.share.priority >= but.share.priority or self.overrides_class(a))
            and (a.gang_window.start_ns >= after_ns or self.called(a, after_ns))
            and not self._overserved(a)
            and not (
                self.called(but, max(a.gang_window.start_ns, after_ns)) and self.called_ns(a) <= self.called_ns(but)
            )
        ]
        return min(starts, default=None)

    # --- what the other members of its gang get to know

    def status(self, account: Account) -> GangMemberStatus:
        """The status of ``account`` for the other members of its gang, as of the last event."""
        # An urgent lease, which a penalised vGPU may hold as well, does not make it ready.
        ready = not account.penalised and (
            bool(account.holds)
            or not (account.throttled or self._overserved(account) or self._other_gang_active(account))
        )
        oldest = min(account.holds.values(), key=lambda h: h.lease.epoch, default=None)
        if oldest is None:
            return GangMemberStatus(account.wants, *self._announced(account), ready=ready)
        lease = oldest.lease
        if lease.end_ns is None:  # no other vGPU wants this GPU, so members need not keep step with it
            return GangMemberStatus(ready=ready)
        late = oldest.went_ns is not None and self._accounts.now_ns >= lease.end_ns + self._late_ns(account)
        return GangMemberStatus(True, lease.start_ns, lease.end_ns, late, ready)

    def _announced(self, account: Account) -> tuple[int, int]:
        """When a throttled vGPU will hold: once its bucket is full, where no vGPU competes with it. Its followers are
        called for that time, since holders on their GPUs need notice. The forecast does not depend on the followers'
        status. Reason: followers depend on the forecast, and the two would chase each other."""
        if account.gang_window is None or not account.throttled or self._accounts.competing:
            return 0, 0
        start_ns = self._limits.refill_due(account)
        return start_ns, start_ns + self._limits.fill_line(account)

    def _late_ns(self, account: Account) -> int:
        """So long after its end a lease is late. Each urgent lease in a row doubles that. Reason: a longer kernel would
        otherwise call another member's, which would call the next one here, and neither could be stopped."""
        return self.policy.gang_late_ns << min(account.urgent_turns, LATE_DOUBLINGS)

    def _overdue_ns(self, account: Account) -> int | None:
        """When limit or debt have kept the vGPU out for so long, without a message of other members, that one of them
        may be waiting. The time that the waiting member holds meanwhile keeps that member out later, several times as
        long. Without this rule, each would wait longer for the other than the time before."""
        kept_out = account.throttled or account.penalised
        if account.gang_window is None or account.waiting_since_ns is None or not kept_out:
            return None
        return max(account.waiting_since_ns + self.policy.gang_lapse_ns, account.gang_window.lapses_ns)

    def _other_gang_active(self, account: Account) -> bool:
        """Whether a gang with another leader runs now. Two leaders know nothing of each other. Without this status they
        would call for the same time again and again, and one gang would find its GPUs taken every time."""
        return self._turn_ends(account, self._accounts.now_ns) is not None

    def _turn_ends(self, account: Account, now_ns: int) -> int | None:
        """When the member of another gang that keeps ``account`` out has held for long enough, if it goes on holding:
        two tokens of ``account`` ahead of it. Reason for a bound: where no other vGPU wants the GPU of that member's
        leader, the leader may hold as long as its limit allows."""
        if account.gang_window is None:
            return None
        end = account.time + virtual(2 * self._quanta.quantum(account), account.guarantee)
        left = [
            real(end - self._time.time_at(a, now_ns), a.guarantee)
            for a in self._accounts.members.values()
            if a is not account
            and a.holds
            and a.gang_window is not None
            and a.gang_window.leader not in (account.gang_window.leader, -1)
            and self.called(a, now_ns)
        ]
        return max((now_ns + left_ns for left_ns in left if left_ns > 0), default=None)

    def _overserved(self, account: Account) -> bool:
        """Whether the vGPU has had so much more than its share that it does not run even if it is called."""
        if len(self._accounts.competing) == account.competing:
            return False
        now_ns = self._accounts.now_ns
        return self._time.lag(account, self._time.clock(now_ns), now_ns) < -self._quanta.quantum(account)
