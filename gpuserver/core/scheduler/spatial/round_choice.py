"""Which vGPUs hold in a round of spatial mode: those that are owed most, and fit the GPU together.

    late       a vGPU that is predicted to drain after the boundary keeps its SMs and is not chosen
    forced     vGPUs that waited for more than four rounds' worth of their guarantee, most owed first, while they fit
    chosen     the set with the greatest Σ s_i·(max(owed_i, −R) + R + 1 ns) that fits the rest: high ones first
    beside     late vGPUs no other one begins a kernel early. A vGPU with kernels that last beyond the boundary at which
               the late ones have drained is chosen only if it would also be chosen if none were late

Source: MaxWeight scheduling (Tassiulas, Ephremides: Stability properties of constrained queueing systems, 1992) on owed
SM-time. It serves every set of guarantees that can be packed at all.
"""

from __future__ import annotations

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.limits import Limits
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.spatial.card import Card
from gpuserver.core.scheduler.spatial.round_time import RoundTime
from vgpu.packing.knapsack import Work, best_set
from vgpu.share import CARD_MPERCENT, PPM, Priority

ROUND_STEPS = 100_000
"""The most work that the choice of one round may cost, about 10 ms; 255 vGPUs of a GPU's steps take a third of it."""


class RoundChoice:
    """Chooses the holders of a round. Changes nothing."""

    def __init__(self, accounts: Accounts, time: RoundTime, limits: Limits, card: Card, policy: Policy) -> None:
        self.policy = policy
        self._accounts = accounts
        self._time = time
        self._limits = limits
        self._card = card

    def choose(self, now_ns: int, boundary: int, early_ns: int | None = None) -> list[Account]:
        """The set for the round that begins at ``boundary``, or ``early_ns`` before it. Late vGPUs keep their SMs.
        Beside them no vGPU begins a kernel early, nor one that lasts beyond the boundary at which the last of them has
        drained. Exception: the vGPU would also be chosen if they had already drained.

        Reason: vGPUs with long kernels would otherwise be late one after the other. A wide vGPU that needs the SMs of
        all of them would never find them free together."""
        revoked = {
            e for a in self._accounts.all.values() for h in a.holds.values() if h.lease.early for _, e in h.lease.after
        }
        late, candidates = [], []
        for a in self._accounts.all.values():
            if not a.penalised and self._card.late(a, now_ns, boundary):
                late.append(a)
            elif a.competing and a.wants and not revoked & a.holds.keys() and not self._limits.dry_at(a, boundary):
                candidates.append(a)
        capacity = CARD_MPERCENT - sum(a.width for a in late)
        if late:
            round_ns = self.policy.round_ns
            drains_ns = max(hold.drains_by_ns for a in late for hold in a.holds.values()) - boundary
            longest_ns = max(1, -(-drains_ns // round_ns)) * round_ns if early_ns is None else early_ns
            longer = [a for a in candidates if a.longest_kernel_ns > longest_ns]
            if longer:
                drained = [a for a in late if a.competing and a.wants and not self._limits.dry_at(a, boundary)]
                best = self.best(candidates + drained, boundary, CARD_MPERCENT)
                candidates = [a for a in candidates if a not in longer or a in best]
        return self.best(candidates, boundary, capacity)

    def best(self, candidates: list[Account], boundary: int, capacity: int) -> list[Account]:
        """Those of ``candidates`` that are owed most at ``boundary`` and fit ``capacity`` (millipercent) together."""
        policy = self.policy
        clock = self._time.clock(boundary)
        owed = {a.key: self._time.owed(a, boundary, clock) for a in candidates}

        patience = policy.forced_rounds * policy.round_ns * PPM
        starving = [
            a
            for a in candidates
            if not a.undrained
            and a.waiting_since_ns is not None
            and (boundary - a.waiting_since_ns) * a.guarantee > patience
        ]
        chosen: list[Account] = []
        for a in sorted(starving, key=lambda a: (-owed[a.key], a.order)):
            if a.width <= capacity:
                capacity -= a.width
                chosen.append(a)
        rest = [a for a in candidates if a not in chosen]
        high = [a for a in rest if a.share.priority is Priority.HIGH and owed[a.key] >= -(policy.round_ns // 4)]
        for group in (high, [a for a in rest if a not in high]):
            values = [a.width * (max(owed[a.key], -policy.round_ns) + policy.round_ns + 1) for a in group]
            best = best_set([a.width for a in group], values, capacity, Work(ROUND_STEPS))
            capacity -= sum(group[i].width for i in best)
            chosen += [group[i] for i in best]
        return chosen

    def most_owed_first(self, accounts: list[Account], at_ns: int) -> list[Account]:
        if len(accounts) < 2:
            return accounts
        clock = self._time.clock(at_ns)
        return sorted(accounts, key=lambda a: (-a.share.priority, -self._time.owed(a, at_ns, clock), a.order))
