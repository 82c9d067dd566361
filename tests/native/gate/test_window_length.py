"""How long a window is: it halves where a lease ran over, and grows back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cython_ext.testing import bindings_logic as native

US, MS = 1_000, 1_000_000


@given(
    window=st.integers(0, 10 * MS),
    most=st.integers(0, 5 * MS),
    overrun=st.integers(-10 * MS, 10 * MS),
    target=st.integers(0, MS),
)
def test_the_window_halves_on_overrun_else_creeps_up(window: int, most: int, overrun: int, target: int) -> None:
    adapted = native.window_adapt(window, most, overrun, target)
    assert min(native.WINDOW_LEAST_NS, most) <= adapted <= most
    if overrun > target:
        assert adapted <= max(window // 2, native.WINDOW_LEAST_NS)
    else:
        assert adapted >= min(window, most)
        assert adapted > window or adapted == most


@pytest.mark.parametrize(
    ("most", "longest", "tolerated"),
    [(12 * MS, 0, 6 * MS), (12 * MS, 30 * MS, 21 * MS), (250 * US, 0, MS), (250 * US, 200 * US, 1100 * US)],
)
def test_an_overrun_is_tolerated_up_to_half_a_window_and_half_a_kernel(most: int, longest: int, tolerated: int) -> None:
    assert native.overrun_tolerated_ns(most, longest) == tolerated


@pytest.mark.parametrize("period", [40 * MS, 143 * MS])
def test_predictions_that_err_by_a_fifth_leave_a_wide_window(period: int) -> None:
    """Leases of a trainer: the queue at the end takes up to 20 % longer than predicted, and there are few of them."""
    source = random.Random(1)
    window = most = 12 * MS
    tolerated = native.overrun_tolerated_ns(most, 0)
    for _ in range(10 * 1000 * MS // period):
        window = native.window_adapt(window, most, int(window * source.uniform(-0.2, 0.2)), tolerated)
    assert window == most


@settings(max_examples=min(30, settings().max_examples))
@given(st.integers(0, 2**32 - 1), st.floats(1.0, 4.0))
def test_the_window_settles_where_the_drain_meets_its_target(seed: int, slowness: float) -> None:
    """Each lease overruns by what the window holds too much: kernels take ``slowness`` times what is predicted."""
    source = random.Random(seed)
    window, most, target = MS, MS, 400 * US
    overruns = []
    for _ in range(400):
        overrun = int(window * slowness * source.uniform(0.5, 1.0)) - 300 * US
        overruns.append(overrun)
        window = native.window_adapt(window, most, overrun, target)
    settled = overruns[100:]
    assert sum(overrun > target for overrun in settled) <= len(settled) / 6
    assert window >= min(most, int(700 * US / slowness)) / 3
