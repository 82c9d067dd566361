"""The size that one vGPU's demand needs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.autoscale.level import Level
from vgpu.autoscale.size import MEMORY_UP_AT, UP_AT, Compute, Memory, grown, with_margin

GIB = 1 << 30
READING_S = 2.0
BOUNDS = st.tuples(st.integers(1, 99), st.integers(1, 100)).filter(lambda pair: pair[0] < pair[1])


def sizes(demands: list[float], least: float, most: float, start: float | None = None) -> list[float]:
    """The size after each reading; what is beyond it shows as throttled time."""
    compute, size, found = Compute(), least if start is None else start, []
    for at, demand in enumerate(demands):
        throttled = 1.0 if demand > size else 0.0
        compute.take(at * READING_S, size, min(demand, size) / 100, throttled)
        size = compute.wanted(at * READING_S, least, most)
        found.append(size)
    return found


def test_the_level_is_the_steady_gain_of_its_variances() -> None:
    level = Level()
    for _ in range(100):
        level.take(10.0)
    assert level.value == pytest.approx(10)
    level.take(20.0)
    assert level.value == pytest.approx(10 + 10 * 0.27, abs=0.01)


def test_growth_goes_in_steps_of_a_tenth() -> None:
    assert grown(20, 17.9) == 20
    assert grown(20, 18.0) == pytest.approx(22)
    assert grown(20, 21.0) == pytest.approx(24.2)


def test_a_demand_that_doubles_is_met_within_four_readings() -> None:
    found = sizes([15.0] * 20 + [30.0] * 4, 20, 60)
    assert found[19] == 20
    assert found[-1] * UP_AT >= 30


def test_a_size_falls_after_ten_seconds_and_not_before() -> None:
    found = sizes([50.0] * 10 + [2.0] * 40, 20, 60)
    assert found[9] == 60
    assert found[13] == 60
    assert found[-1] == 20


def test_a_size_that_is_a_little_too_large_settles_after_half_a_minute() -> None:
    found = sizes([33.0] * 60, 20, 60, start=60)
    assert found[14] == 60
    assert 33 / UP_AT < found[-1] < 45


def test_a_time_without_readings_shows_no_demand() -> None:
    """The first reading after it is the first one: a vGPU that comes back from a suspension keeps its size for 10 s."""
    compute = Compute()
    for at in range(0, 20, 2):
        compute.take(at, 60, 0.5, 0)
    for at in range(100, 110, 2):
        compute.take(at, 60, 0.0, 0)
        assert compute.wanted(at, 20, 60) == 60
    compute.take(110, 60, 0.0, 0)
    assert compute.wanted(110, 20, 60) == 20


@given(st.lists(st.floats(0, 100), min_size=1, max_size=80), BOUNDS)
def test_a_size_stays_between_its_bounds(demands: list[float], bounds: tuple[int, int]) -> None:
    least, most = bounds
    assert all(least <= size <= most for size in sizes(demands, least, most))


@given(st.floats(0, 100), BOUNDS, st.integers(0, 1 << 30), st.floats(0, 0.05))
def test_a_constant_demand_ends_in_a_constant_size(
    demand: float, bounds: tuple[int, int], seed: int, noise: float
) -> None:
    """Also with readings that vary by 5 %. Within two minutes it changes no more, and suffices or is at its bound."""
    chance, (least, most) = random.Random(seed), bounds
    found = sizes([demand * (1 + chance.uniform(-noise, noise)) for _ in range(400)], least, most)
    settled = found[150:]
    # Growing by one step may follow a reading that was the highest; it ends, for steps grow the size.
    assert len(set(settled)) <= 2
    assert sorted(settled) == settled
    assert settled[-1] == most or settled[-1] * 1.001 >= demand


@given(
    st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=60),
    st.tuples(st.integers(1, 8), st.integers(9, 16)),
)
def test_memory_stays_between_its_bounds_and_covers_what_is_used(
    readings: list[tuple[int, bool]], bounds: tuple[int, int]
) -> None:
    least, most = (bound * GIB for bound in bounds)
    memory, size, refusals = Memory(), least, 0
    for at, (used, refused) in enumerate(readings):
        used_bytes = min(used * GIB, size)
        refusals += refused
        memory.take(at * READING_S, size, used_bytes, refusals, GIB)
        size = memory.wanted(at * READING_S, least, most)
        assert least <= size <= most
        assert size >= used_bytes
        assert size == most or used_bytes < MEMORY_UP_AT * size


def test_memory_grows_by_what_was_refused_and_falls_half_a_minute_later() -> None:
    memory = Memory()
    memory.take(0, 8 * GIB, 2 * GIB, 0, 0)
    assert memory.wanted(0, 4 * GIB, 16 * GIB) == 8 * GIB
    memory.take(2, 8 * GIB, 2 * GIB, 1, 7 * GIB)
    size = memory.wanted(2, 4 * GIB, 16 * GIB)
    assert size == with_margin(9 * GIB)
    for at in range(4, 34, 2):
        memory.take(at, size, 2 * GIB, 1, 7 * GIB)
        assert memory.wanted(at, 4 * GIB, 16 * GIB) == size
    memory.take(34, size, 2 * GIB, 1, 7 * GIB)
    assert memory.wanted(34, 4 * GIB, 16 * GIB) == 4 * GIB
