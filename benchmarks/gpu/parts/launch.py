"""What the hook adds to one launch in a vGPU of 100 %, to one under a limit, and to cuMemAlloc with cuMemFree of 2 MiB.

Its calls and the driver's own in turns, in one process (``benchmarks/launch.py``; medians of paired differences).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import launch
from benchmarks.gpu.parts.part import TEMPORAL, Bench, Options, Part
from benchmarks.gpu.records import Measurement
from benchmarks.gpu.stage import Outcome
from benchmarks.gpu.tables import Bar, Column, Labels, Row

KERNEL: Final = "empty kernel"
ALLOCATION: Final = "cuMemAlloc, cuMemFree"
LAUNCHES: Final = (KERNEL, "100", TEMPORAL)


def measure(bench: Bench) -> None:
    with bench.block(KERNEL), tempfile.TemporaryDirectory() as scratch:
        program = launch.compile_launch(Path(scratch))
        for repeat in range(bench.options.repeat):
            node = bench.ground.node(TEMPORAL)
            limit = launch.LIMIT_PERCENT
            for block, percent, added, answer in (
                (KERNEL, 100, "added_ns", launch.in_turns(node, program)),
                (
                    KERNEL,
                    limit,
                    "added_under_limit_ns",
                    launch.in_turns(node, program, launch.LIMITED, limit),
                ),
                (
                    ALLOCATION,
                    100,
                    "added_to_allocation_ns",
                    launch.in_turns(node, program, launch.ALLOCATIONS),
                ),
            ):
                if not answer.pop("hooked"):
                    raise RuntimeError("the program went past the hook both times")
                answer[added] = answer.pop("added_ns")
                bench.keep(repeat, block, f"{percent}", TEMPORAL, Outcome((), answer), [float(percent)])


def rows(options: Options) -> list[Labels]:
    limited = (KERNEL, f"{launch.LIMIT_PERCENT}", TEMPORAL)
    return [LAUNCHES, limited, (ALLOCATION, "100", TEMPORAL)]


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    return [Row(m.block, m.row, m.way, m.figures) for m in measurements]


def estimate(options: Options) -> float:
    return 5 + 14 * options.repeat


PART = Part(
    "launch",
    "One launch, one allocation and its free, in nanoseconds of the host",
    0.0,
    (
        Column("added_ns", "added by the hook", "low", 1, (Bar(30.0, lambda row: row.labels == LAUNCHES),)),
        Column("added_low_ns", "95 % from"),
        Column("added_high_ns", "to"),
        Column("added_under_limit_ns", "under a limit", "low", 0),
        Column(
            "added_to_allocation_ns", "to an allocation", "low", 0, (Bar(1000.0, lambda row: row.work == ALLOCATION),)
        ),
        Column("gated_ns", "through the hook"),
        Column("direct_ns", "direct"),
    ),
    measure,
    derive,
    estimate,
    rows,
)
