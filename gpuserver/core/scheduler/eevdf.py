"""The next holder in temporal mode, and its time: earliest eligible virtual deadline first, deadlines on a grid.

Each vGPU i has a guarantee r_i, a virtual time v_i that advances by held time / r_i, and a deadline d_i. Over the
competition (see ``run_queue.py``), with all leases charged up to now,

    W = Σ r_i        V = Σ r_i·v_i / W        lag_i = r_i·(V − v_i)        q_i = clamp(P·r_i/W, q_min, q_max)

    a token is d_i − v_i long (as real time): it ends where v_i meets d_i; then d_i moves by q_i/r_i
    eligible: lag_i ≥ −q_i/4      order: class, then deadline, equal within 1 ms, then longest unserved, then arrival

Called members of a gang (``gangs.py``) precede all that, and leases of others end where a gang is called.
``temporal.py`` decides when to choose, and what to publish for the choice.

Source: Stoica, Abdel-Wahab: Earliest Eligible Virtual Deadline First (1995). Three additions stop a token that ended
50 µs short from winning two in a row: grid deadlines, the slack of a quarter token, and the tie-break by longest
unserved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from math import inf

from gpuserver.core.scheduler.account import VIRTUAL_PER_REAL, Account, ActiveLease, Decision, real, virtual
from gpuserver.core.scheduler.base import SchedulerBase
from gpuserver.core.scheduler.leases import VgpuIndex
from gpuserver.core.scheduler.policy import Policy
from vgpu.share import PPM, Priority

Rank = tuple[int, int, int]
"""−1 for an account that overrides its class, minus the class, minus when its gang was called (0: it is not). The
least rank runs first."""


class Eevdf(SchedulerBase):
    """Virtual time, the period, the length of tokens, and the choice of the next holder. It publishes nothing."""

    def __init__(self, policy: Policy, *, first_epoch: int) -> None:
        super().__init__(policy, first_epoch=first_epoch)
        self._period_ns = policy.period_ns
        self._period_since_ns: int | None = None

    def clock(self, now_ns: int) -> int:
        return self._mean(now_ns)[0]

    @property
    def period_ns(self) -> int:
        return self._period_ns

    def adopt(self, policy: Policy) -> None:
        super().adopt(policy)
        self._period_ns = policy.period_ns

    def _deep_in_debt(self, account: Account, now_ns: int) -> bool:
        mean, weight = self._mean(now_ns, but=(account,))
        if not weight:
            return False
        ahead = account.time_at(now_ns) - mean
        # In real time: what the vGPU used beyond its share, or what the others need to catch up, whichever is less.
        # Others of a small guarantee catch up soon, and one of them with idle credit is far behind in virtual time.
        return real(ahead, min(account.guarantee, weight)) > max(self.policy.grace_ns, 2 * self._quantum(account))

    @property
    def _least_quantum(self) -> int:
        """The lower bound of every q."""
        return min(self.policy.quantum_min_ns, self.policy.quantum_max_ns)

    def _quantum(self, account: Account) -> int:
        guarantee, shortest, longest = account.guarantee, self._quantum_min(account), self.policy.quantum_max_ns
        quantum = self._period_ns * guarantee // (self._weight if account.competing else self._weight + guarantee)
        if quantum < shortest:
            quantum = shortest
        return quantum if quantum < longest else longest

    def _adapt_period(self, now_ns: int) -> None:
        """Long enough for hand-overs to cost at most ``handover_loss_ppm``; short while latency matters to a vGPU."""
        policy = self.policy
        if self._period_since_ns is not None and now_ns - self._period_since_ns < policy.period_hold_ns:
            return
        shared = {*self.shared()}
        company = [a for a in self._company.values() if a.key not in shared]
        if len(company) < 2:
            return
        period = policy.period_ns
        sensitive = max([a.returns_ppm for a in company]) > policy.bursty_ppm
        if self._highest is Priority.HIGH:
            sensitive = sensitive or any(a.share.priority is Priority.HIGH for a in company)
        if all(a.kind.brief for a in company):
            period = min(period, policy.period_short_ns)
        elif not sensitive:
            cost = sum([a.handover_ns for a in company])
            period = min(max(cost * PPM // policy.handover_loss_ppm, period), max(period, policy.period_max_ns))
        if abs(period - self._period_ns) * PPM > policy.period_step_ppm * self._period_ns:
            self._period_ns = period
            self._period_since_ns = now_ns

    # --- the choice

    def _pick(self, at_ns: int, staying: ActiveLease | None, following: ActiveLease | None = None) -> Decision | None:
        """The vGPU that should hold from ``at_ns`` on, with all leases charged up to then. ``staying``: the holder, if
        it may go on. ``following``: the lease published as next. Its vGPU may be chosen like those that wait, since the
        decision is made anew."""
        free = {id(h) for h in (staying, following) if h is not None}
        urgent = self._most_urgent(free)
        if urgent is not None:
            return Decision(urgent, self.policy.gang_urgent_ns, alone=False, urgent=True)
        dry = {a.key: a for a in self._holding.values() if self._dry_at(a, at_ns)} if self._capped else {}
        shared = {*self.shared()}  # a shared lease keeps no vGPU from its turn
        held = [a for a in self._holding.values() if a.competing and a.key not in shared]
        done = [a.key for a in held if not a.wants or a.key in dry]
        busy = [a.key for a in held if not all(id(h) in free for h in a.holds.values())]
        candidates = [a for a in self._competing.values() if a.key not in shared]
        candidates += (a for a in self._members.values() if a.uncalled)
        alone = len(candidates) - len(done) == 1
        if done or busy:
            candidates = [a for a in candidates if a.key not in done and a.key not in busy]
        if self._members:
            candidates = [a for a in candidates if a.gang_window is None or self._admitted(a, at_ns)]
        if not candidates:
            return None
        clock, weight = self._mean(at_ns, but=dry.values())
        called = {a.key for a in self._members.values() if self._called(a, at_ns)}
        ranks = self._ranked(candidates, called)
        tie = virtual(self.policy.tie_ns, max(weight, 1))
        for rank in sorted(ranks):
            tied = self._earliest(ranks[rank], at_ns, tie, lambda a: self._entitled(a, at_ns, clock, called))
            if tied:
                break
        else:  # all are eligible, and a call gives no precedence
            rank = min(ranks)
            eligible = [a for other, accounts in ranks.items() if other[:2] == rank[:2] for a in accounts]
            tied = self._earliest(eligible, at_ns, tie, lambda a: True)
        best, deadline = min(tied, key=lambda one: (at_ns if one[0].undrained else one[0].served_ns, one[0].order))
        length = self._length(best, deadline, at_ns)
        return Decision(
            best,
            self._gang_length(best, length, at_ns),
            alone and not self._soon_in_company(best),
            overrides_class=rank[0] < 0,
            leads=self._leads(best) and self._overrides_class(best),
        )

    def _soon_in_company(self, account: Account) -> bool:
        """Whether ``account`` has a limit, and another vGPU that waits for its bucket may come back at any moment.
        Between two leases of that one, the meter of an open-ended lease would be less exact than held time."""
        return account.capped and any(a.throttled for a in self._capped.values() if a is not account)

    def _ranked(self, candidates: list[Account], called: Set[VgpuIndex]) -> dict[Rank, list[Account]]:
        """``candidates`` by rank: an entitled vGPU of the first rank precedes all others."""
        if not called and len(self._classes) == 1:
            return {(0, 0, 0): candidates}
        ranks: dict[Rank, list[Account]] = {}
        for a in candidates:
            overrides_class, call = (-self._overrides_class(a), -1 - self._called_ns(a)) if a.key in called else (0, 0)
            ranks.setdefault((overrides_class, -a.share.priority, call), []).append(a)
        return ranks

    def _earliest(
        self, accounts: Sequence[Account], at_ns: int, tie: int, eligible: Callable[[Account], bool]
    ) -> list[tuple[Account, int]]:
        """The eligible accounts with the earliest deadlines, equal within ``tie``, and these deadlines. ``eligible`` is
        called for few: the others' deadlines are too far away."""
        soon = self._least_quantum * 3 // 2 * VIRTUAL_PER_REAL
        found: list[tuple[Account, int]] = []
        latest = inf
        for a in accounts:
            deadline = a.deadline
            if a.holds or (deadline - a.time) * a.guarantee > soon:
                deadline = self._deadline_at(a, at_ns)
            if deadline <= latest and eligible(a):
                found.append((a, deadline))
                latest = min(latest, deadline + tie)
        return [one for one in found if one[1] <= latest]

    def _entitled(self, account: Account, at_ns: int, clock: int, called: Set[VgpuIndex]) -> bool:
        """Whether its lag at ``at_ns`` is at least −q/4, or −q where its gang is called: (v̂ − V)·r ≤ q/4."""
        ahead = (account.time_at(at_ns) - clock) * account.guarantee
        quantum = self._quantum(account)
        return ahead <= (quantum if account.key in called else quantum // 4) * VIRTUAL_PER_REAL

    def _most_urgent(self, free: set[int]) -> Account | None:
        """The vGPU that runs at once because another member of its gang waits for it. It precedes all classes. Reason:
        the waiting member meanwhile holds another GPU, for a multiple of the short lease that ends the wait."""
        urgent = [a for a in self._members.values() if self._urgent(a) and all(id(h) in free for h in a.holds.values())]
        return min(urgent, key=lambda a: (-a.share.priority, a.served_ns, a.order), default=None)

    # --- called members of gangs

    def _next_call(self, after_ns: int, but: Account) -> int | None:
        """When the next gang is called that precedes ``but``, at ``after_ns`` or later. Of two that are called at the
        same time, the one that was called last runs: the other has held for long enough (``_turn_ends``)."""
        starts = [
            max(a.gang_window.start_ns, after_ns)
            for a in self._members.values()
            if a.gang_window is not None
            and a is not but
            and (a.waiting or a.uncalled)
            and (a.share.priority >= but.share.priority or self._overrides_class(a))
            and (a.gang_window.start_ns >= after_ns or self._called(a, after_ns))
            and not self._overserved(a)
            and not (
                self._called(but, max(a.gang_window.start_ns, after_ns)) and self._called_ns(a) <= self._called_ns(but)
            )
        ]
        return min(starts, default=None)

    def _overrides_class(self, account: Account) -> bool:
        """Whether ``account``, once called, precedes all classes: it is owed half of the idle credit or more. It cannot
        wait until the higher classes are not entitled, as others do: its gang runs only when it is called."""
        now_ns = self._now_ns
        return self._lag(account, self.clock(now_ns), now_ns) >= self._idle_credit(account) // 2

    def _leads(self, account: Account) -> bool:
        """Whether the other members of its gang may follow its leases."""
        return account.gang_window is not None and account.gang_window.leader < 0

    def _called_ns(self, account: Account) -> int:
        assert account.gang_window is not None
        return account.gang_window.start_ns

    # --- how long

    def _gang_length(self, account: Account, length_ns: int, at_ns: int) -> int:
        """Leases end where a gang is called; a called member's own lease ends where its gang window does."""
        gang_window = account.gang_window
        if gang_window is not None and self._called(account, at_ns):
            return min(gang_window.end_ns - at_ns, self._within_bucket(account, self.policy.quantum_max_ns, at_ns))
        call = self._next_call(at_ns, account)
        return length_ns if call is None else max(min(length_ns, call - at_ns), self.policy.fill_min_ns)

    def _dry_at(self, account: Account, at_ns: int) -> bool:
        """Whether a holder's bucket will throttle it when its lease has been charged up to ``at_ns``."""
        if not account.capped or not account.undrained:
            return False
        return account.bucket_at(at_ns) < self._fill_line(account) * PPM

    def _deadline_at(self, account: Account, at_ns: int) -> int:
        """The deadline at ``at_ns``, no further away than one and a half tokens (more vGPUs may compete now)."""
        time, deadline, guarantee = account.time, account.deadline, account.guarantee
        if account.holds:
            time = account.time_at(at_ns)
            if account.undrained:
                deadline = self._grid(account, time)
        return min(deadline, time + virtual(self._quantum(account) * 3 // 2, guarantee))

    def _length(self, account: Account, deadline: int, at_ns: int) -> int:
        length = real(deadline - account.time_at(at_ns), account.guarantee)
        return self._within_bucket(account, max(length, self._quantum_min(account) // 2), at_ns)

    def _within_bucket(self, account: Account, length_ns: int, at_ns: int) -> int:
        if not account.capped:
            return length_ns
        return min(length_ns, max(account.bucket_at(at_ns) // PPM, self.policy.quantum_min_ns // 2))

    def _length_of(self, account: Account) -> int:
        return self._length(account, self._deadline_at(account, self._now_ns), self._now_ns)
