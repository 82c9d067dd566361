"""What the gate adds to one launch in a vGPU of 100 %: the hook's and the driver's own in turns, in one process
(``benchmarks/launch.py``; medians of paired differences)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import launch
from benchmarks.gpu.parts.part import TEMPORAL, Bench, Options, Part
from benchmarks.gpu.records import Measurement
from benchmarks.gpu.stage import Outcome
from benchmarks.gpu.tables import Bar, Column, Row

BLOCK: Final = "empty kernel"


def measure(bench: Bench) -> None:
    with bench.block(BLOCK), tempfile.TemporaryDirectory() as scratch:
        program = launch.compile_launch(Path(scratch))
        for repeat in range(bench.options.repeat):
            answer = launch.in_turns(bench.ground.node(TEMPORAL), program)
            if not answer.pop("hooked"):
                raise RuntimeError("the program went past the hook both times")
            bench.keep(repeat, BLOCK, "100", TEMPORAL, Outcome((), answer), [100.0])


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    return [Row(m.block, m.row, m.way, m.figures) for m in measurements]


def estimate(options: Options) -> float:
    return 5 + 5 * options.repeat


PART = Part(
    "launch",
    "One launch, in nanoseconds of the host",
    0.0,
    (
        Column("added_ns", "added by the hook", "low", 1, (Bar(30.0),)),
        Column("gated_ns", "through the hook"),
        Column("direct_ns", "direct"),
    ),
    measure,
    derive,
    estimate,
)
