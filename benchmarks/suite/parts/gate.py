"""What the gate costs a program that has the whole GPU: 50 steps through the hook and 50 past it, in one process.

The process runs in a vGPU of 100 % that nobody contends; ``bypass.c`` switches its launches between the hook and the
driver. *Added* is the median over pairs of turns of what the gate added, with a bootstrapped interval.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.suite.parts.part import BEGIN_S, TEMPORAL, Bench, Options, Part, windows_s
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.stats import bootstrap
from benchmarks.suite.report.tables import Bar, Column, Labels, Row

WORKS: Final = ("resnet50-train", "resnet50-infer8")
WHOLE: Final = "100"


def measure(bench: Bench) -> None:
    for work in bench.options.some(WORKS):
        with bench.block(work) as stage:
            sharer = stage.switched(work)
            stage.ready()
            for repeat in range(bench.options.repeat):
                outcome = stage.window([sharer], bench.options.seconds)
                bench.keep(repeat, work, WHOLE, TEMPORAL, outcome, [100.0])


def rows(options: Options) -> list[Labels]:
    return [(work, WHOLE, TEMPORAL) for work in options.some(WORKS)]


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    return [Row(m.block, m.row, m.way, figures(m.results[0])) for m in measurements]


def figures(result: dict[str, Any]) -> dict[str, float]:
    added = [100 * (a - b) / b for a, b in zip(result["gated_s"], result["direct_s"], strict=True)]
    low, high = bootstrap(added, statistics.median)
    return {
        "added_percent": statistics.median(added),
        "added_low_percent": low,
        "added_high_percent": high,
        "pairs": len(added),
        "step_ms": 1e3 * statistics.median(result["direct_s"]) / result["steps"],
        "gated_launches": result["gated_launches"],
        "direct_launches": result["direct_launches"],
    }


def estimate(options: Options) -> float:
    return len(options.some(WORKS)) * (BEGIN_S + windows_s(options.repeat, options.seconds + 6))


PART = Part(
    "gate",
    "A program at 100 %, gate on and off every 50 steps in one process",
    60.0,
    (
        Column("added_percent", "added by the gate, %", "low", 3, (Bar(0.5),)),
        Column("added_low_percent", "95 % from", digits=3),
        Column("added_high_percent", "to", digits=3),
        Column("pairs", "pairs of turns", digits=0),
        Column("step_ms", "step past the gate, ms", digits=2),
        Column("gated_launches", "launches through", digits=0),
        Column("direct_launches", "past it", digits=0),
    ),
    measure,
    derive,
    estimate,
    rows,
    WORKS,
)
