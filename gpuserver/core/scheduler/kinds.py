"""Light and heavy vGPUs: which ones may hold a shared lease.

A vGPU's *demand* is the part of its time in which it needs the GPU. Its *run length* (``burst`` in names) is the work
that it launches between two waits for the GPU (``cython_ext/logic/meter/demand.pxd``). Other vGPUs change neither.

    not measured   treated as heavy: it takes turns
    light          demand ≤ 0.5 and run length ≤ 4 ms. It may hold a shared lease: the GPU's own time slicing runs light
                   vGPUs side by side, and beside heavy vGPUs
    heavy          demand above 0.65, or run length above 8 ms. It takes turns, for 1, 2, 4 … 60 s at least

A trainer launches whole steps without waiting, so its run length is long, whatever part of the time its host needs.
Between the two thresholds a vGPU keeps its kind. A vGPU that becomes heavy again has to stay so for longer each time,
so that a program whose demand varies does not flap: every change costs the others a hand-over. After a minute as a
light vGPU that time is short again.

Pure: measurements and the time in, kinds out. Times are CLOCK_MONOTONIC ns, ratios parts per million.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuserver.core.scheduler.leases import Measured
from gpuserver.core.scheduler.policy import MILLISECOND, SECOND

LIGHT_PPM = 500_000
HEAVY_PPM = 650_000
LIGHT_BURST_NS = 4 * MILLISECOND
HEAVY_BURST_NS = 8 * MILLISECOND
STAY_LEAST_NS = SECOND
STAY_MOST_NS = 60 * SECOND


@dataclass(slots=True)
class Kind:
    """One vGPU's kind, and the measurements behind it."""

    light: bool = False
    demand_ppm: int = 0
    """0: not measured yet."""
    waits_ppm: int = 0
    """The part of the last 200 ms in which it waited for the GPU."""
    alone_ppm: int = 0
    """Its demand while no vGPU shared. Reason: others' time slices make the demand of a trainer seem lower."""
    burst_ns: int = 0
    brief: bool = False
    """Its run length is short, whatever its demand is. Its leases may then be short, too (``eevdf.py``)."""
    work_ns: int = 0
    """GPU time that all its launches took by themselves. A lower value than before: one of its processes has ended."""
    since_ns: int = 0
    """When it last became light or heavy."""
    heavy_until_ns: int = 0
    """A heavy vGPU does not become light before this time."""
    stayed_ns: int = 0
    """How long it had to stay heavy the last time. 0: never, or long ago."""

    def measured(self, seen: Measured, now_ns: int, *, alone: bool = False) -> bool:
        """Take in a measurement. True if it changed the kind. ``alone``: no vGPU has held a shared lease of late."""
        self.waits_ppm, self.work_ns = seen.waits_ppm, seen.work_ns
        if not seen.demand_ppm:
            return False
        self.demand_ppm, self.burst_ns = seen.demand_ppm, seen.burst_ns
        self.brief = 0 < seen.burst_ns <= (HEAVY_BURST_NS if self.brief else LIGHT_BURST_NS)
        if alone:
            self.alone_ppm = seen.demand_ppm
        if self.light and (seen.demand_ppm > HEAVY_PPM or seen.burst_ns > HEAVY_BURST_NS):
            self.turn_heavy(now_ns)
            return True
        lightly = seen.demand_ppm <= LIGHT_PPM and seen.burst_ns <= LIGHT_BURST_NS
        if not self.light and lightly and now_ns >= self.heavy_until_ns:
            self.light, self.since_ns = True, now_ns
            return True
        return False

    def restore(self, light: bool, heavy_ns: int, stayed_ns: int, now_ns: int) -> None:
        """Restore the kind from the journal."""
        self.light, self.since_ns, self.heavy_until_ns = light, now_ns, now_ns + heavy_ns
        self.stayed_ns = stayed_ns

    def turn_heavy(self, now_ns: int) -> None:
        """The vGPU becomes heavy, and has to stay so for longer than the last time."""
        if now_ns - self.since_ns >= STAY_MOST_NS:
            self.stayed_ns = 0
        self.stayed_ns = min(max(2 * self.stayed_ns, STAY_LEAST_NS), STAY_MOST_NS)
        self.light, self.since_ns = False, now_ns
        self.heavy_until_ns = now_ns + self.stayed_ns
