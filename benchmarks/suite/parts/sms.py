"""The SMs that vGPUs of several sizes are granted in spatial mode, and what they get done with them, each alone on the
GPU; beside it a program under plain MPS that is capped to as many, and one without a vGPU.

Asked is what ``--sm`` says, granted what the program's driver tells. Where power is short, fewer SMs run faster, so p %
of them do more than p % of the work.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from benchmarks.suite.parts.part import BEGIN_S, CAPPED, EXCLUSIVE, SPATIAL, Bench, Options, Part, rotated, windows_s
from benchmarks.suite.parts.shares import ALONE, label
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.tables import Bar, Column, Labels, Row, compared
from benchmarks.suite.stage import Sharer, Stage
from vgpu.node.link import ControlLink
from vgpu.packing.partition import SM_MINIMUM, SM_STEP

WORKS: Final = ("gemm4096", "resnet50-train")
SIZES: Final = tuple((percent,) for percent in ALONE)


def _sizes(options: Options) -> tuple[tuple[float, ...], ...]:
    return tuple(split for split in options.splits or SIZES if len(split) == 1)


def measure(bench: Bench) -> None:
    for work in bench.options.some(WORKS) if _sizes(bench.options) else ():
        with bench.block(work) as stage:
            _measure(bench, stage, work)


def _measure(bench: Bench, stage: Stage, work: str) -> None:
    """All are there before one of them works: a process has its SMs for life."""
    sizes = _sizes(bench.options)
    plain = stage.plain(work)
    ours = {size: stage.vgpu(SPATIAL, work, size[0], "--overcommit") for size in sizes}
    theirs = {size: stage.mps(work, size[0]) for size in sizes}
    stage.ready()

    def keep(repeat: int, row: str, way: str, sharer: Sharer, asked: Sequence[float] = ()) -> None:
        outcome = stage.window([sharer], bench.options.seconds)
        if way == SPATIAL:
            outcome = replace(outcome, figures=outcome.figures | granted(sharer, bench.ground.sm_count()))
        bench.keep(repeat, work, row, way, outcome, asked)

    for repeat in range(bench.options.repeat):
        keep(repeat, EXCLUSIVE, EXCLUSIVE, plain)
        for size in sizes:
            for way, sharer in rotated([(SPATIAL, ours[size]), (CAPPED, theirs[size])], repeat):
                keep(repeat, label(size), way, sharer, size)
        keep(repeat, EXCLUSIVE, EXCLUSIVE, plain)


def granted(sharer: Sharer, sm_count: int) -> dict[str, float]:
    """As its program's driver says; 0 if nobody has told."""
    assert sharer.node is not None
    with ControlLink(sharer.node.control_socket) as link:
        told = max((process.sm_count for process in link.inspect(sharer.name).processes), default=0)
    return {"granted_sms": float(told), "sm_count": float(sm_count)}


def nearest(percent: float, sm_count: float) -> float:
    """To so much of the card, of what the driver can grant."""
    return min(sm_count, max(SM_MINIMUM, SM_STEP * round(percent * sm_count / 100 / SM_STEP)))


def rows(options: Options) -> list[Labels]:
    sizes = _sizes(options)
    found: list[Labels] = []
    for work in options.some(WORKS) if sizes else ():
        found.append((work, EXCLUSIVE, EXCLUSIVE))
        found += [(work, label(size), way) for size in sizes for way in (SPATIAL, CAPPED)]
    return found


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    rows = []
    for block in compared(measurements):
        exclusive = [m.results[0]["units_per_second"] for m in block if m.way == EXCLUSIVE]
        capped = {m.row: m.results[0]["units_per_second"] for m in block if m.way == CAPPED}
        for m in block:
            figures = m.figures | {"per_second": m.results[0]["units_per_second"]}
            if exclusive:
                figures["native_percent"] = 100 * figures["per_second"] / statistics.fmean(exclusive)
            if m.way == SPATIAL:
                figures["nearest_sms"] = nearest(m.asked[0], figures["sm_count"])
                figures["off_sms"] = abs(figures["granted_sms"] - figures["nearest_sms"])
                if capped.get(m.row):
                    figures["against_percent"] = 100 * figures["per_second"] / capped[m.row]
            rows.append(Row(m.block, m.row, m.way, figures))
    return rows


def estimate(options: Options) -> float:
    count = len(_sizes(options))
    windows = windows_s(options.repeat * (2 * count + 2), options.seconds)
    return len(options.some(WORKS)) * (BEGIN_S * (0.6 + 0.15 * count) + windows) * (count > 0)


PART = Part(
    "sms",
    "One vGPU alone in spatial mode: the SMs that it was granted, and its throughput",
    4.0,
    (
        Column("off_sms", "SMs from the nearest possible", "low", 0, (Bar(2.0, lambda row: row.way == SPATIAL),)),
        Column("granted_sms", "granted", digits=0),
        Column("nearest_sms", "nearest", digits=0),
        Column("native_percent", "% of native", "high"),
        Column("against_percent", "% of MPS with the same cap", "high"),
        Column("per_second", "units/s"),
        Column("nvml_percent", "NVML"),
    ),
    measure,
    derive,
    estimate,
    rows,
    WORKS,
    SIZES,
)
