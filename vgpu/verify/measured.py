"""The measurements, before they are judged. Times are ns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from vgpu.harness.measure import shares

Interval = tuple[int, int]

BIN_NS: Final = 250_000_000
"""A point of a time series: a few rounds of leases, so that it shows shares and not single leases."""


def stamped_ratio(intervals: Sequence[Interval], begin_ns: int, end_ns: int) -> float:
    """The part of [begin, end) in which one of the kernels ran."""
    inside = (min(end, end_ns) - max(begin, begin_ns) for begin, end in intervals)
    return sum(length for length in inside if length > 0) / (end_ns - begin_ns)


def finished_in(intervals: Sequence[Interval], begin_ns: int, end_ns: int) -> float:
    """How many kernels of equal work were finished in [begin, end); one at an edge counts by its part inside."""
    count = 0.0
    for begin, end in intervals:
        inside = min(end, end_ns) - max(begin, begin_ns)
        if inside > 0:
            count += inside / (end - begin)
    return count


def series_of(intervals: Sequence[Interval], begin_ns: int, end_ns: int) -> list[float]:
    """``finished_in`` each whole bin of ``BIN_NS`` from ``begin_ns`` on. ``intervals``: in order."""
    bins = [0.0] * ((end_ns - begin_ns) // BIN_NS)
    for begin, end in intervals:
        for i in range(max(0, (begin - begin_ns) // BIN_NS), min(len(bins), (end - begin_ns) // BIN_NS + 1)):
            at_ns = begin_ns + i * BIN_NS
            bins[i] += finished_in([(begin, end)], at_ns, at_ns + BIN_NS)
    return bins


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """One program over the window of a run. ``device_ratio``: GPU time by the stamps of its own kernels;
    ``books_ratio``: by its vGPU's books, None without one; ``work_per_s``: what it finished, by its own count;
    ``work_series``: by its kernels' stamps, per bin."""

    percent: float
    device_ratio: float
    books_ratio: float | None
    work_per_s: float
    work_series: tuple[float, ...] = ()
    kernels: tuple[Interval, ...] = ()
    """Those of a short while, for a picture: relative to its begin."""


@dataclass(frozen=True, slots=True)
class ShareRun:
    """Programs beside each other, or one alone."""

    programs: tuple[ProgramRun, ...]

    @property
    def work_ratios(self) -> list[float]:
        """Each one's part of what all finished; 0 where nothing was."""
        return shares([program.work_per_s for program in self.programs])


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """What CUDA answered to a program that asked for pieces until one was refused; ``left_bytes``: what was free then,
    ``freed_bytes``: what was free once it had given them back."""

    limit_bytes: int
    total_bytes: int
    free_bytes: int
    pieces: int
    piece_bytes: int
    left_bytes: int
    freed_bytes: int
    refusal: str


@dataclass(frozen=True, slots=True)
class Ending:
    """A holder was ended at ``at_ns``, mid-lease. ``lease_back_ns``: until its neighbour had the next lease, None: it
    never had. ``kept_bytes``: of the holder's ``held_bytes``, what its vGPU still had at last; ``gone_ns``: until that
    was 0. ``neighbour_bytes``: the neighbour's memory before and after."""

    lease_back_ns: int | None
    held_bytes: int
    kept_bytes: int
    gone_ns: int | None
    neighbour_bytes: tuple[int, int]
    neighbour_work: float
    """What the neighbour finished afterwards."""


@dataclass(frozen=True, slots=True)
class LightRun:
    """Requests a second that programs answer together which their hosts hold up: in vGPUs, and in none."""

    in_vgpus: float
    without: float

    @property
    def lost_ratio(self) -> float:
        return 1.0 - self.in_vgpus / self.without if self.without else 1.0


@dataclass(frozen=True, slots=True)
class LaunchRun:
    """Pairs of turns: ns a launch through the hook, and straight into the driver."""

    hooked: bool
    gated_ns: tuple[float, ...]
    direct_ns: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SmRun:
    """``planned``: by the GPU Server; ``driver``: what the driver says the program has, of ``total``."""

    asked_percent: float
    total: int
    planned: int
    driver: int


@dataclass(slots=True)
class Evidence:
    """Everything that was measured, by the name of the check, with limits and without; what is empty was not."""

    shares: dict[str, ShareRun] = field(default_factory=dict)
    unlimited_shares: dict[str, ShareRun] = field(default_factory=dict)
    light: LightRun | None = None
    light_in_turns: LightRun | None = None
    memory: MemoryRun | None = None
    unlimited_memory: MemoryRun | None = None
    killed: list[Ending] = field(default_factory=list)
    stopped: Ending | None = None
    launches: LaunchRun | None = None
    delayed_launches: LaunchRun | None = None
    sms: list[SmRun] = field(default_factory=list)
    unlimited_sms: SmRun | None = None
    not_checked: dict[str, str] = field(default_factory=dict)
    """By check, why it cannot be made on this machine."""
    failed: dict[str, str] = field(default_factory=dict)
    """By check, why its measurement came to nothing."""
