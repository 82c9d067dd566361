"""The gap on the device at a hand-over: from the end of one vGPU's last kernel to the start of the other's first.

Both run kernels of 0.5 ms that note %globaltimer when their first block starts and their last warp ends; that clock is
one for all processes of a GPU, and its tick is told (the greatest common divisor of all stamps' differences). Under
hardware time slicing, and at the seam of spatial rounds, kernels of both overlap: those negative gaps are told as
overlaps, and are in no percentile. Beside the figures of ours stands what the host did meanwhile to a thread that never
sleeps (``stalls.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.gpu.catalogue import STAMPED
from benchmarks.gpu.parts.part import (
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
from benchmarks.gpu.parts.shares import TWO, label
from benchmarks.gpu.records import Measurement
from benchmarks.gpu.stage import Outcome, Stage
from benchmarks.gpu.stalls import looking
from benchmarks.gpu.stats import bootstrap, handovers_ns, percentile, tick_ns
from benchmarks.gpu.tables import Bar, Column, Labels, Row

WIDE_PERCENT: Final = 60.0
"""Two of them do not fit the card, so in spatial mode they take rounds; MPS has one context for both."""
FEWEST: Final = 100
"""Gaps; of fewer the p99 would be the longest. Time slicing leaves some twenty in 5 s: all else overlaps."""
WIDE: Final = f"{WIDE_PERCENT:g} % of the SMs each"


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
    """``outcome`` with the gaps between its sharers' kernels instead of the kernels, which are many; and ``stalls``."""
    kernels = [[(start, end) for start, end in result["kernels_ns"]] for result in outcome.results]
    found = handovers_ns(kernels)
    gaps_us = [gap / 1e3 for gap in found if gap >= 0]
    figures = {**outcome.figures, **stalls} | {
        "handovers": float(len(found)),
        "overlaps": float(sum(gap < 0 for gap in found)),
        "tick_ns": float(tick_ns(stamp for each in kernels for interval in each for stamp in interval)),
    }
    if gaps_us:
        figures |= {"gap_p50_us": percentile(gaps_us, 50), "gap_worst_us": max(gaps_us)}
    if len(gaps_us) >= FEWEST:
        low, high = bootstrap(gaps_us, lambda drawn: percentile(drawn, 99), block=20)
        figures |= {"gap_p99_us": percentile(gaps_us, 99), "gap_p99_low_us": low, "gap_p99_high_us": high}
    slim = tuple({k: v for k, v in result.items() if k != "kernels_ns"} for result in outcome.results)
    return replace(outcome, results=slim, figures=figures)


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
        Column("stalls_per_second", "host stalls a second, > 100 µs"),
        Column("stall_worst_us", "worst, µs", digits=0),
    ),
    measure,
    derive,
    estimate,
    rows,
)
