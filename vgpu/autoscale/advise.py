"""A size for a vGPU from what was observed of it, by the thresholds of ``size``: what autoscaling would settle at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from vgpu.autoscale.size import MEMORY_MARGIN, SETTLE_AT, SETTLE_TO, STEP, UP_AT, with_margin
from vgpu.units import format_bytes, format_duration

LEAST_S: Final = 30
"""Seconds with work. In fewer, a start-up weighs as much as what it starts."""


LIMITED_STEPS: Final = 5
"""For a vGPU at its limit, whose demand is not known."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A vGPU over the life of its GPU Server. ``seconds``: in which it used the GPU; ``busy_percent``: the part of the
    GPU's time that it did not exceed in 95 of 100 of them. ``limit_percent``: what it may use. A size that is None is
    no size of its own: the node scales it, or it cannot be measured."""

    seconds: int
    busy_percent: float
    limit_percent: float
    sm_percent: float | None
    memory_bytes: int | None
    memory_peak_bytes: int
    refusals: int = 0
    refused_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Advised:
    """Another size; None: that size stays. ``why``: in one line."""

    sm_percent: float | None
    memory_bytes: int | None
    why: str


def advised(seen: Observed) -> Advised:
    sm, compute = _compute(seen)
    memory, used = _memory(seen)
    return Advised(sm, memory, "; ".join(filter(None, (compute, used))) or "its sizes are not for advice")


def _compute(seen: Observed) -> tuple[float | None, str]:
    size, busy = seen.sm_percent, seen.busy_percent
    if size is None:
        return None, ""
    if seen.seconds < LEAST_S:
        return None, f"{format_duration(seen.seconds * 10**9)} with work observed, too little for --sm"
    used = f"in 95 of 100 s of work it used {busy:g} % of the GPU or less"
    if busy >= UP_AT * seen.limit_percent:
        if seen.limit_percent < 100:
            return min(
                100.0, float(math.ceil(size * (1 + STEP) ** LIMITED_STEPS))
            ), f"{used}, its limit: it may need more"
        return None, used
    needed = max(1.0, float(math.ceil(busy / SETTLE_TO - 1e-6)))
    if busy < SETTLE_AT * size and needed < size:
        return needed, used
    return None, used


def _memory(seen: Observed) -> tuple[int | None, str]:
    size, peak = seen.memory_bytes, seen.memory_peak_bytes
    if size is None or not (peak or seen.refusals):
        return None, ""
    had = f"it had {format_bytes(peak)} at most"
    if seen.refusals:
        lacked = f"{had}, and was refused {format_bytes(seen.refused_bytes)}"
        return with_margin(max(peak, int(size / MEMORY_MARGIN)) + seen.refused_bytes), lacked
    smaller = with_margin(peak)
    return (smaller if smaller < size else None), had
