"""What all parts have in common: the context they measure in, and how a part is described."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from benchmarks.suite.report.records import Measurement, Writer
from benchmarks.suite.report.tables import Column, Labels, Row
from benchmarks.suite.stage import REAL, Ground, Outcome, Sharer, Stage

BEGIN_S: Final = 25.0
"""What it takes until the PyTorch processes of a block have warmed up, about."""
EXCLUSIVE: Final = "exclusive"
HARDWARE: Final = "hardware"
MPS: Final = "mps"
TEMPORAL: Final = "temporal"
SPATIAL: Final = "spatial"
CAPPED: Final = "mps-capped"
BURST: Final = "spatial-burst"
WAYS: Final = (HARDWARE, MPS, CAPPED, TEMPORAL, SPATIAL, BURST)
"""How several share a GPU. The exclusive baseline is always measured."""


@dataclass(frozen=True, slots=True)
class Options:
    """``works``, ``splits``, ``ways``: what the command line chose; empty: what the part has by itself."""

    seconds: float
    repeat: int = 1
    works: tuple[str, ...] = ()
    splits: tuple[tuple[float, ...], ...] = ()
    ways: tuple[str, ...] = ()

    def shared(self, way: str) -> bool:
        """Whether that way of sharing is wanted."""
        return not self.ways or way in self.ways

    def some(self, works: Sequence[str]) -> tuple[str, ...]:
        """Those of ``works`` that were chosen."""
        return tuple(work for work in works if not self.works or work in self.works)


@dataclass(frozen=True, slots=True)
class Part:
    """``measure`` does it, ``derive`` makes rows of what was measured, ``estimate`` says how many seconds it takes, and
    ``rows`` which rows each repeat of it gives. ``works``, ``splits``: what there is to choose from."""

    name: str
    title: str
    seconds: float
    columns: tuple[Column, ...]
    measure: Callable[[Bench], None]
    derive: Callable[[Sequence[Measurement]], list[Row]]
    estimate: Callable[[Options], float]
    rows: Callable[[Options], list[Labels]]
    works: tuple[str, ...] = ()
    splits: tuple[tuple[float, ...], ...] = ()

    def found(self, measurements: Iterable[Measurement]) -> list[Row]:
        """The rows of all that was measured of this part, each with the run and repeat that it is of."""
        together: dict[tuple[str, int], list[Measurement]] = {}
        for m in measurements:
            if m.part == self.name:
                together.setdefault((m.run, m.repeat), []).append(m)
        return [replace(row, source=source) for source, same in together.items() for row in self.derive(same)]


@dataclass(slots=True)
class Bench:
    """One part of one run: where it stands, where its measurements go, who is told of progress and of what was kept."""

    part: str
    run: str
    options: Options
    ground: Ground
    writer: Writer
    told: Callable[[str], None]
    kept: Callable[[Measurement], object]

    @contextmanager
    def block(self, name: str) -> Iterator[Stage]:
        """A stage for what is compared with each other. If it fails, that is told and written down, and the run goes on
        with the next block."""
        self.told(f"{self.part}: {name}")
        try:
            with Stage(self.ground) as stage:
                yield stage
        except Exception as error:  # whatever it is, it is told in full, and other blocks do not depend on this one
            reason = "".join(traceback.format_exception(error))
            self.writer.failed(self.part, name, reason)
            self.told(f"{self.part}: {name} FAILED\n{reason}")

    def keep(
        self, repeat: int, block: str, row: str, way: str, outcome: Outcome, asked: Sequence[float] = ()
    ) -> Outcome:
        measurement = Measurement(
            self.run, self.part, repeat, block, row, way, tuple(asked), outcome.results, outcome.figures
        )
        self.writer.measured(measurement)
        self.told(f"{self.part}: {block}, {row}, {way}")
        self.kept(measurement)
        return outcome


def fit(stage: Stage, work: str, sharers: list[Sharer], split: Sequence[float], stamps: bool = False) -> list[Sharer]:
    """Temporal vGPUs of these shares: ``sharers`` resized, and as many more as it takes."""
    stage.split(sharers, split)
    while len(sharers) < len(split):
        sharers.append(stage.vgpu(TEMPORAL, work, split[len(sharers)]))
    stage.ready(stamps)
    return sharers[: len(split)]


def windows_s(count: int, seconds: float, stamps: bool = False) -> float:
    """How long ``count`` windows take, with all around them."""
    return count * (seconds + REAL.settle_s + 2 * REAL.lead_s + (REAL.profiler_s + 1) * stamps + 0.3)


Way = TypeVar("Way")


def rotated(ways: Sequence[Way], by: int) -> Iterator[Way]:
    """``ways`` in an order that changes from repeat to repeat, back and forth, so that none always follows the same
    other, nor is always the last."""
    ordered = ways[::-1] if by % 2 else ways
    for index in range(len(ways)):
        yield ordered[(index + by // 2) % len(ways)]
