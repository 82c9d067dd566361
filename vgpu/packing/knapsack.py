"""The most valuable set that fits a capacity: an exact 0/1 knapsack with bounded work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

State = tuple[int, int, tuple[int, ...]]
"""Weight, value, indices of a set."""


@dataclass(slots=True)
class Work:
    """The bound of a search, in steps. Reason for steps: the core has no clock."""

    left: int
    """Steps that may still be made."""

    def spend(self, steps: int) -> bool:
        """Take ``steps`` off; False: the work is used up."""
        self.left -= steps
        return self.left > 0


def best_set(weights: Sequence[int], values: Sequence[int], capacity: int, work: Work | None = None) -> list[int]:
    """Ascending indices of the set with the greatest total value among those with a total weight ≤ ``capacity``.

    The result is exact while ``work`` lasts; after that it is the best set found, which fits as well. Weights are ≥ 0.
    Items with a value ≤ 0 are left out.

    Method: dynamic programming over the undominated (weight, value) pairs, with the items by falling value per weight
    (Horowitz, Sahni 1974). A pair is dropped if it cannot reach the best set found so far, even if the next item could
    fill the rest of the capacity in part (Dantzig's bound). SM shares come in few sizes, so few pairs survive.
    """
    worthy = [i for i, (w, v) in enumerate(zip(weights, values, strict=True)) if v > 0 and w <= capacity]
    items = sorted((i for i in worthy if weights[i] > 0), key=lambda i: (-values[i] / weights[i], i))
    states: list[State] = [(0, 0, ())]
    filled = _greedy(items, weights, values, capacity)
    best = filled[1]
    for position, item in enumerate(items):
        if work is not None and not work.spend(2 * len(states)):
            break
        weight, value = weights[item], values[item]
        taken = [(w + weight, v + value, (*chosen, item)) for w, v, chosen in states if w + weight <= capacity]
        if taken:
            best = max(best, max(v for _, v, _ in taken))
        following = items[position + 1] if position + 1 < len(items) else None
        states = _undominated(states, taken)
        if following is not None:
            density_value, density_weight = values[following], weights[following]
            states = [s for s in states if (best - s[1]) * density_weight <= (capacity - s[0]) * density_value]
    heaviest = states[-1] if states else filled  # and so the most valuable
    if filled[1] > heaviest[1]:  # the work was used up
        heaviest = filled
    return sorted([i for i in worthy if weights[i] == 0] + [*heaviest[2]])


def _greedy(items: list[int], weights: Sequence[int], values: Sequence[int], capacity: int) -> State:
    """The set that takes ``items`` in their order, each one that still fits."""
    weight, total = 0, 0
    chosen: list[int] = []
    for item in items:
        if weight + weights[item] <= capacity:
            weight += weights[item]
            total += values[item]
            chosen.append(item)
    return weight, total, tuple(chosen)


def _undominated(one: list[State], other: list[State]) -> list[State]:
    """Both lists by rising weight. A state is kept if it is worth more than every lighter one."""
    merged = sorted([*one, *other], key=lambda s: (s[0], -s[1]))
    kept: list[State] = []
    for state in merged:
        if not kept or state[1] > kept[-1][1]:
            kept.append(state)
    return kept
