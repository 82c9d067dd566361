"""Light and heavy vGPUs: who may hold a shared lease.

A vGPU's *demand* is the part of its time in which it needs the GPU (``cython_ext/logic/demand.pxd``). Company does not
change it.

    not measured   treated as heavy: it takes turns
    light          demand ≤ 0.5. It may hold a shared lease: the GPU's own time slicing runs light vGPUs side by side
    heavy          demand above 0.65. It takes turns, for 1, 2, 4 … 60 s at least

The two thresholds keep a vGPU between them what it is. The growing stay keeps a program that changes its ways all the
time from flapping: every change costs the others a hand-over. After a minute as a light vGPU the stay is short again.

Pure: measurements and the time in, kinds out. Times are CLOCK_MONOTONIC ns, ratios parts per million.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuserver.core.policy import SECOND

LIGHT_PPM = 500_000
HEAVY_PPM = 650_000
STAY_LEAST_NS = SECOND
STAY_MOST_NS = 60 * SECOND


@dataclass(slots=True)
class Kind:
    """One vGPU's kind, and what it was made of."""

    light: bool = False
    demand_ppm: int = 0
    """0: not measured yet."""
    waits_ppm: int = 0
    """The part of the last 200 ms in which it waited for the GPU."""
    work_ns: int = 0
    """GPU time that all its launches took by themselves. Less than before: a process of it has ended."""
    since_ns: int = 0
    """When it last became light or heavy."""
    heavy_until_ns: int = 0
    """A heavy one is not light before."""
    stayed_ns: int = 0
    """How long it had to stay heavy the last time. 0: never, or long ago."""

    def measured(self, demand_ppm: int, waits_ppm: int, work_ns: int, now_ns: int, *, beside: bool = False) -> bool:
        """Take in a measurement. Whether the kind has changed by it. ``beside``: it takes turns beside vGPUs with
        shared leases. Their slices make the demand of a trainer seem lower, so a heavy one becomes light there only
        where its demand is half of what it is elsewhere."""
        self.waits_ppm, self.work_ns = waits_ppm, work_ns
        if beside and not self.light and LIGHT_PPM // 2 < demand_ppm < self.demand_ppm:
            return False
        if demand_ppm:
            self.demand_ppm = demand_ppm
        if self.light and demand_ppm > HEAVY_PPM:
            self.turn_heavy(now_ns)
            return True
        if not self.light and 0 < demand_ppm <= LIGHT_PPM and now_ns >= self.heavy_until_ns:
            self.light, self.since_ns = True, now_ns
            return True
        return False

    def restore(self, light: bool, heavy_ns: int, stayed_ns: int, now_ns: int) -> None:
        """As a journal kept it."""
        self.light, self.since_ns, self.heavy_until_ns = light, now_ns, now_ns + heavy_ns
        self.stayed_ns = stayed_ns

    def turn_heavy(self, now_ns: int) -> None:
        """It is no light one any more, and stays so for longer than the last time."""
        if now_ns - self.since_ns >= STAY_MOST_NS:
            self.stayed_ns = 0
        self.stayed_ns = min(max(2 * self.stayed_ns, STAY_LEAST_NS), STAY_MOST_NS)
        self.light, self.since_ns = False, now_ns
        self.heavy_until_ns = now_ns + self.stayed_ns
