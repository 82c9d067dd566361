"""What the hook adds to one launch in a vGPU of 100 %, to one under a limit, on an idle GPU and behind a queue, and to
cuMemAlloc with cuMemFree of 2 MiB.

Its calls and the driver's own in turns, in one process (``benchmarks/micro/launch.py``; medians of paired differences).
A round is fifty launches: where one of them waits in the gate, as behind a full window, all are that much dearer. The
tenth of the rounds with least tells what a launch costs without.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.micro import launch
from benchmarks.suite.parts.part import TEMPORAL, Bench, Options, Part
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.tables import Bar, Column, Labels, Row
from benchmarks.suite.stage import Outcome

KERNEL: Final = "empty kernel"
ALLOCATION: Final = "cuMemAlloc, cuMemFree"
LAUNCHES: Final = (KERNEL, "100", TEMPORAL)
LIMITED: Final = f"{launch.LIMIT_PERCENT}"
QUEUED: Final = f"{launch.LIMIT_PERCENT}, behind a queue"


def measure(bench: Bench) -> None:
    with bench.block(KERNEL), tempfile.TemporaryDirectory() as scratch:
        program = launch.compile_launch(Path(scratch))
        for repeat in range(bench.options.repeat):
            node = bench.ground.node(TEMPORAL)
            for block, row, turns, percent, added in (
                (KERNEL, "100", launch.LAUNCHES, 100, "added_ns"),
                (KERNEL, LIMITED, launch.LIMITED, launch.LIMIT_PERCENT, "added_under_limit_ns"),
                (KERNEL, QUEUED, launch.QUEUED, launch.LIMIT_PERCENT, "added_under_limit_ns"),
                (ALLOCATION, "100", launch.ALLOCATIONS, 100, "added_to_allocation_ns"),
            ):
                answer = launch.in_turns(node, program, turns, percent)
                if not answer.pop("hooked"):
                    raise RuntimeError("the program went past the hook both times")
                answer[added] = answer.pop("added_ns")
                bench.keep(repeat, block, row, TEMPORAL, Outcome((), answer), [float(percent)])


def rows(options: Options) -> list[Labels]:
    return [LAUNCHES, *((KERNEL, row, TEMPORAL) for row in (LIMITED, QUEUED)), (ALLOCATION, "100", TEMPORAL)]


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    return [Row(m.block, m.row, m.way, m.figures) for m in measurements]


def estimate(options: Options) -> float:
    return 5 + 18 * options.repeat


PART = Part(
    "launch",
    "One launch, one allocation and its free, in nanoseconds of the host",
    0.0,
    (
        Column("added_ns", "added by the hook", "low", 1, (Bar(30.0, lambda row: row.labels == LAUNCHES),)),
        Column("added_low_ns", "95 % from"),
        Column("added_high_ns", "to"),
        Column("added_least_ns", "in the tenth of rounds with least"),
        Column("added_under_limit_ns", "under a limit", "low", 0),
        Column(
            "added_to_allocation_ns", "to an allocation", "low", 0, (Bar(1000.0, lambda row: row.work == ALLOCATION),)
        ),
        Column("gated_ns", "through the hook"),
        Column("mean_gated_ns", "in the mean"),
        Column("direct_ns", "direct"),
    ),
    measure,
    derive,
    estimate,
    rows,
)
