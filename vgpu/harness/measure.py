"""How much work was finished in which time, from the workloads' own counts. Pure; times are CLOCK_MONOTONIC ns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from vgpu.errors import ErrorCode, VgpuError

TOLERANCE_RATIO: Final = 0.03
"""A share that is further from what was asked than this has missed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """``work`` units were finished up to ``at_ns``, since the start of the program."""

    at_ns: int
    work: float


@dataclass(slots=True)
class Series:
    """The samples of one program, in order of time."""

    samples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        if self.samples and sample.at_ns <= self.samples[-1].at_ns:
            raise ValueError(f"sample at {sample.at_ns} ns is not after the one at {self.samples[-1].at_ns} ns")
        self.samples.append(sample)

    def work_at(self, at_ns: int) -> float:
        """Finished work at ``at_ns``, on a straight line between the samples around it.

        ``ValueError`` outside of them: nothing is known there, and the line must not be drawn on.
        """
        times = [sample.at_ns for sample in self.samples]
        if not times or not times[0] <= at_ns <= times[-1]:
            raise ValueError(f"no sample on both sides of {at_ns} ns")
        i = bisect_left(times, at_ns)
        if times[i] == at_ns:
            return self.samples[i].work
        before, after = self.samples[i - 1], self.samples[i]
        part = (at_ns - before.at_ns) / (after.at_ns - before.at_ns)
        return before.work + part * (after.work - before.work)

    def rate(self, start_ns: int, end_ns: int) -> float:
        """Work per second between the two instants."""
        return (self.work_at(end_ns) - self.work_at(start_ns)) * 1e9 / (end_ns - start_ns)

    def recent_rate(self) -> float:
        """Work per second between the last two samples; 0 where there are fewer."""
        if len(self.samples) < 2:
            return 0.0
        return self.rate(self.samples[-2].at_ns, self.samples[-1].at_ns)


def shares(rates: Sequence[float]) -> list[float]:
    """Each rate over the sum of all, 0 where nothing was finished."""
    total = sum(rates)
    return [rate / total if total else 0.0 for rate in rates]


def common_window(series: Sequence[Series], duration_ns: int) -> tuple[int, int]:
    """(start, end) of ``duration_ns`` from the first instant on at which every program has reported.

    ``VgpuError`` if one of them was over before the window was: then the others had the GPU for longer.
    """
    if not all(one.samples for one in series):
        raise VgpuError(ErrorCode.INTERNAL, "a program reported nothing: it never got to run")
    start_ns = max(one.samples[0].at_ns for one in series)
    end_ns = start_ns + duration_ns
    last_ns = min(one.samples[-1].at_ns for one in series)
    if last_ns < end_ns:
        short = f"{(end_ns - last_ns) / 1e9:.1f} s"
        raise VgpuError(ErrorCode.INTERNAL, f"a program ended {short} too early to be measured", "try it once more")
    return start_ns, end_ns
