"""The vGPUs that compete for a GPU, and what each is owed: the clock V, and the vGPUs that count in it.

A vGPU is in one of six states, which its account shows:

    idle        wants nothing, holds nothing; its virtual time does not advance and never goes down (debt is kept)
    waiting     wants a token and may get one at once
    holding     has a lease that has not drained
    throttled   wants, but its limit bucket is below its fill line; keeps its credit until the bucket is refilled, and
                the others' progress pays its debt
    penalised   wants, but is deep in debt (a holder that overran the others' patience); comes back when the others'
                virtual time has caught up with its own, so that its debt distorts no other vGPU's place
    uncalled    wants, but its gang is not called (``gangs.py``); once called, it is placed like one that was idle

Waiting and holding vGPUs are the competition: the scheduler takes its clock V and its weight W over them alone.
Every reading of V charges held leases up to now first. Reason: a newcomer placed on stale accounts would get all the
time that the holder had alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace

from gpuserver.core.scheduler.account import Account, ActiveLease, real, virtual
from gpuserver.core.scheduler.leases import GangMemberStatus, VgpuIndex
from gpuserver.core.scheduler.policy import Policy
from vgpu.share import PPM, Priority

LATE_DOUBLINGS = 6
"""Of ``Policy.gang_late_ns``, at most."""


class InvariantError(AssertionError):
    """The scheduler's own accounts contradict each other: a bug here, never a vGPU's fault."""


class RunQueue(ABC):
    """Accounts, the clock over those that compete, and how a vGPU enters and leaves the competition."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._accounts: dict[VgpuIndex, Account] = {}
        self._capped: dict[VgpuIndex, Account] = {}
        self._members: dict[VgpuIndex, Account] = {}
        """Those with a gang window, in force or lapsed."""
        self._competing: dict[VgpuIndex, Account] = {}
        self._holding: dict[VgpuIndex, Account] = {}
        """Those with a granted lease that is not over."""
        self._penalised: dict[VgpuIndex, Account] = {}
        self._resting: dict[VgpuIndex, Account] = {}
        """Those that want nothing, or have a standby lease still."""
        self._company: dict[VgpuIndex, Account] = {}
        """Those that want or hold, also while they do not compete."""
        self._weight = 0
        """W = Σ r over the competition …"""
        self._moment = 0
        """… and Σ r·v, without held time that is not charged yet. Both are kept up to date. Reason: each event needs
        them several times, and there may be hundreds of vGPUs."""
        self._classes: set[Priority] = set()
        """All that vGPUs have now …"""
        self._highest = Priority.NORMAL
        """… and the highest of them."""
        self._now_ns = 0
        self._clock = 0
        """V as last computed over a competition that was not empty."""

    def check(self) -> None:
        """Raise ``InvariantError`` where the accounts contradict each other."""
        for name, counted in self._counted().items():
            if (noted := getattr(self, name)) != counted:
                raise InvariantError(f"{name} is noted as {noted}, and counted as {counted}")
        for a in self._accounts.values():
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

    def _counted(self) -> dict[str, object]:
        """Values kept beside the accounts, so that no event has to read them all: computed anew, by name."""
        accounts = self._accounts.values()
        classes = {a.share.priority for a in accounts}
        return {
            "_capped": {a.key: a for a in accounts if a.capped},
            "_members": {a.key: a for a in accounts if a.gang_window is not None},
            "_competing": {a.key: a for a in accounts if a.competing},
            "_holding": {a.key: a for a in accounts if a.holds},
            "_penalised": {a.key: a for a in accounts if a.penalised},
            "_resting": {a.key: a for a in accounts if a.standby is not None or not a.wants},
            "_company": {a.key: a for a in accounts if a.wants or a.holds},
            "_weight": sum(a.guarantee for a in accounts if a.competing),
            "_moment": sum(a.guarantee * a.time for a in accounts if a.competing),
            "_classes": classes,
            "_highest": max(classes, default=Priority.NORMAL),
        }

    # --- clock and weight

    @abstractmethod
    def clock(self, now_ns: int) -> int:
        """V: the virtual time that a vGPU without debt or credit has now."""

    @abstractmethod
    def _quantum(self, account: Account) -> int:
        """q: real length of a regular token of ``account`` in the present competition."""

    def _mean(self, now_ns: int, but: Collection[Account] = ()) -> tuple[int, int]:
        """V = Σ r·v̂ / W, and W, over the competition without ``but``. Where that is empty, V keeps its last value."""
        weight, moment = self._weight, self._moment
        for a in self._holding.values():
            if a.competing:
                moment += a.guarantee * (self._time_at(a, now_ns) - a.time)
        for a in but:
            if a.competing:
                weight -= a.guarantee
                moment -= a.guarantee * self._time_at(a, now_ns)
        return (moment // weight if weight else self._clock), weight

    def _time_at(self, account: Account, now_ns: int) -> int:
        """v̂: virtual time with all leases charged up to now."""
        return account.time_at(now_ns)

    def _settle(self, account: Account, hold: ActiveLease, at_ns: int) -> None:
        """Charge the virtual time of a lease up to ``at_ns``, overuse included."""
        before = account.time
        self._charge(account, hold, at_ns)
        hold.settle(at_ns)
        if account.competing:
            self._moment += account.guarantee * (account.time - before)

    def _charge(self, account: Account, hold: ActiveLease, at_ns: int) -> None:
        account.charge(hold.unsettled(at_ns))

    def _lag(self, account: Account, clock: int, now_ns: int) -> int:
        kept_ns = account.kept_lag_ns
        lag_ns = self._lag_after(account, self._time_at(account, now_ns), clock)
        return lag_ns if kept_ns is None else max(kept_ns, min(lag_ns, 0))

    def _lag_after(self, account: Account, time: int, clock: int) -> int:
        return real(clock - time, account.guarantee)

    # --- membership

    def _sort_in(self, account: Account) -> None:
        """Index the account by what only some have, so that events cost the others nothing."""
        for some, one_of_them in ((self._capped, account.capped), (self._members, account.gang_window is not None)):
            if one_of_them:
                some[account.key] = account
            else:
                some.pop(account.key, None)
        self._rank()

    def _rank(self) -> None:
        self._classes = {a.share.priority for a in self._accounts.values()}
        self._highest = max(self._classes, default=Priority.NORMAL)

    def _fill_line(self, account: Account) -> int:
        """L, nanoseconds: a bucket below it throttles."""
        policy = self.policy
        return max(policy.quantum_min_ns, policy.period_ns * account.share.limit_ppm // PPM)

    def _full(self, account: Account) -> int:
        """The most that the bucket may hold after its leases are charged."""
        full = 2 * self._fill_line(account)
        if account.wants:
            full = max(full, self.policy.wait_bucket_ns * account.share.limit_ppm // PPM)
        return full

    def _dry(self, account: Account) -> bool:
        return account.capped and account.bucket < self._fill_line(account) * PPM

    def _refill_due(self, account: Account) -> int:
        """When a throttled vGPU's bucket reaches its fill line."""
        missing = self._fill_line(account) * PPM - account.bucket
        return account.bucket_at_ns + -(-missing // max(1, account.share.limit_ppm))

    def _refill(self, now_ns: int) -> None:
        """Refill the buckets of vGPUs with a limit. The bucket of another is brought up to date at its own events."""
        for a in self._capped.values():
            self._refill_one(a, now_ns)

    def _refill_one(self, account: Account, now_ns: int) -> None:
        account.refill(now_ns, self._full(account))
        if account.throttled and not self._dry(account):
            self._release(account, now_ns)

    def _keep_clock(self, now_ns: int) -> int:
        """Store V, for when no vGPU competes."""
        self._clock = self.clock(now_ns)
        return self._clock

    def _compete(self, account: Account) -> None:
        """Count the account in V and W, with its present virtual time."""
        if not account.competing:
            account.competing = True
            self._competing[account.key] = account
            self._weight += account.guarantee
            self._moment += account.guarantee * account.time

    def _leave(self, account: Account, now_ns: int) -> None:
        if account.competing:
            self._keep_clock(now_ns)
            account.competing = False
            del self._competing[account.key]
            self._weight -= account.guarantee
            self._moment -= account.guarantee * account.time

    def _set_penalised(self, account: Account, penalised: bool) -> None:
        account.penalised = penalised
        if penalised:
            self._penalised[account.key] = account
        else:
            self._penalised.pop(account.key, None)

    def _shift(self, account: Account, time: int) -> None:
        """Move virtual time, and the deadline with it, without a charge."""
        if account.competing:
            self._moment += account.guarantee * (time - account.time)
        account.shift_to(time)

    def _note_wish(self, account: Account) -> None:
        """The vGPU began or ceased to want, or got or lost its standby lease."""
        if account.standby is not None or not account.wants:
            self._resting[account.key] = account
        else:
            self._resting.pop(account.key, None)
        self._note_company(account)

    def _note_holds(self, account: Account) -> None:
        if account.holds:
            self._holding[account.key] = account
        else:
            self._holding.pop(account.key, None)
        self._note_company(account)

    def _note_company(self, account: Account) -> None:
        if account.wants or account.holds:
            self._company[account.key] = account
        else:
            self._company.pop(account.key, None)

    def _place(self, account: Account, now_ns: int) -> None:
        """The vGPU wants again. Its v is at most the idle credit behind V, and never decreases: idling keeps debts."""
        clock = self._keep_clock(now_ns)
        quantum = self._quantum(account)
        credit = max(self._idle_credit(account), account.restored_ns)
        account.restored_ns = 0
        account.time = max(account.time, clock - virtual(credit, account.guarantee))
        account.deadline = account.time + virtual(quantum, account.guarantee)
        self._compete(account)

    def _idle_credit(self, account: Account) -> int:
        return min(self.policy.idle_credit_ns, 2 * self._quantum(account))

    def _throttle(self, account: Account, now_ns: int) -> None:
        """Take the vGPU out of the competition. It keeps its lag against V of the *other* vGPUs. Reason: against a V
        that counts the vGPU itself, every throttling would forgive a part of its debt.

        The others do not owe it what its own limit kept it from using. Reason: beside a vGPU with a small guarantee
        that takes the rest, its lag would grow for ever, and draw V apart from all others. The others' progress pays
        its debt meanwhile. Reason: a vGPU that waited for its bucket first, and then for the others, would have 8 % of
        10.
        """
        self._leave(account, now_ns)
        lag = self._lag(account, self.clock(now_ns), now_ns)
        account.kept_lag_ns = min(lag, self._idle_credit(account))

    def _release(self, account: Account, now_ns: int) -> None:
        """The bucket is refilled. The vGPU enters the competition again, with the credit that it left with, or the rest
        of its debt."""
        self._rejoin(account, now_ns)
        self._enter(account, now_ns)

    def _rejoin(self, account: Account, now_ns: int) -> None:
        clock = self.clock(now_ns)
        account.shift_to(clock - virtual(self._lag(account, clock, now_ns), account.guarantee))
        account.kept_lag_ns = None

    def _penalise(self, account: Account, now_ns: int) -> None:
        self._leave(account, now_ns)
        self._set_penalised(account, True)

    def _lift_penalties(self, now_ns: int) -> None:
        """Let back in vGPUs whose debt the others' progress has paid; if none competes, the least indebted one."""
        penalised = [a for a in self._penalised.values() if not a.holds]
        if not penalised:
            return
        if self._competing:
            clock = self.clock(now_ns)
            penalised = [a for a in penalised if a.time <= clock]
        else:
            penalised = [min(penalised, key=lambda a: (a.time, a.order))]
        for a in penalised:
            self._set_penalised(a, False)
            self._compete(a)

    def _penalty_ends_ns(self, now_ns: int) -> int | None:
        """When the first penalised vGPU comes back, if the competition goes on as it does now."""
        debts = [a.time for a in self._penalised.values() if not a.holds]
        if not debts:
            return None
        return now_ns + max(1, real(min(debts) - self.clock(now_ns), self._weight))

    def _gang_window(self, now_ns: int) -> None:
        """Enqueue members that wait and are called; take out of the competition those that wait and are not."""
        for a in self._members.values():
            if a.gang_window is not None and now_ns >= a.gang_window.lapses_ns:
                a.gang_window = replace(a.gang_window, binding=False, urgent=False)
        for a in self._members.values():
            if a.uncalled and (a.holds or self._admitted(a, now_ns)):  # its GO may have crossed the withdrawal
                self._come_back(a, now_ns)
            elif a.waiting and not self._admitted(a, now_ns):
                self._step_aside(a, now_ns)

    def _step_aside(self, account: Account, now_ns: int) -> None:
        self._leave(account, now_ns)
        account.uncalled = True

    def _come_back(self, account: Account, now_ns: int) -> None:
        account.uncalled = False
        self._place(account, now_ns)
        self._enqueue(account, now_ns)

    def _gang_window_due(self, now_ns: int) -> int | None:
        """When a gang window begins, ends or lapses, or a member of a gang is late."""
        due: list[int] = []
        for a in self._members.values():
            if a.gang_window is not None and (a.wants or a.holds):
                due += [a.gang_window.start_ns, a.gang_window.end_ns]
                due += [a.gang_window.lapses_ns] if a.gang_window.binding or a.gang_window.urgent else []
                late = (self._turn_ends(a, now_ns) if a.uncalled else None, self._overdue_ns(a))
                due += [at for at in late if at is not None]
                due += [h.lease.end_ns + self._late_ns(a) for h in a.holds.values() if h.lease.end_ns is not None]
        return min((at for at in due if at > now_ns), default=None)

    def _called(self, account: Account, at_ns: int) -> bool:
        """Whether its gang will run at ``at_ns``, as far as is known. The last ``fill_min_ns`` before the call count as
        well: they are not worth a lease of another vGPU."""
        gang_window = account.gang_window
        return gang_window is not None and gang_window.start_ns - self.policy.fill_min_ns <= at_ns < gang_window.end_ns

    def _urgent(self, account: Account) -> bool:
        """Whether another member may be waiting for this one, past its own lease. The time that the other one holds
        meanwhile costs all vGPUs more than the short lease that ends the wait. So neither limit nor debt prevents that
        lease; it is charged all the same."""
        if account.gang_window is None or not account.wants or account.undrained:
            return False
        overdue_ns = self._overdue_ns(account)
        return account.gang_window.urgent or (overdue_ns is not None and self._now_ns >= overdue_ns)

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

    def _admitted(self, account: Account, at_ns: int) -> bool:
        """Whether its gang lets the vGPU compete. Where no other vGPU wants, one without a limit takes nothing from
        others, and does not have to do later what it does too early. One with a limit would use its limit up."""
        gang_window = account.gang_window
        if gang_window is None or not gang_window.binding or self._urgent(account) or self._called(account, at_ns):
            return True
        return not account.capped and not any(a is not account for a in self._company.values())

    def outlook(self, vgpu: VgpuIndex) -> GangMemberStatus:
        """The status of ``vgpu`` for the other members of its gang, as of the last event."""
        account = self._accounts[vgpu]
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
        late = oldest.went_ns is not None and self._now_ns >= lease.end_ns + self._late_ns(account)
        return GangMemberStatus(True, lease.start_ns, lease.end_ns, late, ready)

    def _announced(self, account: Account) -> tuple[int, int]:
        """When a throttled vGPU will hold: once its bucket is full, where no vGPU competes with it. Its followers are
        called for that time, since holders on their GPUs need notice. The forecast does not depend on the followers'
        status. Reason: followers depend on the forecast, and the two would chase each other."""
        if account.gang_window is None or not account.throttled or self._competing:
            return 0, 0
        start_ns = self._refill_due(account)
        return start_ns, start_ns + self._fill_line(account)

    def _other_gang_active(self, account: Account) -> bool:
        """Whether a gang with another leader runs now. Two leaders know nothing of each other. Without this status they
        would call for the same time again and again, and one gang would find its GPUs taken every time."""
        return self._turn_ends(account, self._now_ns) is not None

    def _turn_ends(self, account: Account, now_ns: int) -> int | None:
        """When the member of another gang that keeps ``account`` out has held for long enough, if it goes on holding:
        two tokens of ``account`` ahead of it. Reason for a bound: where no other vGPU wants the GPU of that member's
        leader, the leader may hold as long as its limit allows."""
        if account.gang_window is None:
            return None
        end = account.time + virtual(2 * self._quantum(account), account.guarantee)
        left = [
            real(end - self._time_at(a, now_ns), a.guarantee)
            for a in self._members.values()
            if a is not account
            and a.holds
            and a.gang_window is not None
            and a.gang_window.leader not in (account.gang_window.leader, -1)
            and self._called(a, now_ns)
        ]
        return max((now_ns + left_ns for left_ns in left if left_ns > 0), default=None)

    def _overserved(self, account: Account) -> bool:
        """Whether the vGPU has had so much more than its share that it does not run even if it is called."""
        if len(self._competing) == account.competing:
            return False
        now_ns = self._now_ns
        return self._lag(account, self.clock(now_ns), now_ns) < -self._quantum(account)

    def _enter(self, account: Account, now_ns: int) -> None:
        """Enter the competition, unless the vGPU's debt would distort the others' places there."""
        if self._deep_in_debt(account, now_ns):
            self._penalise(account, now_ns)
        else:
            self._compete(account)

    @abstractmethod
    def _deep_in_debt(self, account: Account, now_ns: int) -> bool:
        """Whether the vGPU has to wait outside the competition until the others have caught up."""

    def _stop_wanting(self, account: Account, now_ns: int) -> None:
        account.wants = account.uncalled = False
        self._note_wish(account)
        account.waiting_since_ns = None
        if account.throttled:
            self._rejoin(account, now_ns)
        self._set_penalised(account, account.penalised and bool(account.holds))
        if not account.holds:
            self._leave(account, now_ns)

    def _enqueue(self, account: Account, now_ns: int) -> None:
        """The vGPU wants a token and holds nothing: make it throttled, penalised, or waiting."""
        if account.holds or account.throttled:
            return
        self._set_penalised(account, False)
        if self._dry(account):
            self._throttle(account, now_ns)
        else:
            self._enter(account, now_ns)

    def _grid(self, account: Account, time: int) -> int:
        """The deadline of ``account`` at virtual ``time``: advanced by whole quanta until at least half a shortest
        token fits before it. Deadlines that stay on the grid compensate a token that ended a little early or late.
        """
        quantum = virtual(self._quantum(account), account.guarantee)
        missing = time + virtual(self._quantum_min(account) // 2, account.guarantee) - account.deadline
        return account.deadline + (-(-missing // quantum) * quantum if missing > 0 else 0)

    def _quantum_min(self, account: Account) -> int:
        shortest, least = self.policy.quantum_min_ns, 10 * account.handover_ns
        return least if least > shortest else shortest
