"""The next holder in temporal mode, and its time: earliest eligible virtual deadline first, deadlines on a grid.

Each vGPU i has a guarantee r_i, a virtual time v_i that advances by held time / r_i, and a deadline d_i. Over the
competition (see ``run_queue.py``), with all leases charged up to now,

    W = Σ r_i        V = Σ r_i·v_i / W        lag_i = r_i·(V − v_i)        q_i = clamp(P·r_i/W, q_min, q_max)

    a token is d_i − v_i long (as real time): it ends where v_i meets d_i; then d_i moves by q_i/r_i (``quanta.py``)
    eligible: lag_i ≥ −q_i/4      order: class, then deadline, equal within 1 ms, then longest unserved, then arrival

Of one class, those that are eligible and have an slo precede the others, the one that is due first (``targets.py``).
Called members of a gang (``gangs.py``) precede all that, and leases of others end where a gang is called.
``temporal.py`` decides when to choose, and what to publish for the choice.

Source: Stoica, Abdel-Wahab: Earliest Eligible Virtual Deadline First (1995). Three additions stop a token that ended
50 µs short from winning two in a row: grid deadlines, the slack of a quarter token, and the tie-break by longest
unserved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from math import inf

from gpuserver.core.scheduler.account import VIRTUAL_PER_REAL, Account, real, virtual
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.gang_rules import GangRules
from gpuserver.core.scheduler.holders import Holders
from gpuserver.core.scheduler.leases import VgpuIndex
from gpuserver.core.scheduler.limits import Limits
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.quanta import TurnQuanta
from gpuserver.core.scheduler.temporal.targets import Targets
from gpuserver.core.scheduler.temporal.virtual_time import FairTime

Rank = tuple[int, int, int]
"""−1 for an account that overrides its class, minus the class, minus when its gang was called (0: it is not). The
least rank runs first."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The account that gets a lease at a given time, and its length. ``alone``: no other vGPU will wait then, and none
    with a tpot had the GPU lately."""

    account: Account
    length_ns: int
    alone: bool
    overrides_class: bool = False
    """Beside a higher class (``_overrides_class``)."""
    leads: bool = False
    """Members on other GPUs follow it, and it is owed as much as one that overrides its class."""
    urgent: bool = False

    @property
    def open_ended(self) -> bool:
        return self.alone and not self.account.always_ends


class Eevdf:
    """Chooses the next holder. Changes nothing."""

    def __init__(
        self,
        accounts: Accounts,
        holders: Holders,
        time: FairTime,
        quanta: TurnQuanta,
        limits: Limits,
        gangs: GangRules,
        targets: Targets,
        policy: Policy,
    ) -> None:
        self.policy = policy
        self._accounts = accounts
        self._holders = holders
        self._targets = targets
        self._time = time
        self._quanta = quanta
        self._limits = limits
        self._gangs = gangs

    def pick(self, at_ns: int, staying: ActiveLease | None, following: ActiveLease | None = None) -> Decision | None:
        """The vGPU that should hold from ``at_ns`` on, with all leases charged up to then. ``staying``: the holder, if
        it may go on. ``following``: the lease published as next. Its vGPU may be chosen like those that wait, since the
        decision is made anew."""
        accounts, gangs = self._accounts, self._gangs
        free = {id(h) for h in (staying, following) if h is not None}
        urgent = gangs.most_urgent(free)
        if urgent is not None:
            return Decision(urgent, self.policy.gang_urgent_ns, alone=False, urgent=True)
        dry = {a.key: a for a in accounts.holding.values() if self._dry_at(a, at_ns)} if accounts.capped else {}
        shared = self._holders.shared  # a shared lease keeps no vGPU from its turn
        held = [a for a in accounts.holding.values() if a.competing and a.key not in shared]
        done = [a.key for a in held if not a.wants or a.key in dry]
        busy = [a.key for a in held if not all(id(h) in free for h in a.holds.values())]
        candidates = [a for a in accounts.competing.values() if a.key not in shared]
        candidates += (a for a in accounts.members.values() if a.uncalled)
        alone = len(candidates) - len(done) == 1
        if done or busy:
            candidates = [a for a in candidates if a.key not in done and a.key not in busy]
        if accounts.members:
            candidates = [a for a in candidates if a.gang_window is None or gangs.admits(a, at_ns)]
        if not candidates:
            return None
        clock, weight = self._time.mean(at_ns, but=dry.values())
        called = {a.key for a in accounts.members.values() if gangs.called(a, at_ns)}
        ranks = self._ranked(candidates, called)
        tie = virtual(self.policy.tie_ns, max(weight, 1))
        for rank in sorted(ranks):
            ranked = ranks[rank]
            if accounts.paced:
                entitled = [a for a in ranked if a.share.has_slo and self._entitled(a, at_ns, clock, called)]
                ranked = self._targets.due_first(entitled, at_ns) or ranked
            tied = self._earliest(ranked, at_ns, tie, lambda a: self._entitled(a, at_ns, clock, called))
            if tied:
                break
        else:  # all are eligible, and a call gives no precedence
            rank = min(ranks)
            eligible = [a for other, ranked in ranks.items() if other[:2] == rank[:2] for a in ranked]
            tied = self._earliest(eligible, at_ns, tie, lambda a: True)
        best, deadline = min(tied, key=lambda one: (at_ns if one[0].undrained else one[0].served_ns, one[0].order))
        length = self._quanta.length(best, deadline, at_ns)
        if accounts.paced:
            length = self._targets.turn_ns(best, length, real(clock - best.time_at(at_ns), best.guarantee))
        return Decision(
            best,
            self._gang_length(best, length, at_ns),
            alone and not self._soon_in_company(best) and not accounts.beside_tpot(best, self.policy.slo_active_ns),
            overrides_class=rank[0] < 0,
            leads=gangs.leads(best) and gangs.overrides_class(best),
        )

    def outranks(self, account: Account, holder: Account, now_ns: int) -> bool:
        """Whether ``account`` is of a higher class than the ``holder``, or of the same one and due before it, and
        eligible."""
        if account.share.priority <= holder.share.priority and not self._targets.precedes(account, holder, now_ns):
            return False
        return self._time.lag(account, self._time.clock(now_ns), now_ns) >= -self._quanta.quantum(account) // 4

    def _dry_at(self, account: Account, at_ns: int) -> bool:
        """Whether a holder's bucket will throttle it when its lease has been charged up to ``at_ns``."""
        return account.capped and account.undrained and self._limits.dry_at(account, at_ns)

    def _soon_in_company(self, account: Account) -> bool:
        """Whether ``account`` has a limit, and another vGPU that waits for its bucket may come back at any moment.
        Between two leases of that one, the meter of an open-ended lease would be less exact than held time."""
        return account.capped and any(a.throttled for a in self._accounts.capped.values() if a is not account)

    def _ranked(self, candidates: list[Account], called: Set[VgpuIndex]) -> dict[Rank, list[Account]]:
        """``candidates`` by rank: an entitled vGPU of the first rank precedes all others."""
        if not called and len(self._accounts.classes) == 1:
            return {(0, 0, 0): candidates}
        gangs = self._gangs
        ranks: dict[Rank, list[Account]] = {}
        for a in candidates:
            overrides_class, call = (-gangs.overrides_class(a), -1 - gangs.called_ns(a)) if a.key in called else (0, 0)
            ranks.setdefault((overrides_class, -a.share.priority, call), []).append(a)
        return ranks

    def _earliest(
        self, accounts: Sequence[Account], at_ns: int, tie: int, eligible: Callable[[Account], bool]
    ) -> list[tuple[Account, int]]:
        """The eligible accounts with the earliest deadlines, equal within ``tie``, and these deadlines. ``eligible`` is
        called for few: the others' deadlines are too far away."""
        soon = self._quanta.least * 3 // 2 * VIRTUAL_PER_REAL
        found: list[tuple[Account, int]] = []
        latest = inf
        for a in accounts:
            deadline = a.deadline
            if a.holds or (deadline - a.time) * a.guarantee > soon:
                deadline = self._quanta.deadline_at(a, at_ns)
            if deadline <= latest and eligible(a):
                found.append((a, deadline))
                latest = min(latest, deadline + tie)
        return [one for one in found if one[1] <= latest]

    def _entitled(self, account: Account, at_ns: int, clock: int, called: Set[VgpuIndex]) -> bool:
        """Whether its lag at ``at_ns`` is at least −q/4, or −q where its gang is called: (v̂ − V)·r ≤ q/4."""
        ahead = (account.time_at(at_ns) - clock) * account.guarantee
        quantum = self._quanta.quantum(account)
        return ahead <= (quantum if account.key in called else quantum // 4) * VIRTUAL_PER_REAL

    def _gang_length(self, account: Account, length_ns: int, at_ns: int) -> int:
        """Leases end where a gang is called; a called member's own lease ends where its gang window does."""
        gang_window = account.gang_window
        if gang_window is not None and self._gangs.called(account, at_ns):
            return min(gang_window.end_ns - at_ns, self._limits.within(account, self.policy.quantum_max_ns, at_ns))
        call = self._gangs.next_call(at_ns, account)
        return length_ns if call is None else max(min(length_ns, call - at_ns), self.policy.fill_min_ns)
