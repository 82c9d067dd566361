"""Inference replicas packed onto one GPU: 4 of 24 % and 8 of 12 % of the SMs, with and without the right to use what is
idle, beside as many processes under plain MPS, under MPS that caps each to the same SMs, and under time slicing.

Replicas of the model as one CUDA graph, as inference engines run it, wait for the GPU. Of the eager one, which waits
for its host most of the time, each is as fast as its cores are, under whatever MPS.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product
from typing import Final

from benchmarks.suite.parts.part import (
    BEGIN_S,
    BURST,
    CAPPED,
    EXCLUSIVE,
    HARDWARE,
    MPS,
    SPATIAL,
    Bench,
    Options,
    Part,
    windows_s,
)
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.stats import mean_distance_percent
from benchmarks.suite.report.tables import Bar, Column, Labels, Row, compared
from benchmarks.suite.stage import Stage

WORKS: Final = ("graph", "resnet50-infer8")
SIZES: Final = ((4, 24.0), (8, 12.0))
MEMORY: Final = "6G"
"""Of each: eight of them, and as many beside them, fit on a card of 80 GB."""
AGAINST: Final = {BURST: MPS, SPATIAL: CAPPED}
"""What each of ours is compared with, in a block of their own."""


def measure(bench: Bench) -> None:
    """Ours and what they are compared with are all there before one of them works: where the driver put their memory,
    and how many contexts there are, is worth 4 %."""
    options = bench.options
    for work, (size, sm_percent), way in product(options.some(WORKS), SIZES, AGAINST):
        if options.shared(way):
            block = named(size, work)
            with bench.block(block) as stage:
                _measure(bench, stage, block, work, size, sm_percent, way)


def _measure(bench: Bench, stage: Stage, block: str, work: str, size: int, sm_percent: float, way: str) -> None:
    options, row = bench.options, of_each(sm_percent)
    burst = ("--burst",) if way == BURST else ()
    beside = _beside(options, way)
    groups = {EXCLUSIVE: [stage.plain(work)]} if EXCLUSIVE in beside else {}
    if HARDWARE in beside:
        groups[HARDWARE] = [*groups[EXCLUSIVE], *(stage.plain(work) for _ in range(size - 1))]
    theirs = [stage.mps(work, None if burst else sm_percent) for _ in range(size)]
    ours = [stage.vgpu(SPATIAL, work, sm_percent, *burst, memory=MEMORY) for _ in range(size)]
    groups |= {AGAINST[way]: theirs, way: ours}
    stage.ready()
    for repeat in range(options.repeat):
        for name, sharers in (*groups.items(), (AGAINST[way], theirs)):  # before and after
            bench.keep(repeat, block, row, name, stage.window(sharers, options.seconds))


def named(size: int, work: str) -> str:
    return f"{size} × {work}"


def of_each(sm_percent: float) -> str:
    return f"{sm_percent:g} % each"


def rows(options: Options) -> list[Labels]:
    found: list[Labels] = []
    for work, (size, sm_percent), way in product(options.some(WORKS), SIZES, AGAINST):
        if options.shared(way):
            ways = (*_beside(options, way), AGAINST[way], way)
            found += [(named(size, work), of_each(sm_percent), each) for each in ways]
    return found


def _beside(options: Options, way: str) -> tuple[str, ...]:
    """What else is measured where ``way`` is."""
    if way != SPATIAL:
        return ()
    return (EXCLUSIVE, HARDWARE) if options.shared(HARDWARE) else (EXCLUSIVE,)


def total_of(measurement: Measurement) -> float:
    return float(sum(result["units_per_second"] for result in measurement.results))


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    rows = []
    for block in compared(measurements):
        totals = {way: statistics.fmean(total_of(m) for m in block if m.way == way) for way in {m.way for m in block}}
        for m in block:
            total = total_of(m)
            figures = m.figures | {"per_second": total}
            if EXCLUSIVE in totals:
                figures["total_percent"] = 100 * total / totals[EXCLUSIVE]
            if m.way != EXCLUSIVE:
                figures["distance_percent"] = mean_distance_percent([r["units_per_second"] for r in m.results])
            if AGAINST.get(m.way) in totals:
                figures["against_percent"] = 100 * total / totals[AGAINST[m.way]]
            rows.append(Row(m.block, m.row, m.way, figures))
    return rows


def estimate(options: Options) -> float:
    inside = sum(options.shared(way) for way in AGAINST)
    outside = options.shared(SPATIAL) * (1 + options.shared(HARDWARE)) + 2 * inside
    each = BEGIN_S * 1.4 * inside + options.repeat * windows_s(outside + inside, options.seconds)
    return len(options.some(WORKS)) * len(SIZES) * each


def _ours(row: Row) -> bool:
    return row.way in AGAINST


PART = Part(
    "packing",
    "Replicas of ResNet-50 inference, bs 8, graph and eager: with burst against MPS, hard caps against its caps",
    8.0,
    (
        Column("against_percent", "% of MPS alike", "high", 1, (Bar(98.0, _ours),)),
        Column("distance_percent", "furthest from the mean, %", "low", 1, (Bar(3.0, _ours),)),
        Column("per_second", "img/s"),
        Column("total_percent", "% of one alone"),
        Column("nvml_percent", "NVML"),
    ),
    measure,
    derive,
    estimate,
    rows,
    WORKS,
)
