"""Histograms of durations: waits for a token, hand-overs, delays of the loop. The dispatcher's reports in, histograms
out. Pure; times are CLOCK_MONOTONIC nanoseconds, the dispatcher's own. So none of them includes Python's delay.

A *wait* lasts from the moment a vGPU wants without a lease until GO. The wait of a vGPU that has drained one lease and
still wants begins at the drain. A *hand-over* of a lease lasts from the drain of its predecessors to its GO, where its
vGPU was waiting by then. That is how long the GPU was empty, on this side of the driver. It is 0 where GO came before
that drain, at the tail of the predecessor or because that took too long.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from cython_ext.readings import Event, EventKind
from gpuserver.core.scheduler.leases import Lease, VgpuIndex
from vgpu.protocol.meters import Histogram

US: Final = 1_000

_TO_SECOND_US: Final = (50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000)
WAITS_NS: Final = tuple(bound * US for bound in (*_TO_SECOND_US, 1_000_000, 2_500_000, 10_000_000))
HANDOVERS_NS: Final = tuple(bound * US for bound in (5, 10, 25, 50, 100, 150, 250, 500, 1000, 2500, 10_000, 50_000))
LAGS_NS: Final = tuple(bound * US for bound in (100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000))
_LATEST: Final = 4
"""Drains of a vGPU that are kept: a lease that waits for the vGPU waits for its last one."""
_HALF: Final = 1 << 31
"""Epochs are on a circle of 32 bits; of two, the newer one is less than this ahead."""


class Tally:
    """One histogram that grows."""

    __slots__ = ("_bounds_ns", "_counts", "_sum_ns")

    def __init__(self, bounds_ns: tuple[int, ...]) -> None:
        self._bounds_ns = bounds_ns
        self._counts = [0] * (len(bounds_ns) + 1)
        self._sum_ns = 0

    def add(self, lasted_ns: int) -> None:
        """A duration below 0 counts as 0."""
        self._counts[bisect_left(self._bounds_ns, lasted_ns)] += 1
        self._sum_ns += max(0, lasted_ns)

    def histogram(self) -> Histogram:
        return Histogram(bounds_ns=self._bounds_ns, counts=tuple(self._counts), sum_ns=self._sum_ns)


@dataclass(slots=True)
class _Course:
    """One vGPU: ``held`` are the epochs under which it may submit, or has not drained."""

    waits: Tally = field(default_factory=lambda: Tally(WAITS_NS))
    waits_since_ns: int | None = None
    held: set[int] = field(default_factory=set)
    drained_ns: dict[int, int] = field(default_factory=dict)
    awaited: dict[int, Lease] = field(default_factory=dict)


class Meters:
    """The meters of one GPU. A vGPU has to be entered before its first report, and is forgotten with its counts."""

    def __init__(self) -> None:
        self.handovers = Tally(HANDOVERS_NS)
        self.loop_lag = Tally(LAGS_NS)
        self._courses: dict[VgpuIndex, _Course] = {}

    def enter(self, key: VgpuIndex) -> None:
        """Begin to meter a vGPU; also again, under another scheduler."""
        if key in self._courses:
            self.rest(key)
        else:
            self._courses[key] = _Course()

    def forget(self, key: VgpuIndex) -> None:
        self._courses.pop(key, None)

    def rest(self, key: VgpuIndex) -> None:
        """The vGPU has no leases any more, and waits for none, but keeps its counts."""
        old = self._courses[key]
        self._courses[key] = _Course(waits=old.waits)

    def waits(self, key: VgpuIndex) -> Histogram:
        return self._courses[key].waits.histogram()

    def published(self, lease: Lease) -> None:
        """A lease is published, for the first time or changed."""
        course = self._courses[lease.vgpu]
        if any(key != lease.vgpu for key, _ in lease.after):
            course.awaited[lease.epoch] = lease
        else:
            course.awaited.pop(lease.epoch, None)

    def withdrawn(self, key: VgpuIndex, epoch: int) -> None:
        self._courses[key].awaited.pop(epoch, None)

    def wants(self, key: VgpuIndex, at_ns: int) -> None:
        """The vGPU wants a token from ``at_ns`` on."""
        course = self._courses[key]
        if not course.held and course.waits_since_ns is None:
            course.waits_since_ns = at_ns

    def saw(self, event: Event) -> None:
        """Take in a report of the dispatcher about a vGPU that is entered."""
        course = self._courses[event.vgpu]
        match event.kind:
            case EventKind.WANTS:
                self.wants(event.vgpu, event.at_ns)
            case EventKind.IDLE:
                course.waits_since_ns = None
            case EventKind.WENT:
                self._went(course, event.epoch, event.at_ns)
            case EventKind.DRAINED:
                self._drained(course, event)

    def miss(self) -> None:
        """Some events were lost: holders and waiting vGPUs are not known until the next ones."""
        for key in self._courses:
            self.rest(key)

    def _went(self, course: _Course, epoch: int, at_ns: int) -> None:
        since_ns, course.waits_since_ns = course.waits_since_ns, None
        course.held.add(epoch)
        lease = course.awaited.pop(epoch, None)
        if since_ns is None:
            return
        course.waits.add(at_ns - since_ns)
        if lease is None:
            return
        others = [self._courses.get(key, _UNKNOWN).drained_ns.get(before) for key, before in lease.after]
        drains = [drained_ns for drained_ns in others if drained_ns is not None]
        empty = len(drains) == len(others)
        self.handovers.add(at_ns - max(*drains, since_ns, lease.start_ns) if empty else 0)

    def _drained(self, course: _Course, event: Event) -> None:
        over = {epoch for epoch in course.held if (event.epoch - epoch) % (2 * _HALF) < _HALF}
        course.held -= over
        course.drained_ns[event.epoch] = event.at_ns
        if len(course.drained_ns) > _LATEST:
            del course.drained_ns[next(iter(course.drained_ns))]
        if not course.held:
            course.waits_since_ns = event.at_ns if event.wants else None


_UNKNOWN: Final = _Course()
