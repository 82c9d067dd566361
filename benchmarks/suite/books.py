"""What vGPUs' own books say of a window: token time; and of the moments looked at, how many had work and no lease."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from vgpu.node.link import ControlLink
from vgpu.protocol.messages import VgpuStatus

PART_S: Final = 1.0
"""A host that is fast for a while and slow for another wants more than its share in the one and less in the other."""


class Books:
    """Of the vGPU with that name. VgpuError from all that reads, if it is not there any more."""

    def __init__(self, name: str, link: ControlLink) -> None:
        self.name = name
        self._link = link
        self._parts: list[dict[str, float]] = []

    def _read(self) -> tuple[float, VgpuStatus]:
        found = self._link.inspect(self.name)
        self._gate_wait_ns = sum(process.gate_wait_ns for process in found.processes)
        return time.monotonic(), found.vgpu

    def begin(self) -> None:
        self._first = self._part = self._read()
        self._gate_waited_ns = self._gate_wait_ns
        self._looks = self._waits = self._throttled = self._all_looks = 0

    def look(self) -> None:
        at, reading = self._read()
        self._looks += 1
        self._waits += reading.wants and not reading.holds
        self._all_looks += 1
        self._throttled += reading.throttled
        if at - self._part[0] >= PART_S:
            self._close((at, reading))

    def _close(self, now: tuple[float, VgpuStatus]) -> None:
        part = ratios(self._part, now)
        self._parts.append(part | {"seconds": now[0] - self._part[0], "waiting_ratio": self._waits / self._looks})
        self._part, self._looks, self._waits = now, 0, 0

    def end(self) -> None:
        self._last = self._read()
        if self._looks:
            self._close(self._last)

    def figures(self) -> dict[str, Any]:
        """``charged_ratio``: held, less observed idle gaps. ``gate_wait_ratio``: of the time, launches waited for a
        lease. Where somebody looked: ``waiting_ratio``, ``throttled_ratio``, at the limit, and ``parts``, the same of
        each second or so, and how long it was."""
        found: dict[str, Any] = dict(ratios(self._first, self._last))
        seconds = self._last[0] - self._first[0]
        found["tokens_per_second"] = (self._last[1].tokens - self._first[1].tokens) / seconds
        found["gate_wait_ratio"] = (self._gate_wait_ns - self._gate_waited_ns) / 1e9 / seconds
        if self._parts:
            seconds = sum(part["seconds"] for part in self._parts)
            waited = sum(part["waiting_ratio"] * part["seconds"] for part in self._parts)
            found |= {"waiting_ratio": waited / seconds, "parts": self._parts}
            found["throttled_ratio"] = self._throttled / self._all_looks
        return found


def ratios(first: tuple[float, VgpuStatus], last: tuple[float, VgpuStatus]) -> dict[str, float]:
    """Of the time between the two."""
    (began, before), (ended, after) = first, last
    return {
        "charged_ratio": (after.busy_ns - before.busy_ns) / 1e9 / (ended - began),
        "held_ratio": (after.held_ns - before.held_ns) / 1e9 / (ended - began),
    }


def watch(books: Sequence[Books], start: float, stop: float, every_s: float = 0.0) -> dict[str, float]:
    """Reads them at both ends of the window (``time.monotonic()``) and, unless it is 0, ``every_s`` between: then
    ``woken_late_ms``, at worst, tells of a host that stood still, and ``answered_late_ms`` of servers that did."""
    sleep_until(start)
    for book in books:
        book.begin()
    woken_late_s = answered_late_s = 0.0
    while every_s and time.monotonic() < stop - every_s:
        slept = time.monotonic()
        time.sleep(every_s)
        woken = time.monotonic()
        for book in books:
            book.look()
        woken_late_s = max(woken_late_s, woken - slept - every_s)
        answered_late_s = max(answered_late_s, time.monotonic() - woken)
    sleep_until(stop)
    for book in books:
        book.end()
    return {"woken_late_ms": 1e3 * woken_late_s, "answered_late_ms": 1e3 * answered_late_s} if every_s else {}


def sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))
