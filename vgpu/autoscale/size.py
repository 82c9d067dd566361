"""The size that one vGPU's demand needs.

Compute, in percent of the GPU's time:

    demand   the busy part, and the part in which the vGPU was throttled: a demand at its limit shows no more than that
    up       if the level of the demand, or its last reading, is 0.9 of the size or more: in steps of 10 % of the size
    down     if no reading of the last 10 s was 0.3 of the size: to the size of which they were 0.6
    settle   if no reading of the last 30 s was 0.7 of the size: to the size of which they were 0.8

After each of these the demand is below 0.9 and above the threshold that led there. So a constant demand ends in a
constant size. Memory grows before it is full, and falls to what was used in the last 30 s and a quarter more.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from vgpu.autoscale.level import Level
from vgpu.units import MIB

UP_AT: Final = 0.9
STEP: Final = 0.1
MOST_STEPS: Final = 12
"""Of one reading: three times the size. A throttled program's demand is not known, and a larger jump would overshoot
it."""
DOWN_AT, DOWN_TO, DOWN_AFTER_S = 0.3, 0.6, 10.0
SETTLE_AT, SETTLE_TO, SETTLE_AFTER_S = 0.7, 0.8, 30.0
_DOWN: Final = ((DOWN_AT, DOWN_TO, DOWN_AFTER_S), (SETTLE_AT, SETTLE_TO, SETTLE_AFTER_S))

UNSEEN_S: Final = 6.0
"""After so long without a reading the demand begins anew: the vGPU was suspended, say, or its GPU Server was away."""

MEMORY_UP_AT: Final = 0.9
MEMORY_MARGIN: Final = 1.25
MEMORY_STEP_BYTES: Final = 64 * MIB


def tenths(percent: float) -> float:
    """Rounded up to a tenth of a percent."""
    return math.ceil(percent * 10 - 1e-6) / 10


def grown(size: float, demand: float) -> float:
    """``size`` in steps, until ``demand`` is less than ``UP_AT`` of it."""
    steps = 0
    while demand >= UP_AT * size and steps < MOST_STEPS:
        size *= 1 + STEP
        steps += 1
    return size


@dataclass(slots=True)
class Compute:
    """The demand for compute, in percent. ``take`` each reading; ``wanted`` is the size that follows."""

    level: Level = field(default_factory=Level)
    latest: float = 0.0
    _size: float = 0.0
    _since_s: float = 0.0
    """When the size was last another one."""
    _recent: deque[tuple[float, float]] = field(default_factory=deque)

    def take(self, now_s: float, size: float, busy: float, throttled: float) -> None:
        """``busy``, ``throttled``: parts of the time since the last reading."""
        unseen = bool(self._recent) and now_s - self._recent[-1][0] > UNSEEN_S
        if unseen:
            self.level = Level()
        if size != self._size or unseen:
            self._size, self._since_s = size, now_s
            self._recent.clear()
        # Throttled time shows that the demand is larger, and not by how much.
        most = max(100 * busy, size * (1 + STEP) ** MOST_STEPS)
        self.latest = min(100 * (busy + throttled), most, 100.0)
        self.level.take(self.latest)
        self._recent.append((now_s, self.latest))
        while self._recent[0][0] < now_s - SETTLE_AFTER_S:
            self._recent.popleft()

    @property
    def demand(self) -> float:
        return max(self.level.value, self.latest)

    def wanted(self, now_s: float, least: float, most: float) -> float:
        """The size that it should have: the present one, or another between ``least`` and ``most``."""
        size = self._size
        if self.demand >= UP_AT * size:
            return min(most, max(least, tenths(grown(size, self.demand))))
        for part, to, after_s in _DOWN:
            if now_s - self._since_s < after_s:
                break
            high = max(self.level.value, *(demand for at_s, demand in self._recent if at_s >= now_s - after_s))
            if high < part * size:
                smaller = max(least, tenths(high / to))
                return smaller if smaller < size else size
        return size


@dataclass(slots=True)
class Memory:
    """The demand for memory, in bytes."""

    _refusals: int | None = None
    _refused: tuple[float, int] = (-math.inf, 0)
    """When an allocation was refused last, and its size."""
    _since_s: float = 0.0
    _size: int = 0
    _needed: int = 0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def take(self, now_s: float, size: int, used: int, refusals: int, refused_bytes: int) -> None:
        """``refusals``: how many so far; ``refused_bytes``: the size of the last one."""
        if size != self._size or (self._recent and now_s - self._recent[-1][0] > UNSEEN_S):
            self._size, self._since_s = size, now_s
            self._refused = (-math.inf, 0)
            self._recent.clear()
        if self._refusals is not None and refusals > self._refusals:
            self._refused = now_s, refused_bytes
        self._refusals = refusals
        self._needed = used + (self._refused[1] if now_s - self._refused[0] < DOWN_AFTER_S else 0)
        self._recent.append((now_s, used))
        while self._recent[0][0] < now_s - SETTLE_AFTER_S:
            self._recent.popleft()

    @property
    def needed(self) -> int:
        """What is used, and what was refused in the last 10 s at the present size."""
        return self._needed

    def wanted(self, now_s: float, least: int, most: int) -> int:
        if self._needed >= MEMORY_UP_AT * self._size:
            return min(most, max(least, self._size, with_margin(self._needed)))
        high = max(used for _, used in self._recent)
        smaller = max(least, with_margin(high))
        if now_s - self._since_s >= SETTLE_AFTER_S and smaller < SETTLE_AT * self._size:
            return smaller
        return self._size


def with_margin(used: int) -> int:
    """The size of which ``used`` is four fifths at most, in whole steps."""
    return math.ceil(used * MEMORY_MARGIN / MEMORY_STEP_BYTES) * MEMORY_STEP_BYTES
