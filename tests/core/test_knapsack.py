"""The packed set against brute force."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vgpu.packing.knapsack import best_set

items = st.lists(st.tuples(st.integers(0, 60), st.integers(-5, 100)), max_size=9)


@given(items, st.integers(0, 120))
@example([(1, 5), (1, 1), (2, 0), (0, 0), (0, 1), (0, -1)], 2)
@example([(60, 1)], 60)
@example([(60, 100), (50, 90), (50, 90)], 100)
@example([(0, 7)], 0)
def test_best_set_is_the_best_of_all_sets(pairs: list[tuple[int, int]], capacity: int) -> None:
    weights = [w for w, _ in pairs]
    values = [v for _, v in pairs]
    every = chain.from_iterable(combinations(range(len(pairs)), k) for k in range(len(pairs) + 1))
    best = max(sum(values[i] for i in s) for s in every if sum(weights[i] for i in s) <= capacity)
    chosen = best_set(weights, values, capacity)
    assert chosen == sorted(set(chosen))
    assert sum(weights[i] for i in chosen) <= capacity
    assert sum(values[i] for i in chosen) == best
    assert all(values[i] > 0 for i in chosen)


@given(items, st.integers(0, 120))
def test_with_positive_values_nobody_who_fits_is_left_out(pairs: list[tuple[int, int]], capacity: int) -> None:
    weights = [w for w, _ in pairs]
    chosen = best_set(weights, [abs(v) + 1 for _, v in pairs], capacity)
    left = capacity - sum(weights[i] for i in chosen)
    assert all(weights[i] > left for i in range(len(pairs)) if i not in chosen)


def test_every_weight_has_its_value() -> None:
    with pytest.raises(ValueError, match="zip"):
        best_set([1, 2], [1], 3)


def test_nothing_fits_less_than_nothing() -> None:
    assert best_set([0, 1], [1, 1], -1) == []
