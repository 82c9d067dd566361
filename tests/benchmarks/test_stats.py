"""The statistics that figures are made with."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.suite.report.stats import (
    Look,
    bootstrap,
    bootstrap_ratio,
    closed,
    covered_ratio,
    gaps_within,
    handovers,
    intervals_noted,
    mean_distance_percent,
    on_our_clock,
    percentile,
    rate,
    tick_ns,
    union_ns,
    work_at,
    worst,
)

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))))


def test_a_percentile_is_the_smallest_sample_that_enough_do_not_exceed() -> None:
    samples = [float(i) for i in range(1, 101)]
    assert [percentile(samples, p) for p in (0, 1, 50, 99, 99.5, 100)] == [1, 1, 50, 99, 100, 100]
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_splits_the_samples(samples: list[float], percent: float) -> None:
    found = percentile(samples, percent)
    assert sum(sample <= found for sample in samples) >= len(samples) * percent / 100
    assert sum(sample < found for sample in samples) < max(1, len(samples) * percent / 100)


@given(INTERVALS, st.integers(0, 60), st.integers(0, 60))
def test_a_union_covers_what_its_intervals_cover(intervals: list[tuple[int, int]], a: int, b: int) -> None:
    window = (min(a, b), max(a, b))
    seconds = set(range(*window))
    assert union_ns(intervals, window) == len(seconds & {at for start, end in intervals for at in range(start, end)})


@given(INTERVALS, st.integers(0, 20))
def test_closing_gaps_fills_those_and_no_others(intervals: list[tuple[int, int]], gap: int) -> None:
    merged = closed(intervals, gap)
    assert all(b[0] - a[1] > gap for a, b in pairwise(merged))
    covered = {at for start, end in intervals for at in range(start, end)}
    filled = {at for start, end in merged for at in range(start, end)} - covered
    assert covered <= {at for start, end in merged for at in range(start, end)}
    assert all(any(end <= at < end + gap for _, end in intervals) for at in filled)  # an end: also of an empty interval


@given(st.integers(0, 10**16), st.floats(0.001, 100))
def test_kernels_without_a_gap_cover_all_of_a_window_and_not_more(start_ns: int, seconds: float) -> None:
    """At any uptime: the sum of two floats is off by nanoseconds."""
    start = start_ns / 1e9
    ends_ns = (start_ns - 10**6, start_ns + 10**6, start_ns + 10**12)
    assert covered_ratio(list(pairwise(ends_ns)), start, start + seconds) == 1.0
    assert covered_ratio([], start, start + seconds) == 0.0


def test_a_bootstrap_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    dice = random.Random(7)
    hits = 0
    for _ in range(100):
        low, high = bootstrap([dice.gauss(10, 1) for _ in range(50)], statistics.fmean, rounds=100)
        hits += low <= 10 <= high
    assert 85 <= hits <= 99


def test_a_ratio_has_an_interval_of_its_own() -> None:
    dice = random.Random(7)
    base, samples = ([dice.gauss(mean, 1) for _ in range(400)] for mean in (10, 12))
    low, high = bootstrap_ratio(samples, base, statistics.fmean, rounds=200)
    assert 1.17 < low < statistics.fmean(samples) / statistics.fmean(base) < high < 1.23


def test_neighbours_that_resemble_each_other_widen_a_bootstrap_of_blocks() -> None:
    dice = random.Random(7)
    level, samples = 0.0, []
    for _ in range(2000):
        level = 0.99 * level + dice.gauss(0, 1)
        samples.append(level)
    single = bootstrap(samples, statistics.fmean, rounds=100)
    blocks = bootstrap(samples, statistics.fmean, block=200, rounds=100)
    assert blocks[1] - blocks[0] > 3 * (single[1] - single[0])


def test_work_counts_in_parts_of_steps() -> None:
    done = [1.0, 2.0, 4.0]
    assert [work_at(done, at) for at in (0, 1, 1.5, 2, 3, 4, 9)] == [0, 1, 1.5, 2, 2.5, 3, 3]
    assert rate(done, 1.5, 3.0) == pytest.approx(1.0 / 1.5)


def test_gaps_are_those_between_completions_in_the_window() -> None:
    assert gaps_within([0.5, 1.0, 2.0, 4.0, 9.0], 1.0, 4.0) == [1.0, 2.0]


def test_a_handover_is_where_the_owner_changes() -> None:
    a, b = [(0, 10), (10, 20), (50, 60)], [(23, 33), (33, 45)]
    found = handovers([a, b])
    assert [each.gap for each in found] == [3, 5]
    assert [(each.giver, each.taker) for each in found] == [(0, 1), (1, 0)]


def test_kernels_of_two_at_once_are_overlaps() -> None:
    assert [each.gap for each in handovers([[(0, 10)], [(4, 12)]])] == [-6]


def test_the_tick_of_a_clock_is_what_its_stamps_have_in_common() -> None:
    assert tick_ns([32, 96, 1024, 1024 + 64, 5 * 32]) == 32
    assert tick_ns([5]) == 0


def test_the_worst_depends_on_what_is_good() -> None:
    assert (worst([1.0, 3.0], "low"), worst([1.0, 3.0], "high")) == (3.0, 1.0)


def test_the_distance_from_the_mean_is_that_of_the_furthest() -> None:
    assert mean_distance_percent([9.0, 10.0, 14.0]) == pytest.approx(100 * 3 / 11)


def test_beginnings_and_ends_are_noted_in_turns_on_another_clock() -> None:
    first, last = Look(1000, 50_000), Look(3000, 54_000)  # theirs is half as fast
    noted = [1100, 1200, 1300, 1500, 2000]
    assert intervals_noted(4, [*noted, 0], first, last) == [(50_200, 50_400), (50_600, 51_000)]
    assert intervals_noted(5, [*noted, 0], first, last) == [(50_200, 50_400), (50_600, 51_000)]  # one has not ended
    assert intervals_noted(0, [0, 0], first, last) == []
    with pytest.raises(RuntimeError, match="7 notes, and room for 5"):
        intervals_noted(7, noted, first, last)


def test_a_time_of_another_clock_is_ours_by_two_looks_at_both() -> None:
    """Theirs is 1000 ahead, and goes twice as fast."""
    first, last = Look(3000, 2000), Look(5000, 3000)
    assert [on_our_clock(at, first, last) for at in (3000, 4000, 5000, 7000)] == [2000, 2500, 3000, 4000]
