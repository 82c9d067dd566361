"""The gap on the device at a hand-over: from the end of one vGPU's last kernel to the start of the other's first.

Both run kernels of 0.5 ms that note %globaltimer when their first block starts and their last warp ends; that clock is
one for all processes of a GPU, and its tick is told (the greatest common divisor of all stamps' differences). Under
hardware time slicing, and at the seam of spatial rounds, kernels of both overlap: those negative gaps are told as
overlaps, and are in no percentile. Beside the figures of ours stands what the host did meanwhile to threads that do
nothing (``stalls.py``): awake, asleep, and woken by others. The longest gaps are kept with the times at which they
began; ``gaps.py`` says where the time of each went.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import nlargest
from typing import Any, Final

from benchmarks.suite.parts.part import (
    BEGIN_S,
    EXCLUSIVE,
    HARDWARE,
    SPATIAL,
    TEMPORAL,
    Bench,
    Options,
    Part,
    fit,
    windows_s,
)
from benchmarks.suite.parts.shares import TWO, label
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.stats import Handover, Look, bootstrap, handovers, on_our_clock, percentile, tick_ns
from benchmarks.suite.report.tables import Bar, Column, Labels, Row
from benchmarks.suite.stage import Outcome, Stage
from benchmarks.suite.stalls import looking
from benchmarks.suite.workloads.catalogue import STAMPED

WIDE_PERCENT: Final = 60.0
"""Two of them do not fit the card, so in spatial mode they take rounds; MPS has one context for both."""
FEWEST: Final = 100
"""Gaps; of fewer the p99 would be the longest. Time slicing leaves some twenty in 5 s: all else overlaps."""
WIDE: Final = f"{WIDE_PERCENT:g} % of the SMs each"
LONGEST: Final = 10
"""Gaps of a window that are kept one by one."""


def _ours(row: Row) -> bool:
    return row.way in {TEMPORAL, SPATIAL}


def _splits(options: Options) -> tuple[tuple[float, ...], ...]:
    return tuple(split for split in options.splits or ((50.0, 50.0),) if len(split) > 1)


def measure(bench: Bench) -> None:
    seconds, pace = bench.options.seconds, bench.ground.pace
    around_s = seconds + pace.settle_s + 2 * pace.lead_s  # all of the time of which there are hand-overs
    with bench.block(STAMPED) as stage:
        plain = [stage.plain(STAMPED), stage.plain(STAMPED)]
        vgpus = [stage.vgpu(TEMPORAL, STAMPED, 50), stage.vgpu(TEMPORAL, STAMPED, 50)]
        stage.ready()
        for repeat in range(bench.options.repeat):
            for split in _splits(bench.options):
                with looking(around_s) as stalls:
                    outcome = stage.window(fit(stage, STAMPED, vgpus, split), seconds, kernels=True)
                bench.keep(repeat, STAMPED, label(split), TEMPORAL, with_gaps(outcome, stalls), split)
            outcome = stage.window(plain, min(seconds, 5.0), kernels=True)
            bench.keep(repeat, STAMPED, TWO, HARDWARE, with_gaps(outcome, {}))
            if bench.options.shared(SPATIAL):
                with Stage(bench.ground) as inner:
                    wide = [inner.vgpu(SPATIAL, STAMPED, WIDE_PERCENT, "--overcommit") for _ in range(2)]
                    inner.ready()
                    with looking(around_s) as stalls:
                        outcome = inner.window(wide, seconds, kernels=True)
                bench.keep(repeat, STAMPED, WIDE, SPATIAL, with_gaps(outcome, stalls))


def rows(options: Options) -> list[Labels]:
    found = [(STAMPED, label(split), TEMPORAL) for split in _splits(options)]
    found.append((STAMPED, TWO, HARDWARE))
    return [*found, (STAMPED, WIDE, SPATIAL)] if options.shared(SPATIAL) else found


def with_gaps(outcome: Outcome, stalls: Mapping[str, float]) -> Outcome:
    """``outcome`` with the gaps between its sharers' kernels instead of the kernels, which are many; and ``stalls``.

    ``longest_gaps`` of a result: those of the window's LONGEST after which this sharer went on, as (when it began, µs).
    That is on ``time.monotonic()``'s clock, in seconds.
    """
    kernels = [[(start, end) for start, end in result["kernels_ns"]] for result in outcome.results]
    found = handovers(kernels)
    gaps_us = [each.gap / 1e3 for each in found if each.gap >= 0]
    figures = {**outcome.figures, **stalls} | {
        "handovers": float(len(found)),
        "overlaps": float(sum(each.gap < 0 for each in found)),
        "tick_ns": float(tick_ns(stamp for each in kernels for interval in each for stamp in interval)),
    }
    if gaps_us:
        figures |= {"gap_p50_us": percentile(gaps_us, 50), "gap_worst_us": max(gaps_us)}
    if len(gaps_us) >= FEWEST:
        low, high = bootstrap(gaps_us, lambda drawn: percentile(drawn, 99), block=20)
        figures |= {"gap_p99_us": percentile(gaps_us, 99), "gap_p99_low_us": low, "gap_p99_high_us": high}
    slim = tuple(
        {k: v for k, v in result.items() if k not in ("kernels_ns", "looks")} | {"longest_gaps": gaps}
        for result, gaps in zip(outcome.results, longest(found, outcome), strict=True)
    )
    return replace(outcome, results=slim, figures=figures)


def longest(found: Sequence[Handover], outcome: Outcome) -> list[list[tuple[float, float]]]:
    """For each sharer, in order of time."""
    gaps: list[list[tuple[float, float]]] = [[] for _ in outcome.results]
    for each in sorted(nlargest(LONGEST, (each for each in found if each.gap >= 0), key=lambda each: each.gap)):
        first, last = clocks(outcome.results[each.giver])
        gaps[each.taker].append((on_our_clock(each.end, first, last) / 1e9, each.gap / 1e3))
    return gaps


def clocks(result: Mapping[str, Any]) -> tuple[Look, Look]:
    """The clock of the kernels and ours, before and after them."""
    first, last = result["looks"]
    return Look(*first), Look(*last)


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    return [Row(m.block, m.row, m.way, m.figures) for m in measurements if m.way != EXCLUSIVE]


def estimate(options: Options) -> float:
    windows = windows_s(len(_splits(options)), options.seconds) + windows_s(1, min(options.seconds, 5.0))
    spatial = options.shared(SPATIAL) * (BEGIN_S / 3 + windows_s(1, options.seconds))
    return BEGIN_S / 3 + options.repeat * (windows + spatial)


PART = Part(
    "handover",
    "Gaps on the device between the kernels of two vGPUs that both always have work",
    30.0,
    (
        Column("gap_p99_us", "gap p99, µs", "low", 1, (Bar(100.0, _ours),)),
        Column("gap_p99_low_us", "95 % from"),
        Column("gap_p99_high_us", "to"),
        Column("gap_p50_us", "p50, µs", "low"),
        Column("gap_worst_us", "worst, µs", "low"),
        Column("handovers", "hand-overs", "high", 0, (Bar(1000.0, _ours),)),
        Column("overlaps", "overlaps", "low", 0),
        Column("tick_ns", "tick of the clock, ns", digits=0),
        Column("stalls_per_second", "host: awake, stalls a second, > 100 µs"),
        Column("stall_worst_us", "worst, µs", digits=0),
        Column("sleep_late_per_second", "asleep, late a second, > 1 ms", digits=2),
        Column("sleep_late_p99_us", "p99, µs", digits=0),
        Column("sleep_late_worst_us", "worst, µs", digits=0),
        Column("sleep_late_queued_ratio", "of it behind other threads", digits=2),
        Column("wake_late_per_second", "woken, late a second, > 1 ms", digits=2),
        Column("wake_late_p99_us", "p99, µs", digits=0),
        Column("wake_late_worst_us", "worst, µs", digits=0),
    ),
    measure,
    derive,
    estimate,
    rows,
)
