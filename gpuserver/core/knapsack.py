"""The best-packed set: a 0/1 knapsack, exact."""

from __future__ import annotations

from collections.abc import Sequence

State = tuple[int, int, tuple[int, ...]]
"""Weight, value, indices of a set."""


def best_set(weights: Sequence[int], values: Sequence[int], capacity: int) -> list[int]:
    """Indices of the set with the greatest total value among those whose weights sum to at most ``capacity``.

    Exact, in integers. Weights are ≥ 0; items with a value ≤ 0 are left out. Indices come in ascending order.

    Dynamic programming over the undominated (weight, value) pairs, items by falling value per weight, so that whatever
    cannot reach the best set found so far, even if the rest could be cut to measure, is dropped at once
    (Horowitz, Sahni 1974; the bound is Dantzig's). SM shares come in few sizes, so few pairs survive: 64 vGPUs take
    well under a millisecond.
    """
    worthy = [i for i, (w, v) in enumerate(zip(weights, values, strict=True)) if v > 0 and w <= capacity]
    items = sorted((i for i in worthy if weights[i] > 0), key=lambda i: (-values[i] / weights[i], i))
    states: list[State] = [(0, 0, ())]
    best = _greedy(items, weights, values, capacity)
    for position, item in enumerate(items):
        weight, value = weights[item], values[item]
        taken = [(w + weight, v + value, (*chosen, item)) for w, v, chosen in states if w + weight <= capacity]
        if taken:
            best = max(best, max(v for _, v, _ in taken))
        following = items[position + 1] if position + 1 < len(items) else None
        states = _undominated(states, taken)
        if following is not None:
            density_value, density_weight = values[following], weights[following]
            states = [s for s in states if (best - s[1]) * density_weight <= (capacity - s[0]) * density_value]
    heaviest = states[-1]  # and so the most valuable
    return sorted([i for i in worthy if weights[i] == 0] + [*heaviest[2]])


def _greedy(items: list[int], weights: Sequence[int], values: Sequence[int], capacity: int) -> int:
    total = 0
    for item in items:
        if weights[item] <= capacity:
            capacity -= weights[item]
            total += values[item]
    return total


def _undominated(one: list[State], other: list[State]) -> list[State]:
    """Merge two lists by rising weight, keeping only what is worth more than everything lighter."""
    merged = sorted([*one, *other], key=lambda s: (s[0], -s[1]))
    kept: list[State] = []
    for state in merged:
        if not kept or state[1] > kept[-1][1]:
            kept.append(state)
    return kept
