"""The statistics of the benchmarks. Pure: numbers in, numbers out, and the same ones every time."""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

Interval = tuple[int, int]


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least ``percent`` of them do not exceed (nearest rank). ValueError without any."""
    if not samples:
        raise ValueError("no samples, no percentile")
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


def bootstrap(
    samples: Sequence[float],
    statistic: Callable[[Sequence[float]], float],
    *,
    block: int = 1,
    rounds: int = 400,
    level: float = 0.95,
) -> tuple[float, float]:
    """An interval that holds ``statistic`` with probability ``level``: percentiles over resampled ``samples``.

    ``block``: how many neighbours are drawn together (Künsch, 1989), since latencies that follow each other resemble
    each other, and drawing them one by one would make the interval too narrow.
    """
    dice = random.Random(1)
    found = [statistic(_drawn(samples, block, dice)) for _ in range(rounds)]
    return _middle(found, level)


def bootstrap_ratio(
    samples: Sequence[float],
    base: Sequence[float],
    statistic: Callable[[Sequence[float]], float],
    *,
    block: int = 1,
    rounds: int = 400,
    level: float = 0.95,
) -> tuple[float, float]:
    """Likewise for the ``statistic`` of ``samples`` over that of ``base``; both are resampled."""
    dice = random.Random(1)
    found = [statistic(_drawn(samples, block, dice)) / statistic(_drawn(base, block, dice)) for _ in range(rounds)]
    return _middle(found, level)


def _drawn(samples: Sequence[float], block: int, dice: random.Random) -> list[float]:
    """As many as ``samples``, in blocks of neighbours, with repetition."""
    count = len(samples)
    block = max(1, min(block, count))
    drawn: list[float] = []
    while len(drawn) < count:
        first = dice.randrange(count - block + 1)
        drawn += samples[first : first + block]
    return drawn[:count]


def _middle(found: Sequence[float], level: float) -> tuple[float, float]:
    tail = 100 * (1 - level) / 2
    return percentile(found, tail), percentile(found, 100 - tail)


def union_ns(intervals: Iterable[Interval], window: Interval) -> int:
    """How much of ``window`` is covered by at least one of ``intervals`` (start, end), in any order."""
    covered, reach = 0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reach), min(end, window[1])
        if end > start:
            covered += end - start
            reach = end
    return covered


def closed(intervals: Iterable[Interval], gap_ns: int) -> list[Interval]:
    """The union of ``intervals`` in order, with all gaps of up to ``gap_ns`` closed."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start - merged[-1][1] <= gap_ns:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


class Look(NamedTuple):
    """Two clocks at one moment, in ns, or ``apart_ns`` apart at most."""

    theirs: int
    ours: int
    apart_ns: int = 0


def on_our_clock(at: int, first: Look, last: Look) -> int:
    """What ours showed when theirs showed ``at``; it may go faster or slower, but always alike."""
    pace = (last.ours - first.ours) / max(1, last.theirs - first.theirs)
    return first.ours + round((at - first.theirs) * pace)


def intervals_noted(count: int, slots: Sequence[int], first: Look, last: Look) -> list[Interval]:
    """Intervals whose beginnings and ends were noted in turns, ``count`` times in all, by a clock that was looked at
    before and after; on ours. RuntimeError if there were more notes than slots."""
    if count > len(slots):
        raise RuntimeError(f"{count} notes, and room for {len(slots)}: choose fewer --seconds")
    ours = [on_our_clock(at, first, last) for at in slots[: count - count % 2]]
    return list(zip(ours[::2], ours[1::2], strict=True))


def covered_ratio(intervals: Iterable[Interval], start: float, stop: float) -> float:
    """Which part of the window between these two times (seconds) is covered by ``intervals``: 0 to 1.

    Of the window in whole nanoseconds, to which the intervals are cut: in seconds it may be one nanosecond less.
    """
    window = (round(start * 1e9), round(stop * 1e9))
    return union_ns(intervals, window) / (window[1] - window[0])


def work_at(completions: Sequence[float], at: float) -> float:
    """How many of ``completions`` (ascending) had happened at ``at``; between two of them, on a straight line.

    A step of a slow sharer is a large part of what it does in a window: whole steps would be off by up to one.
    """
    done = bisect.bisect_right(completions, at)
    if done == 0 or done == len(completions):
        return float(done)
    before, after = completions[done - 1], completions[done]
    return done + (at - before) / (after - before)


def rate(completions: Sequence[float], start: float, stop: float) -> float:
    """Completions a second between ``start`` and ``stop`` (seconds)."""
    return (work_at(completions, stop) - work_at(completions, start)) / (stop - start)


def gaps_within(completions: Sequence[float], start: float, stop: float) -> list[float]:
    """Times between neighbours that both lie in the window."""
    inside = [at for at in completions if start <= at <= stop]
    return [b - a for a, b in pairwise(inside)]


class Handover(NamedTuple):
    """From the last kernel of ``giver`` to the first of ``taker``, which come after each other."""

    end: int
    start: int
    giver: int
    taker: int

    @property
    def gap(self) -> int:
        """Negative: they overlap."""
        return self.start - self.end


def handovers(sharers: Sequence[Sequence[Interval]]) -> list[Handover]:
    """Where a kernel is another's than the one that began before it, in order of time.

    ``sharers``: each one's kernels as (start, end) on one clock. Where intervals of both overlap, the owner changes
    with every kernel, so none of them is hidden.
    """
    kernels = sorted((start, end, who) for who, intervals in enumerate(sharers) for start, end in intervals)
    return [Handover(a[1], b[0], a[2], b[2]) for a, b in pairwise(kernels) if a[2] != b[2]]


def tick_ns(stamps: Iterable[int]) -> int:
    """The step of the clock that ``stamps`` were read from: the greatest common divisor of their differences."""
    ordered = sorted(set(stamps))
    return math.gcd(*(b - a for a, b in pairwise(ordered)))


def worst(values: Sequence[float], better: str) -> float:
    """The least favourable of ``values``; ``better``: "low" or "high"."""
    return max(values) if better == "low" else min(values)


def mean_distance_percent(rates: Sequence[float]) -> float:
    """How far the one furthest from the mean is from it, in percent of the mean."""
    mean = statistics.fmean(rates)
    return max(abs(rate - mean) for rate in rates) / mean * 100 if mean else math.inf
