"""A metric: its description, its subject, and what it is taken from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from vgpu.errors import VgpuError
from vgpu.protocol.messages import GpuStatus, MetricsSnapshot, ProcessReading, VgpuStatus
from vgpu.protocol.meters import GpuMeters, Histogram, VgpuMeters
from vgpu.protocol.usage import UserUsage

UNITS: Final = ("seconds", "bytes", "ratio", "watts", "celsius", "hertz")


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Of(StrEnum):
    """The kind of subject that a metric belongs to."""

    NODE = "node"
    GPU = "GPU"
    VGPU = "vGPU"
    PROCESS = "process"
    USER = "user"
    EXPORTER = "exporter"


LABELS: Final[dict[Of, tuple[str, ...]]] = {
    Of.NODE: (),
    Of.GPU: ("gpu",),
    Of.VGPU: ("gpu", "vgpu", "name", "uid"),
    Of.PROCESS: ("gpu", "vgpu", "name", "uid", "pid"),
    Of.USER: ("uid", "user", "team"),
    Of.EXPORTER: (),
}
"""The labels that distinguish the subjects of a kind."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The readings of one scrape: the node's answer, with its version, ``software``; or the ``error`` instead.
    ``elapsed_s``: since the scrape began."""

    metering: MetricsSnapshot | None
    error: VgpuError | None
    software: str
    own_software: str
    elapsed_s: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Gpu:
    """``fresh``: its GPU Server has answered just now."""

    reading: GpuStatus
    meters: GpuMeters | None
    fresh: bool


@dataclass(frozen=True, slots=True)
class Vgpu:
    reading: VgpuStatus
    meters: VgpuMeters | None
    user: str
    """The owner's name on this machine; its uid where it has none."""


Values = Sequence[tuple[tuple[str, ...], float]]
"""A value for each combination of a metric's own labels."""
Taken = float | Histogram | Values | None
"""None: there is no value just now."""
Measured = TypeVar("Measured", Seen, Gpu, Vgpu, ProcessReading, UserUsage)


@dataclass(frozen=True, slots=True)
class Metric(Generic[Measured]):
    """``take``: from a reading, without I/O. ``labels``: its own, beside those of its subject (``LABELS``).
    ``lasting``: the node's own word, or a fact that stays true while the GPU Server does not answer."""

    name: str
    of: Of
    kind: Kind
    help: str
    take: Callable[[Measured], Taken]
    labels: tuple[str, ...] = ()
    lasting: bool = False

    @property
    def family(self) -> str:
        """The name without what its kind adds to it."""
        return self.name.removesuffix("_total") if self.kind is Kind.COUNTER else self.name

    @property
    def unit(self) -> str:
        """One of ``UNITS``, or "" for a number of things."""
        last = self.family.rpartition("_")[2]
        return last if last in UNITS else ""
