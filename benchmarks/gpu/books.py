"""What vGPUs' own books say of a window: token time; and of the moments looked at, how many had work and no lease."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vgpu.node.link import ControlLink
from vgpu.protocol.messages import VgpuReading


class Books:
    """Of the vGPU with that name. VgpuError from all that reads, if it is not there any more."""

    def __init__(self, name: str, link: ControlLink) -> None:
        self.name = name
        self._link = link
        self._looks = self._waits = 0

    def _read(self) -> tuple[float, VgpuReading]:
        reading = self._link.inspect(self.name).vgpu
        return time.monotonic(), reading

    def begin(self) -> None:
        self._first = self._read()

    def look(self) -> None:
        _, reading = self._read()
        self._looks += 1
        self._waits += reading.wants and not reading.holds

    def end(self) -> None:
        self._last = self._read()

    def figures(self) -> dict[str, float]:
        """``charged_ratio``: held, less observed idle gaps. ``waiting_ratio`` only where somebody looked."""
        (began, before), (ended, after) = self._first, self._last
        per_second = 1 / (ended - began)
        found = {
            "charged_ratio": (after.busy_ns - before.busy_ns) / 1e9 * per_second,
            "held_ratio": (after.held_ns - before.held_ns) / 1e9 * per_second,
            "tokens_per_second": (after.tokens - before.tokens) * per_second,
        }
        if self._looks:
            found["waiting_ratio"] = self._waits / self._looks
        return found


def watch(books: Sequence[Books], start: float, stop: float, every_s: float = 0.0) -> None:
    """Reads them at both ends of the window (``time.monotonic()``) and, unless it is 0, ``every_s`` between."""
    sleep_until(start)
    for book in books:
        book.begin()
    while every_s and time.monotonic() < stop - every_s:
        time.sleep(every_s)
        for book in books:
            book.look()
    sleep_until(stop)
    for book in books:
        book.end()


def sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))
