"""A simulated GPU whose time slices run kernels of several vGPUs side by side: what shared leases are tested against.

Each vGPU with a kernel on the GPU gets an equal part of its time. While two or more have one, switches between contexts
take ``fee`` of the time. Hooks measure the GPU time that each vGPU uses, and the part of the time in which it waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuserver.core.scheduler.leases import Measured
from tests.core.model import MS, App, Published, Run
from vgpu.share import PPM

WAITS_OVER_NS = 200 * MS
GIVES_BACK_NS = 20 * MS


@dataclass
class Kernel:
    length_ns: int
    done: Callable[[], None]
    used_ns: int = 0


@dataclass
class Meter:
    """What the hooks of one vGPU count."""

    used_ns: int = 0
    waited_ns: int = 0
    readings: deque[tuple[int, int]] = field(default_factory=lambda: deque([(0, 0)]))
    """Times, and how long it had waited by then."""

    def waits_ppm(self, now_ns: int) -> int:
        self.readings.append((now_ns, self.waited_ns))
        while len(self.readings) > 2 and self.readings[1][0] <= now_ns - WAITS_OVER_NS:
            self.readings.popleft()
        at_ns, waited_ns = self.readings[0]
        return (self.waited_ns - waited_ns) * PPM // max(1, now_ns - at_ns)


class Slices(Run):
    def __init__(self, *args: Any, fee: float = 0.0, **what: Any) -> None:
        self.fee_ppm = round(fee * PPM)
        self.kernels: dict[int, Kernel] = {}
        self.meters: dict[int, Meter] = {}
        self.used: list[tuple[int, dict[int, int]]] = []
        """At each measurement: the time, and the GPU time that each vGPU had used by then."""
        self.sliced_ns = 0
        self.plan = 0
        super().__init__(*args, **what)

    def used_between(self, key: int, begin_ns: int, end_ns: int) -> int:
        """By the first readings after both times."""
        begin, end = (
            next((used for at, used in self.used if at >= when), self.used[-1][1]) for when in (begin_ns, end_ns)
        )
        return end.get(key, 0) - begin.get(key, 0)

    def meter(self, key: int) -> Meter:
        return self.meters.setdefault(key, Meter())

    def _compute(self, app: App, held: Published, begun: int, length: int) -> None:
        self._slice()
        self.kernels[app.key] = Kernel(length, lambda: self._complete(app, held, begun))
        self._look_ahead()

    def _worked_ns(self, app: App) -> int:
        self._slice()
        return self.kernels[app.key].used_ns

    def _slice(self) -> None:
        """Each kernel has had its part of the time since the last look."""
        passed_ns, self.sliced_ns = self.now_ns - self.sliced_ns, self.now_ns
        for key, kernel in self.kernels.items():
            used_ns = min(passed_ns * self._rate_ppm() // PPM, kernel.length_ns - kernel.used_ns)
            kernel.used_ns += used_ns
            self.meter(key).used_ns += used_ns
            self.meter(key).waited_ns += passed_ns

    def _rate_ppm(self) -> int:
        together = len(self.kernels)
        return PPM if together < 2 else (PPM - self.fee_ppm) // together

    def _look_ahead(self) -> None:
        self.plan += 1
        if self.kernels:
            plan, least = self.plan, min(k.length_ns - k.used_ns for k in self.kernels.values())
            self.at(self.now_ns + max(1, -(-least * PPM // self._rate_ppm())), lambda: self._look_at(plan))

    def _look_at(self, plan: int) -> None:
        if plan != self.plan:
            return
        self._slice()
        over = {key: k for key, k in self.kernels.items() if k.used_ns >= k.length_ns}
        for key, kernel in over.items():
            kernel.done()
            if self.kernels.get(key) is kernel:
                del self.kernels[key]
        self._look_ahead()

    def _pause(self, app: App) -> None:
        super()._pause(app)
        held, paused_ns = app.held, self.now_ns
        self.at(paused_ns + GIVES_BACK_NS, lambda: self._gives_back(app, held, paused_ns))

    def _gives_back(self, app: App, held: Published | None, paused_ns: int) -> None:
        """One that does not share gives its lease back when it idles."""
        if app.held is held and self.wanting[app.key][-1][1] == paused_ns and app.key not in self.scheduler.shared():
            self._drain(app)

    def _measured(self, key: int) -> Measured:
        self._slice()
        if not self.used or self.used[-1][0] < self.now_ns:
            self.used.append((self.now_ns, {k: m.used_ns for k, m in self.meters.items()}))
        meter = self.meter(key)
        demand_ppm = self.apps[key].work.demand_at(self.now_ns)
        return Measured(key, demand_ppm, waits_ppm=meter.waits_ppm(self.now_ns), work_ns=meter.used_ns)
