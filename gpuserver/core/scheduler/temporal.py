"""Temporal mode: light vGPUs side by side (``sharing.py``), and all others in turns, one holder at a time.
``eevdf.py`` chooses the next holder, and for how long.

While vGPUs take turns, at most two leases matter. ``current`` is held or will be at once. ``next`` is published ahead
while current runs, so that the dispatcher hands over without a request to the scheduler. The scheduler may revise next
until just before its start; the forecast behind it charges the holder to its end.

    the GPU is free       grant the best; open-ended where it is alone. With a limit it is allowed GPU time in parts
    holder open-ended     gets an end as soon as another vGPU waits
    holder finite         the best at its end: the holder itself → a later end; another → next
    higher class waits    the holder's end moves to the nearest time possible
    gang is called        (``gangs.py``) leases of others end where the call begins. The called member precedes its
                          class until the call ends, unless it is more than a token ahead of its share
    holder does not drain next gets GO after a bounded wait; the holder is charged on, and is penalised meanwhile
    a vGPU may share      it holds an open-ended lease at once, beside current and next; these are of the others
    it may no longer      its shared lease gets an end. It is current if no other is, and turns go on from there
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from gpuserver.core.scheduler.account import Account, ActiveLease, Decision, virtual
from gpuserver.core.scheduler.eevdf import Eevdf
from gpuserver.core.scheduler.leases import FAR_NS, Allow, Lease, Observed, VgpuIndex
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, Policy
from gpuserver.core.scheduler.run_queue import InvariantError
from gpuserver.core.scheduler.sharing import Guard, Relief, sharers
from vgpu.share import PPM


class TemporalScheduler(Eevdf):
    """Weighted fair turns on a whole GPU. ``handle``, ``next_deadline_ns``, ``check``: see ``SchedulerBase``."""

    def __init__(self, policy: Policy = DEFAULT_POLICY, *, first_epoch: int = 1) -> None:
        super().__init__(policy, first_epoch=first_epoch)
        self._current: ActiveLease | None = None
        self._next: ActiveLease | None = None
        self._shared: dict[VgpuIndex, ActiveLease] = {}
        self._relief = Relief()
        self._guard = Guard()

    def sharing(self, company: Collection[VgpuIndex]) -> set[VgpuIndex]:
        return {a.key for a in sharers([self._accounts[key] for key in company if key in self._accounts])}

    def next_deadline_ns(self) -> int | None:
        now_ns = self._now_ns
        due = [self._refill_due(a) for a in self._capped.values() if a.throttled]
        if self._penalised or self._members:
            due += [at for at in (self._penalty_ends_ns(now_ns), self._gang_window_due(now_ns)) if at is not None]
        due += [self._allowance_due(account) for account, _ in self._open_ended() if self._allowed_ppm(account) < PPM]
        if self.comparable():
            due.append((now_ns // self.policy.measure_ns + 1) * self.policy.measure_ns)
        current = self._current
        if current is not None and current.went_ns is not None and self._next is None:
            end = current.lease.end_ns
            if end is not None:
                lookaheads = self._lookaheads(self._accounts[current.lease.vgpu])
                due += [end - before_ns for before_ns in lookaheads if end - before_ns > now_ns]
        return min(due, default=None)

    def check(self) -> None:
        super().check()
        current, following = self._current, self._next
        self._check_shared()
        if following is not None and current is None:
            raise InvariantError("a next lease is published and no vGPU holds")
        for holder in self._holding.values():
            if any(hold.shared for hold in holder.holds.values()) and holder.key not in self._shared:
                raise InvariantError(f"vGPU {holder.key} holds a shared lease, and takes turns")
        for hold in (current, following):
            if hold is None:
                continue
            account = self._accounts.get(hold.lease.vgpu)
            if account is None or account.holds.get(hold.lease.epoch) is not hold:
                raise InvariantError(f"no account knows lease {hold.lease}")
            if hold.lease.end_ns is None:
                if account.always_ends or (account.capped and account.allowance_at_ns is None):
                    raise InvariantError(f"open-ended lease without an allowance for a vGPU with a limit: {hold.lease}")
                if any(a.waiting for a in self._accounts.values()):
                    raise InvariantError(f"a vGPU waits beside the open-ended {hold.lease}")
        if current is not None and following is not None:
            if following.went_ns is not None or current.went_ns is None:
                raise InvariantError("a next lease is published for a lease that has not begun, or has itself begun")
            if current.lease.end_ns is None or following.lease.start_ns < current.lease.end_ns:
                raise InvariantError(f"{following.lease} starts before {current.lease} ends")
        if current is None and any(a.waiting for a in self._accounts.values()):
            raise InvariantError("a vGPU waits and none holds")

    def _check_shared(self) -> None:
        sharing = {a.key for a in sharers(self._company.values())}
        if not sharing.issuperset(self._shared):
            raise InvariantError(f"vGPUs hold shared leases that may not: {self._shared.keys() - sharing}")
        for hold in (self._current, self._next):
            if hold is not None and hold.lease.vgpu in sharing:
                raise InvariantError(f"a vGPU takes turns that may share: {hold}")
        for key, hold in self._shared.items():
            account = self._accounts[key]
            if not hold.shared or hold.lease.end_ns is not None or account.holds.get(hold.lease.epoch) is not hold:
                raise InvariantError(f"no shared lease, or one that no account knows: {hold}")
            if self._allowed_ppm(account) < PPM and account.allowance_at_ns is None:
                raise InvariantError(f"a shared lease without an allowance for a vGPU with a limit: {hold.lease}")
        if any(self._accounts[key].waiting for key in sharing):
            raise InvariantError("a vGPU waits that may share")

    # --- how long others wait, and when to decide

    def _patience(self, account: Account) -> int:
        """How long others wait for the vGPU to drain: a token's length, more for known long kernels, at most the grace.
        A member of a gang that does not drain waits for another member, which this wait may keep from running."""
        if account.gang_window is not None:
            return self.policy.quantum_min_ns
        patience = max(self._quantum(account), 2 * account.longest_kernel_ns)
        return min(self.policy.grace_ns, patience + len(self._shared) * self.policy.slice_ns)

    def _lookahead(self, holder: Account) -> int:
        """How long before its end the scheduler decides whether a holder goes on. A hook submits nothing more under a
        lease once less than half of a kernel fits (``cython_ext/logic/gate/gate.pxd``): to move the end after that has
        no effect. A gang's kernels are as long as it waits for its members."""
        usual = self.policy.lookahead_ns
        if holder.gang_window is not None:
            return usual
        return max(usual, holder.longest_kernel_ns // 2 + self.policy.guard_ns)

    def _lookaheads(self, holder: Account) -> list[int]:
        """How long before its end the scheduler chooses a holder's successor. The holder on a follower's GPU needs a
        window's time to drain. If a leader's lease were published as late as others, a short one would be over by
        then."""
        lookahead = self._lookahead(holder)
        if not any(a.waiting and self._leads(a) for a in self._members.values()):
            return [lookahead]
        return [lookahead, lookahead + self.policy.decision_ns + self.policy.window_ns]

    # --- limits under open-ended leases

    def _open_ended(self) -> list[tuple[Account, ActiveLease]]:
        """The accounts that hold open-ended leases, each with its lease."""
        found = [(self._accounts[key], hold) for key, hold in self._shared.items()]
        current = self._current
        if current is not None and current.lease.end_ns is None:
            found.append((self._accounts[current.lease.vgpu], current))
        return found

    def _curbed_ppm(self, account: Account) -> int:
        """The part of the time that ``account`` may use because others are short."""
        if account.key not in self._shared:
            return PPM
        relieved = account.guarantee if account.key == self._relief.curbed else PPM
        return min(relieved, self._guard.curbed.get(account.key, PPM))

    def _allowed_ppm(self, account: Account) -> int:
        """The part of the time that ``account`` may use by its limit, or because others are short."""
        return min(self._curbed_ppm(account), account.share.limit_ppm)

    def metered(self) -> list[VgpuIndex]:
        return [account.key for account, _ in self._open_ended() if self._shared or account.capped]

    def shared(self) -> list[VgpuIndex]:
        return list(self._shared)

    def comparable(self) -> list[VgpuIndex]:
        company = self._company.values()
        if len(company) < 2 or not any(a.share.shareable for a in company):
            return []
        return [a.key for a in company]

    def _allowance_due(self, account: Account) -> int:
        return (account.allowance_at_ns or 0) + self.policy.allowance_ns

    def _allow(self, now_ns: int) -> None:
        for account, hold in self._open_ended():
            limited = self._allowed_ppm(account) < PPM
            if now_ns >= self._allowance_due(account) if limited else account.allowance_at_ns is not None:
                self._permit(account, hold)

    def _permit(self, account: Account, hold: ActiveLease) -> None:
        """Allow what the vGPU's bucket has, and gets until the next allowance. From here on the hooks' meters count.
        What a curbed sharer's last kernel used beyond its allowance counts against the next one."""
        now_ns = self._now_ns
        hold.metered = True
        if self._allowed_ppm(account) < PPM:
            ahead_ns, used_ns, curbed_ppm = self.policy.allowance_ahead_ns, hold.busy(now_ns), self._curbed_ppm(account)
            allowance_ns = used_ns + self._allowed_ppm(account) * ahead_ns // PPM
            if hold.curbed_ns is not None and account.allowance_at_ns is not None:
                earned_ns = curbed_ppm * (now_ns - account.allowance_at_ns) // PPM
                allowance_ns = min(allowance_ns, hold.curbed_ns + earned_ns)
            hold.curbed_ns = allowance_ns if curbed_ppm < PPM else None
            if account.capped:
                filled = account.bucket_at(now_ns) + account.share.limit_ppm * ahead_ns
                limit_ns = used_ns + filled // PPM
                allowance_ns = limit_ns if curbed_ppm == PPM else min(allowance_ns, limit_ns)
            account.allowance_at_ns = now_ns
            self._commands.append(Allow(account.key, hold.lease.epoch, max(0, allowance_ns)))
        elif account.allowance_at_ns is not None:
            account.allowance_at_ns = hold.curbed_ns = None
            self._commands.append(Allow(account.key, hold.lease.epoch, None))

    # --- events

    def _went(self, hold: ActiveLease, planned_end_ns: int | None, now_ns: int) -> None:
        account = self._accounts[hold.lease.vgpu]
        account.urgent_turns = account.urgent_turns + 1 if hold.urgent else 0
        if hold is self._next:
            self._current, self._next = hold, None

    def _began(self, hold: ActiveLease, now_ns: int) -> None:
        for published in (self._next, self._current):
            if published is not None and published.went_ns is None:
                self._take_back(published)
        self._current = hold

    def _closed(self, hold: ActiveLease) -> None:
        if self._shared.get(hold.lease.vgpu) is hold:
            del self._shared[hold.lease.vgpu]
        self._forget_turn(hold)

    def _matters_now(self, event: Observed) -> bool:
        """A reading counts in the next decision. Only a bucket makes a decision necessary now."""
        return self._accounts[event.vgpu].capped

    # --- decisions

    def _decide(self, now_ns: int) -> None:
        self._adapt_period(now_ns)
        self._drop_unwanted()
        sharing = sharers(self._company.values())
        self._end_sharing({a.key for a in sharing}, now_ns)
        if sharing:
            self._share(sharing, now_ns)
        if self._current is None and self._next is not None:
            self._current, self._next = self._next, None
            if self._current.lease.start_ns > now_ns:
                # Its predecessor drained early, so its GO is on the way.
                self._move(self._current, now_ns)
        if self._current is None:
            choice = self._pick(now_ns, None)
            if choice is not None:
                self._current = self._grant(choice, now_ns)
            return
        self._bound(self._current, now_ns)
        self._keep_step(self._current, now_ns)
        if self._current.went_ns is not None and self._current.lease.end_ns is not None:
            self._follow(self._current, now_ns)

    def _drop_unwanted(self) -> None:
        """Take back leases that were published for a vGPU that wants none any more."""
        for hold in (self._current, self._next, *self._shared.values()):
            if hold is not None and hold.went_ns is None and not self._accounts[hold.lease.vgpu].wants:
                self._take_back(hold)

    # --- shared leases

    def _share(self, sharing: list[Account], now_ns: int) -> None:
        """Each of them holds an open-ended lease. The other vGPUs take turns beside them."""
        begins, self._shared_ns = not self._shared, now_ns
        for hold in (self._next, self._current):
            if hold is not None and self._accounts[hold.lease.vgpu] in sharing:
                self._share_turn(hold, now_ns)
        for account in sharing:
            if account.waiting:
                window_ns = self.policy.shared_window_ns
                lease = Lease(account.key, 0, now_ns, None, go_by_ns=now_ns, window_ns=window_ns)
                self._let_share(account, self._publish(account, lease))
        holders = [self._accounts[key] for key in self._shared]
        if begins:
            self._relief.reset(holders, now_ns)
        else:
            self._relief.update(holders, now_ns)
        self._guard.update(holders, [a for a in self._company.values() if a not in sharing], now_ns)
        self._settle_shared(now_ns)

    def _share_turn(self, hold: ActiveLease, now_ns: int) -> None:
        """The current or next lease becomes a shared one, unless it is about to end. One that has not begun waits for
        no other lease."""
        account, end = self._accounts[hold.lease.vgpu], hold.lease.end_ns
        self._forget_turn(hold)
        changes: dict[str, Any] = {"end_ns": None, "window_ns": self.policy.shared_window_ns}
        if hold.went_ns is None:
            changes |= {"start_ns": now_ns, "go_by_ns": now_ns, "after": (), "early": True}
        elif end is not None and end <= now_ns + self.policy.decision_ns:
            return
        self._settle(account, hold, now_ns)
        self._let_share(account, hold)
        self._revise(hold, now_ns, **changes)
        following = self._next
        if following is not None:  # the next lease waited for this one to drain
            after = tuple(one for one in following.lease.after if one != (account.key, hold.lease.epoch))
            self._revise(following, now_ns, after=after)

    def _forget_turn(self, hold: ActiveLease) -> None:
        if hold is self._current:
            self._current = None
        elif hold is self._next:
            self._next = None

    def _let_share(self, account: Account, hold: ActiveLease) -> None:
        hold.share()
        self._shared[account.key] = hold

    def _settle_shared(self, now_ns: int) -> None:
        """Charge what the sharers have used. While none is short, each lag stays within the idle credit: what one vGPU
        does not use, the others may have. Beside vGPUs in turns a sharer saves up nothing: its virtual time keeps up
        with the clock."""
        for key, hold in self._shared.items():
            self._settle(self._accounts[key], hold, now_ns)
        if self._relief.curbed is not None:
            return
        clock = self._keep_clock(now_ns)
        beside_turns = len(self._shared) < len(self._company)
        for key in self._shared:
            account = self._accounts[key]
            apart = virtual(self._idle_credit(account), account.guarantee)
            earliest = clock if beside_turns else clock - apart
            self._shift(account, min(max(account.time, earliest), clock + apart))

    def _end_sharing(self, but: Collection[VgpuIndex], now_ns: int) -> None:
        """Those that share, except ``but``, take turns from now on. A vGPU that is alone keeps its lease as it is."""
        alone = len(self._company) == 1
        for key in [key for key in self._shared if key not in but]:
            hold, account = self._shared.pop(key), self._accounts[key]
            self._settle(account, hold, now_ns)
            hold.shared = False
            if alone:
                self._current = hold
            elif hold.went_ns is None:
                self._take_back(hold)
            else:
                end = now_ns + self.policy.decision_ns + self.policy.shared_window_ns
                self._revise(hold, now_ns, end_ns=end)
                self._current = self._current or hold
        if not self._shared:
            self._relief.curbed = None
            self._guard.curbed = {}

    def _take_back(self, hold: ActiveLease) -> None:
        account = self._accounts[hold.lease.vgpu]
        self._withdraw(account, hold)
        self._closed(hold)
        if not account.wants:
            self._leave(account, self._now_ns)
        elif not account.holds and not self._admitted(account, self._now_ns):
            self._step_aside(account, self._now_ns)

    def _matters(self, withdrawn: ActiveLease, account: Account) -> bool:
        return True

    def _may_stand_by(self, account: Account) -> bool:
        if account.holds or account.penalised or account.uncalled or account.gang_window is not None:
            return False
        return self.policy.standby and not (account.capped and (account.throttled or self._dry(account)))

    def _bound(self, current: ActiveLease, now_ns: int) -> None:
        """Give the current lease an end while others wait, the nearest one possible for a higher class."""
        holder = self._accounts[current.lease.vgpu]
        nearest = now_ns + self.policy.decision_ns + self._window(holder)
        end = current.lease.end_ns
        if end is None and holder.capped:  # from now on no allowance limits it
            nearest = min(nearest, now_ns + max(self.policy.decision_ns, holder.bucket_at(now_ns) // PPM))
        if end is None and (holder.always_ends or any(self._in_line())):
            end = max(nearest, current.lease.start_ns + self.policy.minimum_stay_handovers * holder.handover_ns)
        outranked = (
            holder.share.priority < self._highest
            and not (current.overrides_class and self._called(holder, now_ns))
            and any(self._outranks(a, holder, now_ns) and not self._had_its_turn(a, current) for a in self._in_line())
        )
        if outranked or not self._admitted(holder, now_ns):
            end = nearest if end is None else min(end, nearest)
        if any(self._urgent(a) for a in self._members.values() if a is not holder):
            at_once = now_ns + self.policy.decision_ns
            end = at_once if end is None else min(end, at_once)
        call = self._next_call(now_ns, holder)
        if call is not None:
            end = max(nearest, call) if end is None else min(end, max(nearest, call))
        if end is not None and end != current.lease.end_ns:
            self._revise(current, now_ns, end_ns=end, window_ns=self._window(holder))

    def _in_line(self) -> Iterator[Account]:
        """The accounts that wait, or have the next lease."""
        ahead = self._next.lease.vgpu if self._next is not None else None
        return (a for a in self._accounts.values() if a.waiting or a.uncalled or a.key == ahead)

    def _keep_step(self, current: ActiveLease, now_ns: int) -> None:
        """A follower's lease ends when its leader's does, to the nanosecond. Reason: one might otherwise submit a
        kernel that waits for the other's, and the other not. Both GPUs would then be blocked for the next vGPUs."""
        holder, end = self._accounts[current.lease.vgpu], current.lease.end_ns
        gang_window, nearest = holder.gang_window, now_ns + self.policy.decision_ns
        if gang_window is None or end is None or current.went_ns is None or end < nearest:
            return
        if not gang_window.start_ns <= now_ns < gang_window.end_ns or any(
            self._urgent(a) for a in self._members.values()
        ):
            return
        if self._next is not None and now_ns >= self._next.lease.start_ns - self.policy.guard_ns:
            return
        longest = self._within_bucket(holder, self.policy.quantum_max_ns, current.went_ns)
        step = max(nearest, min(gang_window.end_ns, current.went_ns + longest))
        if self._next_call(now_ns, holder) is not None:
            step = min(step, end)
        self._revise(current, now_ns, end_ns=step)

    def _outranks(self, account: Account, holder: Account, now_ns: int) -> bool:
        if account.share.priority <= holder.share.priority:
            return False
        return self._lag(account, self.clock(now_ns), now_ns) >= -self._quantum(account) // 4

    def _had_its_turn(self, account: Account, current: ActiveLease) -> bool:
        """Whether ``account`` has wanted ever since it held last, and the scheduler chose a leader over it. Entitled
        again a moment later, it would end that lease, and those on all the other GPUs. A vGPU that was idle before does
        not wait."""
        return current.leads and (account.waiting_since_ns or 0) <= account.served_ns

    def _follow(self, current: ActiveLease, now_ns: int) -> None:
        """Decide what happens at the end of a finite lease that is running."""
        end = current.lease.end_ns
        assert end is not None
        following = self._next
        at_ns = max(end, now_ns)
        if following is not None and now_ns >= following.lease.start_ns - self.policy.guard_ns:
            if following.lease.end_ns is None:
                choice = self._pick(at_ns, current if now_ns < end else None, following)
                if choice is None or not choice.open_ended:
                    length = self._length_of(self._accounts[following.lease.vgpu])
                    self._revise(following, now_ns, end_ns=following.lease.start_ns + length)
            return
        choice = self._pick(at_ns, current if now_ns < end else None, following)
        holder = self._accounts[current.lease.vgpu]
        if following is not None and (choice is None or choice.account.key != following.lease.vgpu):
            self._take_back(following)
            following = None
        if choice is None:
            return
        if choice.account is holder:
            if choice.open_ended:
                self._revise(current, now_ns, end_ns=None)
            elif now_ns >= end - self._lookahead(holder):
                self._revise(current, now_ns, end_ns=end + choice.length_ns)
        elif following is None:
            self._next = self._grant(choice, at_ns)
        else:
            patience = min(self._patience(holder), self.policy.gang_late_ns if choice.urgent else FAR_NS)
            following.overrides_class, following.leads, following.urgent = (
                choice.overrides_class,
                choice.leads,
                choice.urgent,
            )
            self._revise(
                following,
                now_ns,
                start_ns=at_ns,
                end_ns=None if choice.open_ended else at_ns + choice.length_ns,
                go_by_ns=at_ns + patience,
            )

    def _grant(self, choice: Decision, start_ns: int) -> ActiveLease:
        """Publish a lease that waits for all work that may be on the GPU, except that of holders that were bypassed."""
        account, now_ns = choice.account, self._now_ns
        if account.uncalled:  # called when the lease begins
            account.uncalled = False
            self._place(account, now_ns)
        elif account.throttled:  # urgent; its debt stays outside of the competition
            self._rejoin(account, now_ns)
            self._set_penalised(account, True)
        before = [
            (a.key, epoch)
            for a in sorted(self._holding.values(), key=lambda a: a.order)
            for epoch, hold in a.holds.items()
            if not hold.shared and (not a.penalised or hold is self._current)
        ]
        # A standby lease that began a moment ago is not in its account yet; until it is, this lease waits.
        patience = max((self._patience(self._accounts[key]) for key, _ in before), default=self.policy.quantum_min_ns)
        if self._urgent(account):  # the holder may be waiting for its own gang in turn
            patience = min(patience, self.policy.gang_late_ns)
        lease = Lease(
            vgpu=account.key,
            epoch=self._next_epoch if account.standby is None else account.standby.lease.epoch,
            start_ns=start_ns,
            end_ns=None if choice.open_ended else start_ns + choice.length_ns,
            after=tuple(before),
            go_by_ns=start_ns + patience,
            window_ns=self._window(account),
        )
        hold = self._publish(account, lease)
        hold.overrides_class, hold.leads, hold.urgent = choice.overrides_class, choice.leads, choice.urgent
        return hold
