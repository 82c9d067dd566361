"""A vGPU alone at 10, 50 and 100 %: its throughput in percent of the native one, and of that part of it. Where half the
time gives more than half the work, power that was saved went into clocks. iQIYI claims more than 90 % of proportional
native throughput; 99 is asked for here.

Native are two processes, one before ours and one after: of programs that wait for their host one is 5 % faster than
another, for as long as both live, and how far these two are apart says what can be told. What the hook costs within one
process is told by the part ``gate``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from benchmarks.suite.parts.part import BEGIN_S, EXCLUSIVE, TEMPORAL, Bench, Options, Part, windows_s
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.tables import Bar, Column, Labels, Row, compared

WORKS: Final = ("gemm4096", "resnet50-train", "resnet50-infer8", "bert-infer")
PERCENTS: Final = (10.0, 50.0, 100.0)


def measure(bench: Bench) -> None:
    options = bench.options
    for work in options.some(WORKS):
        with bench.block(work) as stage:
            before, after, ours = stage.plain(work), stage.plain(work), stage.vgpu(TEMPORAL, work, PERCENTS[0])
            stage.ready()
            for repeat in range(options.repeat):
                bench.keep(repeat, work, EXCLUSIVE, EXCLUSIVE, stage.window([before], options.seconds))
                for percent in PERCENTS:
                    stage.split([ours], [percent])
                    outcome = stage.window([ours], options.seconds)
                    bench.keep(repeat, work, f"{percent:g}", TEMPORAL, outcome, [percent])
                bench.keep(repeat, work, EXCLUSIVE, EXCLUSIVE, stage.window([after], options.seconds))


def rows(options: Options) -> list[Labels]:
    return [
        labels
        for work in options.some(WORKS)
        for labels in ((work, EXCLUSIVE, EXCLUSIVE), *((work, f"{percent:g}", TEMPORAL) for percent in PERCENTS))
    ]


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    rows = []
    for block in compared(measurements):
        exclusive = [m.results[0]["units_per_second"] for m in block if m.way == EXCLUSIVE]
        for m in block:
            figures = m.figures | {"per_second": m.results[0]["units_per_second"]}
            if exclusive:
                figures["native_percent"] = 100 * figures["per_second"] / statistics.fmean(exclusive)
                if m.asked:
                    figures["proportional_percent"] = 100 * figures["native_percent"] / m.asked[0]
                    figures["apart_percent"] = 100 * (max(exclusive) / min(exclusive) - 1)
            rows.append(Row(m.block, m.row, m.way, figures))
    return rows


def estimate(options: Options) -> float:
    windows = windows_s(options.repeat * (len(PERCENTS) + 2), options.seconds)
    return len(options.some(WORKS)) * (BEGIN_S + windows)


PART = Part(
    "percents",
    "One vGPU alone, in percent of native throughput",
    8.0,
    (
        Column(
            "proportional_percent", "% of its part of native", "high", 1, (Bar(99.0, lambda row: row.way == TEMPORAL),)
        ),
        Column("native_percent", "% of native", "high", 2),
        Column("apart_percent", "native apart, %"),
        Column("per_second", "units/s"),
        Column("nvml_percent", "NVML"),
    ),
    measure,
    derive,
    estimate,
    rows,
    WORKS,
)
