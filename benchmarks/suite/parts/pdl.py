"""Programmatic dependent launches: whether kernels that may overlap their predecessor still do so under the hook.

A chain of kernels (``chain.py``) with the attribute, without a vGPU, at 100 % and held to 50 %; and without the
attribute, to see what there is to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.suite.parts.part import EXCLUSIVE, TEMPORAL, Bench, Options, Part, windows_s
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.tables import Bar, Column, Labels, Row, compared

CHAIN: Final = "benchmarks.suite.workloads.chain"
PDL: Final = "pdl"
SERIAL: Final = "serial"
WORK: Final = "chain"
PERCENTS: Final = (100, 50)


def measure(bench: Bench) -> None:
    with bench.block(PDL) as stage:
        serial, plain = stage.plain(SERIAL, CHAIN), stage.plain(PDL, CHAIN)
        vgpu = stage.vgpu(TEMPORAL, PDL, 100, program=CHAIN)
        stage.ready()
        for repeat in range(bench.options.repeat):
            seconds = bench.options.seconds
            bench.keep(repeat, PDL, SERIAL, EXCLUSIVE, stage.window([serial], seconds))
            bench.keep(repeat, PDL, PDL, EXCLUSIVE, stage.window([plain], seconds))
            for percent in PERCENTS:
                stage.split([vgpu], [percent])
                bench.keep(repeat, PDL, f"{percent} %", TEMPORAL, stage.window([vgpu], seconds), [percent])


def rows(options: Options) -> list[Labels]:
    alone = [(WORK, row, EXCLUSIVE) for row in (SERIAL, PDL)]
    return [*alone, *((WORK, f"{percent} %", TEMPORAL) for percent in PERCENTS)]


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    rows = []
    for block in compared(measurements):
        plain = next((m.results[0]["overlapped_percent"] for m in block if m.row == PDL), 0.0)
        for m in block:
            figures = {name: m.results[0][name] for name in ("overlapped_percent", "kernel_us", "chains")}
            if m.way == TEMPORAL and plain:
                figures["kept_percent"] = 100 * figures["overlapped_percent"] / plain
            rows.append(Row(WORK, m.row, m.way, figures))
    return rows


def estimate(options: Options) -> float:
    return 10 + windows_s(4 * options.repeat, options.seconds)


PART = Part(
    "pdl",
    "Kernels that may begin before their predecessor has ended, launched with that attribute",
    2.0,
    (
        Column("overlapped_percent", "overlapped, %", "high"),
        Column("kept_percent", "% of without a vGPU", "high", 1, (Bar(95.0, lambda row: row.way == TEMPORAL),)),
        Column("kernel_us", "time per kernel, µs", "low", 2),
        Column("chains", "chains", digits=0),
    ),
    measure,
    derive,
    estimate,
    rows,
)
