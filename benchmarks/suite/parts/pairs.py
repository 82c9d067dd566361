"""What pairs and triples get done together, and how it is split: beside an exclusive run, hardware time slicing and
plain MPS of the same processes in the same minutes. No profiler runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Final

from benchmarks.suite.parts.part import (
    BEGIN_S,
    EXCLUSIVE,
    HARDWARE,
    MPS,
    TEMPORAL,
    Bench,
    Options,
    Part,
    fit,
    rotated,
    windows_s,
)
from benchmarks.suite.parts.shares import SPLITS, label
from benchmarks.suite.parts.throughput import ABOVE_HARDWARE, SPLIT_ERROR, TOTAL, throughput
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.tables import Bar, Column, Labels, Row, compared
from benchmarks.suite.stage import Sharer, Stage
from benchmarks.suite.workloads.catalogue import PAIRED, WORKS

BASELINE_S: Final = 6.0
"""What ours are compared with is steady. Ours take turns, and the p99 of a step at 30 % is of ten steps a second."""


def _splits(options: Options) -> tuple[tuple[float, ...], ...]:
    return tuple(split for split in options.splits or SPLITS if len(split) > 1)


def measure(bench: Bench) -> None:
    options = bench.options
    sizes = sorted({len(split) for split in _splits(options)})
    for work in options.some(PAIRED) if sizes else ():
        with bench.block(work) as stage:
            plain = [stage.plain(work) for _ in range(sizes[-1])]
            mps = [stage.mps(work) for _ in range(sizes[-1])]
            vgpus = [stage.vgpu(TEMPORAL, work, 50), stage.vgpu(TEMPORAL, work, 50)]
            stage.ready()
            for size in sizes:
                for repeat in range(options.repeat):
                    _together(bench, stage, work, repeat, size, plain, mps, vgpus)


def _together(
    bench: Bench,
    stage: Stage,
    work: str,
    repeat: int,
    size: int,
    plain: list[Sharer],
    mps: list[Sharer],
    vgpus: list[Sharer],
) -> None:
    """All splits of one size, between two exclusive windows."""
    block, together = f"{work}×{size}", f"{size} of them"

    def keep(row: str, way: str, sharers: Sequence[Sharer], asked: Sequence[float] = ()) -> None:
        seconds = bench.options.seconds
        outcome = stage.window(sharers, seconds if way == TEMPORAL else min(seconds, BASELINE_S))
        bench.keep(repeat, block, row, way, outcome, asked)

    def shared(split: tuple[float, ...]) -> None:
        keep(label(split), TEMPORAL, fit(stage, work, vgpus, split), split)

    ways = [
        *(partial(shared, split) for split in _splits(bench.options) if len(split) == size),
        partial(keep, together, HARDWARE, plain[:size]),
        partial(keep, together, MPS, mps[:size]),
    ]
    keep(EXCLUSIVE, EXCLUSIVE, plain[:1])
    for way in rotated(ways, repeat):
        way()
    keep(EXCLUSIVE, EXCLUSIVE, plain[:1])


def rows(options: Options) -> list[Labels]:
    found: list[Labels] = []
    for work in options.some(PAIRED):
        for size in sorted({len(split) for split in _splits(options)}):
            found.append((work, EXCLUSIVE, EXCLUSIVE))
            found += [(work, label(split), TEMPORAL) for split in _splits(options) if len(split) == size]
            found += [(work, f"{size} of them", way) for way in (HARDWARE, MPS)]
    return list(dict.fromkeys(found))


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    rows = []
    for block in compared(measurements):
        exclusive = [m.results[0]["units_per_second"] for m in block if m.way == EXCLUSIVE]
        if not exclusive:
            continue
        base = statistics.fmean(exclusive)
        totals = {m.way: sum(r["units_per_second"] for r in m.results) for m in block if m.way in {HARDWARE, MPS}}
        for m in block:
            own = m.way == TEMPORAL
            each = [r["units_per_second"] for r in m.results]
            figures = m.figures | throughput(each, m.asked if own else (), base, totals.get(HARDWARE))
            for index, result in enumerate(m.results, 1):
                if result["step_p99_ms"] is not None:
                    figures |= {f"p50_{index}_ms": result["step_p50_ms"], f"p99_{index}_ms": result["step_p99_ms"]}
                    figures[f"steps_{index}"] = result["steps"]
            rows.append(Row(block[0].block.partition("×")[0], m.row, m.way, figures))
    return rows


def estimate(options: Options) -> float:
    splits = _splits(options)
    sizes = {len(split) for split in splits}
    begin = BEGIN_S * (1 + any(size > 2 for size in sizes))
    ours = windows_s(len(splits), options.seconds)
    baselines = windows_s(4 * len(sizes), min(options.seconds, BASELINE_S))
    return len(options.some(PAIRED)) * (begin + options.repeat * (ours + baselines))


def _trains_at_30(row: Row) -> bool:
    """Its p99 is asked for: of fewer than a hundred steps it would be the longest."""
    return row.way == TEMPORAL and WORKS[row.work].kind == "training" and row.row == "30/70"


PART = Part(
    "pairs",
    "Throughput of several together, in percent of an exclusive run (mean of the one before and the one after)",
    15.0,
    (
        TOTAL,
        Column("over_hardware_points", ABOVE_HARDWARE, "high", 2, (Bar(0.0, lambda row: row.way == TEMPORAL),)),
        SPLIT_ERROR,
        Column("per_second", "units/s"),
        Column("p50_1_ms", "p50 step 1, ms"),
        Column(
            "p99_1_ms",
            "p99 step 1, ms",
            "low",
            1,
            (Bar(120.0, _trains_at_30),),
        ),
        Column("steps_1", "of steps", "high", 0, (Bar(100.0, _trains_at_30),)),
        Column("p50_2_ms", "p50 step 2, ms"),
        Column("p99_2_ms", "p99 step 2, ms"),
        Column("nvml_percent", "NVML"),
    ),
    measure,
    derive,
    estimate,
    rows,
    PAIRED,
    SPLITS,
)
