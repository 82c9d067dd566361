"""Rules for the size of one vGPU, and the service that they are replayed on.

The service is a fluid: demand arrives evenly within a sample of the trace. The vGPU does at most its size of it; the
rest waits. A request misses its objective if it waits for more than ``OBJECTIVE_S``, and is given up, and missed, after
``PATIENCE_S``. The size changes at each reading, at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from benchmarks.autoscale.trace import SAMPLE_S
from vgpu.autoscale.level import Level
from vgpu.autoscale.size import DOWN_AFTER_S, DOWN_AT, STEP, UP_AT, Compute

READING_S: Final = 2.0
READINGS: Final = round(SAMPLE_S / READING_S)
"""In one sample of the trace."""
OBJECTIVE_S: Final = 1.0
PATIENCE_S: Final = 10.0
LEAST, MOST = 10.0, 100.0
"""The bounds of each vGPU, in percent."""


class Rule(Protocol):
    """The size in percent for the next reading. ``arrived``: the demand of this one, which only some rules may use."""

    def start(self) -> float: ...

    def next(self, now_s: float, size: float, arrived: float, busy: float, throttled: float) -> float: ...


@dataclass(slots=True)
class Fixed:
    size: float

    def start(self) -> float:
        return self.size

    def next(self, now_s: float, size: float, arrived: float, busy: float, throttled: float) -> float:
        return size


class HasGpu:
    """HAS-GPU's vertical rule as published: a Kalman level of the requests (Q 1, R 10), up in steps of 10 % at 0.9 of
    the capacity, down in such steps at 0.3 after 10 s.

    Modelled: it knows all requests that arrive, those that wait too; it takes as many steps at once as its thresholds
    ask for. Left out: its horizontal rule, since each vGPU here has a whole GPU to grow into.
    """

    def __init__(self) -> None:
        self._level = Level()
        self._low_since_s: float | None = None

    def start(self) -> float:
        return LEAST

    def next(self, now_s: float, size: float, arrived: float, busy: float, throttled: float) -> float:
        level = self._level.take(arrived)
        if level >= DOWN_AT * size:
            self._low_since_s = None
        elif self._low_since_s is None:
            self._low_since_s = now_s
        while level >= UP_AT * size and size < MOST:
            size *= 1 + STEP
        if self._low_since_s is not None and now_s - self._low_since_s >= DOWN_AFTER_S:
            while level < DOWN_AT * size and size > LEAST:
                size /= 1 + STEP
        return min(MOST, max(LEAST, size))


class Ours:
    """``vgpu.autoscale``. It sees what the vGPU did and whether it was throttled, and no request."""

    def __init__(self) -> None:
        self._compute = Compute()

    def start(self) -> float:
        return LEAST

    def next(self, now_s: float, size: float, arrived: float, busy: float, throttled: float) -> float:
        self._compute.take(now_s, size, busy, throttled)
        return self._compute.wanted(now_s, LEAST, MOST)


@dataclass(slots=True)
class Foreseen:
    """The least size that meets each reading's demand, known beforehand: no rule has fewer GPU-hours without a miss."""

    sizes: Sequence[float]
    at: int = 0

    def start(self) -> float:
        return self.sizes[0]

    def next(self, now_s: float, size: float, arrived: float, busy: float, throttled: float) -> float:
        self.at += 1
        return self.sizes[min(self.at, len(self.sizes) - 1)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``offered``, ``missed``: GPU-seconds; ``held``: of the sizes; ``changes``: of the size."""

    offered: float = 0.0
    missed: float = 0.0
    held: float = 0.0
    changes: int = 0

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.offered + other.offered,
            self.missed + other.missed,
            self.held + other.held,
            self.changes + other.changes,
        )


def replay(rule: Rule, samples: Sequence[float]) -> Outcome:
    size, waiting, now_s = rule.start(), 0.0, 0.0
    offered = missed = held = 0.0
    changes = 0
    for demand in samples:
        arrived = demand / 100 * READING_S
        for _ in range(READINGS):
            capacity = size / 100 * READING_S
            done = min(waiting + arrived, capacity)
            waiting += arrived - done
            wait_s = waiting / (size / 100)
            if wait_s > OBJECTIVE_S:
                missed += arrived
            waiting = min(waiting, size / 100 * PATIENCE_S)
            offered += arrived
            held += capacity
            now_s += READING_S
            # A vGPU at its limit is busy for its size, and throttled for the rest of the time.
            throttled = 1 - size / 100 if waiting > 0 else 0.0
            before = size
            size = rule.next(now_s, size, demand, done / READING_S, throttled)
            changes += size != before
    return Outcome(offered, missed, held, changes)


def percentile(samples: Sequence[float], part: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _fixed(size: Callable[[Sequence[float]], float]) -> Callable[[Sequence[float]], Rule]:
    return lambda samples: Fixed(min(MOST, max(LEAST, size(samples))))


RULES: Final[dict[str, Callable[[Sequence[float]], Rule]]] = {
    "fixed-mean": _fixed(statistics.fmean),
    "fixed-p95": _fixed(lambda samples: percentile(samples, 0.95)),
    "fixed-peak": _fixed(max),
    "has-gpu": lambda samples: HasGpu(),
    "ours": lambda samples: Ours(),
    "foreseen": lambda samples: Foreseen([max(LEAST, demand) for demand in samples for _ in range(READINGS)]),
}
"""Each gets the whole series: fixed shares and the bound know it beforehand, the others do not use it."""
