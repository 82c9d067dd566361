"""Whether a vGPU of p % gets p % of the GPU's time, alone and in company, by the kernels' device timestamps.

*Busy* is the union of a process's kernel intervals (by CUPTI; a graph notes its own) over the wall time of the window;
*taken* closes the gaps in it that are shorter than a switch to another process, which nobody else could have used.
NVML's utilisation of the whole GPU has to agree with them: it counts some of the short gaps and not others, so it is
held against the time between *busy* and *taken*, of all sharers together. Both add up to more than NVML can show where
kernels of two were on the GPU in turns. Shares are judged by what was taken. What a vGPU is owed is its
share, or what the work takes when it has the GPU to itself, whichever is less. In spatial mode two vGPUs that do not
fit the card together take turns, and their quotas are shares of the time: the same is asked of those.

A host-bound work computes only while its host feeds the GPU. For those the vGPU's books count: alone what it is
charged, the time held less the idle gaps that were observed, for a limit is about that; in company all the time held,
for nobody else could use those gaps: a switch takes longer. It is never above the share, and below it at most for as
long as work waited for a lease (looked at fifty times a second, and judged second by second, for such a host is now
fast, now slow).

Of those who work together the throughput counts as well: in sum, in percent of the exclusive window of the same
repeat, and how it is split. The records that CUPTI keeps cost both the same; ``pairs`` measures without them.

Two of the same without any limit, under hardware time slicing and under plain MPS, stand beside them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.suite.parts.part import (
    BEGIN_S,
    EXCLUSIVE,
    HARDWARE,
    MPS,
    SPATIAL,
    TEMPORAL,
    Bench,
    Options,
    Part,
    fit,
    windows_s,
)
from benchmarks.suite.parts.throughput import ABOVE_HARDWARE, SPLIT_ERROR, TOTAL, throughput
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.tables import Bar, Column, Labels, Row, compared
from benchmarks.suite.stage import Stage
from benchmarks.suite.workloads.catalogue import SHARED, WORKS

TURNS = "gemm4096"
TURN_SMS, TURN_QUOTAS = 60.0, (30.0, 65.0)
"""Percent of the SMs of each of two, and of the time: as much as is admitted."""
ALONE = (10.0, 30.0, 50.0, 70.0, 90.0)
UNLIMITED_S = 5.0
SPLITS = ((10.0, 90.0), (30.0, 70.0), (50.0, 50.0), (20.0, 30.0, 50.0))


def label(split: Sequence[float]) -> str:
    return "/".join(f"{percent:g}" for percent in split)


TWO = "2 of them"
IN_TURNS = f"{label(TURN_QUOTAS)} of the time"


def _splits(options: Options) -> tuple[tuple[float, ...], ...]:
    return options.splits or (*((percent,) for percent in ALONE), *SPLITS)


def measure(bench: Bench) -> None:
    options = bench.options
    small = [split for split in _splits(options) if len(split) < 3]
    larger = [split for split in _splits(options) if len(split) > 2]
    for work in options.some(SHARED):
        with bench.block(work) as stage:
            plain = stage.plain(work)
            unlimited = {HARDWARE: [plain, stage.plain(work)]} if options.shared(HARDWARE) else {}
            unlimited |= {MPS: [stage.mps(work), stage.mps(work)]} if options.shared(MPS) else {}
            ours = options.shared(TEMPORAL)
            sharers = [stage.vgpu(TEMPORAL, work, 50), stage.vgpu(TEMPORAL, work, 50)] if ours else []
            stage.ready(stamps=True)
            for splits in (small, larger):
                for repeat in range(options.repeat):
                    if splits is small:
                        outcome = stage.window([plain], options.seconds, stamps=True)
                        bench.keep(repeat, work, EXCLUSIVE, EXCLUSIVE, outcome)
                        for way, two in unlimited.items():
                            outcome = stage.window(two, min(options.seconds, UNLIMITED_S), stamps=True)
                            bench.keep(repeat, work, TWO, way, outcome)
                    for split in splits if ours else ():
                        # The other one sleeps with what is left.
                        fit(stage, work, sharers, split if len(split) > 1 else (*split, 100 - split[0]), stamps=True)
                        outcome = stage.window(sharers[: len(split)], options.seconds, stamps=True, watch_waits=True)
                        bench.keep(repeat, work, label(split), TEMPORAL, outcome, split)
            if work == TURNS and options.shared(SPATIAL) and small:
                _turns(bench, work)


def rows(options: Options) -> list[Labels]:
    found: list[Labels] = []
    for work in options.some(SHARED):
        found.append((work, EXCLUSIVE, EXCLUSIVE))
        found += [(work, TWO, way) for way in (HARDWARE, MPS) if options.shared(way)]
        if options.shared(TEMPORAL):
            found += [(work, label(split), TEMPORAL) for split in _splits(options)]
        if work == TURNS and options.shared(SPATIAL) and any(len(split) < 3 for split in _splits(options)):
            found.append((work, IN_TURNS, SPATIAL))
    return found


def _turns(bench: Bench, work: str) -> None:
    with Stage(bench.ground) as stage:
        quotas = [("--quota-request", f"{quota:g}", "--quota-limit", f"{quota:g}") for quota in TURN_QUOTAS]
        sharers = [stage.vgpu(SPATIAL, work, TURN_SMS, *quota) for quota in quotas]
        stage.ready(stamps=True)
        for repeat in range(bench.options.repeat):
            outcome = stage.window(sharers, bench.options.seconds, stamps=True)
            bench.keep(repeat, work, IN_TURNS, SPATIAL, outcome, TURN_QUOTAS)


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    rows = []
    for block in compared(measurements):
        work = WORKS[block[0].block]
        alone = next((m.results[0] for m in block if m.way == EXCLUSIVE), None)
        demand = None if alone is None else alone["taken_ratio"]
        hardware = next((_units(m) for m in block if m.way == HARDWARE), None)
        for m in block:
            taken = [100 * r["taken_ratio"] for r in m.results]
            figures = {f"taken{i}_percent": part for i, part in enumerate(taken, 1)} | m.figures
            busy = [100 * r["busy_ratio"] for r in m.results]
            figures |= {f"busy{i}_percent": part for i, part in enumerate(busy, 1)}
            if "nvml_percent" in m.figures:
                figures["nvml_off_points"] = apart(m.figures["nvml_percent"], sum(busy), sum(taken))
            if len(m.results) > 1 and alone is not None:
                each = [r["units_per_second"] for r in m.results]
                asked = m.asked if m.way == TEMPORAL else ()
                figures |= throughput(each, asked, alone["units_per_second"], hardware)
            if m.asked and demand is not None:
                if work.host_bound:
                    company = len(m.asked) > 1
                    shares = zip(m.results, m.asked, strict=True)
                    figures["token_error_points"] = max(token_error(r, share, company) for r, share in shares)
                    figures |= {f"token{i}_percent": 100 * given(r, company) for i, r in enumerate(m.results, 1)}
                else:
                    owed = [min(share, 100 * demand) for share in m.asked]
                    figures["error_points"] = max(abs(a - b) for a, b in zip(taken, owed, strict=True))
                if all("waiting_ratio" in r for r in m.results):  # else of an earlier suite
                    figures |= {f"charged{i}_percent": 100 * r["charged_ratio"] for i, r in enumerate(m.results, 1)}
                    figures["waiting_percent"] = max(100 * r["waiting_ratio"] for r in m.results)
            rows.append(Row(m.block, m.row, m.way, figures))
    return rows


def _units(m: Measurement) -> float:
    return math.fsum(r["units_per_second"] for r in m.results)


def apart(nvml_percent: float, busy_percent: float, taken_percent: float) -> float:
    """Points that NVML is below what was busy, or above what was taken."""
    return max(0.0, busy_percent - nvml_percent, nvml_percent - taken_percent)


def _by_stamps(row: Row) -> bool:
    return row.way in {TEMPORAL, SPATIAL} and not WORKS[row.work].host_bound


def _by_tokens(row: Row) -> bool:
    return row.way in {TEMPORAL, SPATIAL} and WORKS[row.work].host_bound


def given(result: Mapping[str, Any], in_company: bool) -> float:
    """Its token time over the wall time."""
    ratio: float = result["held_ratio" if in_company else "charged_ratio"]
    return ratio


def token_error(result: Mapping[str, Any], share: float, in_company: bool) -> float:
    """Points of GPU time above ``share``; or below it, as far as work waited in the same second. (Of runs that have no
    such parts: as far as it waited at all.)"""
    parts = result.get("parts") or [{**result, "seconds": 1.0}]
    seconds: float = sum(part["seconds"] for part in parts)
    below: float = sum(missing(part, share, in_company) * part["seconds"] for part in parts) / seconds
    above: float = 100 * max(result["charged_ratio"], given(result, in_company)) - share
    return max(above, below)


def missing(part: Mapping[str, Any], share: float, in_company: bool) -> float:
    """Points of GPU time that it did not have although it waited."""
    waited: float = 100 * part["waiting_ratio"]
    return max(0.0, min(share - 100 * given(part, in_company), waited))


def estimate(options: Options) -> float:
    splits, works = _splits(options), len(options.some(SHARED))
    begin = BEGIN_S + 8 + (BEGIN_S if any(len(split) > 2 for split in splits) else 0)
    turns = BEGIN_S + windows_s(options.repeat, options.seconds, stamps=True)
    turning = TURNS in options.some(SHARED) and options.shared(SPATIAL)
    ours = windows_s(options.repeat * (len(splits) * options.shared(TEMPORAL) + 1), options.seconds, stamps=True)
    ways = options.shared(HARDWARE) + options.shared(MPS)
    unlimited = windows_s(options.repeat * ways, min(options.seconds, UNLIMITED_S), stamps=True)
    return works * (begin + ours + unlimited) + turning * turns


PART = Part(
    "shares",
    "GPU time against what was asked, in percent of the window and points of it",
    10.0,
    (
        Column("error_points", "share error, points", "low", 2, (Bar(1.0, _by_stamps),)),
        Column("token_error_points", "token error, points", "low", 2, (Bar(1.0, _by_tokens),)),
        TOTAL,
        SPLIT_ERROR,
        Column("over_hardware_points", ABOVE_HARDWARE, "high", 2),
        Column("nvml_off_points", "NVML off, points", "low", 1, (Bar(3.0, lambda row: row.way == TEMPORAL),)),
        *(Column(f"taken{i}_percent", f"taken {i}", digits=2) for i in (1, 2, 3)),
        *(Column(f"busy{i}_percent", f"busy {i}", digits=2) for i in (1, 2, 3)),
        *(Column(f"token{i}_percent", f"token time {i}", digits=2) for i in (1, 2, 3)),
        *(Column(f"charged{i}_percent", f"charged {i}", digits=2) for i in (1, 2, 3)),
        Column("waiting_percent", "work waited, most"),
        Column("nvml_percent", "NVML"),
        Column("woken_late_ms", "host late at worst, ms", "low"),
        Column("answered_late_ms", "node late, ms", "low"),
    ),
    measure,
    derive,
    estimate,
    rows,
    SHARED,
    (*((percent,) for percent in ALONE), *SPLITS),
)
