"""The use of a vGPU's programs over their life, the size that would have been enough, and the mode. Pure.

Each second in which they used the GPU at all counts once, by the part of it that was busy. Reason: for a size it
matters how much they need while they compute, not how often they do.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuserver.core.scheduler.leases import ServiceTotals, VgpuIndex
from vgpu.protocol.meters import Advice
from vgpu.share import PPM
from vgpu.units import MIB, counted, format_bytes

SECOND_NS: Final = 1_000_000_000
LEAST_SECONDS: Final = 30
"""Seconds of work. In fewer, a start-up weighs as much as what it starts."""
QUANTILE: Final = 0.95
HEADROOM: Final = 1.1
AT_ITS_LIMIT: Final = 0.95
"""A vGPU that uses so much of its limit might need more."""
MEMORY_STEP_BYTES: Final = 256 * MIB
_STEPS: Final = 100
TURNS_SECONDS: Final = 60
TURNS_HELD: Final = 0.5
"""A second counts if so much of it was held."""
TOGETHER: Final = 1.1
"""If all vGPUs together held more than that of a second, they held the GPU side by side."""
TURNS_USED: Final = 0.85
"""Programs that keep a GPU busy use more of what they hold: 0.96 and more on an H100, a trainer beside streams 0.75."""


@dataclass(slots=True)
class _Log:
    at_ns: int
    busy_ns: int
    counts: list[int] = field(default_factory=lambda: [0] * (_STEPS + 1))


class Usage:
    """The use of all vGPUs of a GPU, by key."""

    def __init__(self) -> None:
        self._logs: dict[VgpuIndex, _Log] = {}

    def note(self, now_ns: int, served: Mapping[VgpuIndex, ServiceTotals]) -> None:
        """Take in the totals of all vGPUs; they count once a second, however often this is called."""
        for key, so_far in served.items():
            log = self._logs.get(key)
            if log is None or so_far.busy_ns < log.busy_ns:
                self._logs[key] = _Log(now_ns, so_far.busy_ns)
                continue
            passed_ns = now_ns - log.at_ns
            if passed_ns < SECOND_NS:
                continue
            part = (so_far.busy_ns - log.busy_ns) / passed_ns
            if part > 0:
                log.counts[min(_STEPS, math.ceil(part * _STEPS))] += 1
            log.at_ns, log.busy_ns = now_ns, so_far.busy_ns

    def forget(self, key: VgpuIndex) -> None:
        self._logs.pop(key, None)

    def seconds(self, key: VgpuIndex) -> int:
        """The number of seconds in which the vGPU used the GPU."""
        log = self._logs.get(key)
        return 0 if log is None else sum(log.counts)

    def busy_ratio(self, key: VgpuIndex) -> float:
        """The busy part that it did not exceed in ``QUANTILE`` of those seconds; 0 if there were none."""
        log = self._logs.get(key)
        if log is None:
            return 0.0
        least = QUANTILE * sum(log.counts)
        counted = 0
        for step, count in enumerate(log.counts):
            counted += count
            if count and counted >= least:
                return step / _STEPS
        return 0.0


class TurnUse:
    """The last minute in which vGPUs held a GPU in turns: how much of it they held, and in how much a kernel ran."""

    def __init__(self) -> None:
        self._at_ns = 0
        self._held_ns: dict[VgpuIndex, int] = {}
        self._seconds: deque[tuple[float, float]] = deque(maxlen=TURNS_SECONDS)

    def note(self, now_ns: int, served: Mapping[VgpuIndex, ServiceTotals], kernel_ratio: float | None) -> None:
        """``served``: the totals of each vGPU. Calls within a second of the last one have no effect. ``kernel_ratio``:
        NVML's utilization of the GPU; None: the driver does not report it. A second counts if two vGPUs or more held
        the GPU in it."""
        passed_ns = now_ns - self._at_ns
        if passed_ns < SECOND_NS:
            return
        held = [
            so_far.held_ns - self._held_ns[key]
            for key, so_far in served.items()
            if so_far.held_ns > self._held_ns.get(key, so_far.held_ns)
        ]
        all_held = sum(held) / passed_ns
        part = min(1.0, all_held)
        in_turns = all_held < TOGETHER  # if not, they held it side by side
        if kernel_ratio is not None and len(held) > 1 and part >= TURNS_HELD and in_turns:
            self._seconds.append((part, min(part, kernel_ratio)))
        self._at_ns, self._held_ns = now_ns, {key: so_far.held_ns for key, so_far in served.items()}

    def wasted(self) -> tuple[float, float] | None:
        """Held and used, in parts of the time, if used is far less. None: it is not, or too few seconds counted."""
        if len(self._seconds) < LEAST_SECONDS:
            return None
        held, used = (statistics.fmean(parts) for parts in zip(*self._seconds, strict=True))
        return (held, used) if used < TURNS_USED * held else None


@dataclass(frozen=True, slots=True)
class Seen:
    """A vGPU as it is, and its use. ``seconds``, ``busy_ratio``: of ``Usage``. ``limit_ppm``: of one GPU's
    time. ``temporal``: False: its share is one of SMs, whose use is not measured. ``wasted``: of ``TurnUse``."""

    vgpu: str
    seconds: int
    busy_ratio: float
    limit_ppm: int
    temporal: bool
    memory_peak_bytes: int
    memory_limit_bytes: int
    memory_refusals: int
    gpu_index: int = 0
    wasted: tuple[float, float] | None = None


def advise(seen: Seen) -> Advice | None:
    """A size for the vGPU; None before it has used anything. Its text is empty while there is nothing to report."""
    if not seen.seconds and not seen.memory_peak_bytes:
        return None
    percent, said = _compute(seen)
    size = _memory(seen)
    if seen.memory_peak_bytes > seen.memory_limit_bytes:
        had, may = format_bytes(seen.memory_peak_bytes), format_bytes(seen.memory_limit_bytes)
        said.append(f"it had {had}, more than the {may} that it may have now")
    if seen.memory_refusals:
        said.append(
            f"it was refused memory {counted(seen.memory_refusals, 'time')} at its "
            f"{format_bytes(seen.memory_limit_bytes)}, so it may need more"
        )
    elif size is not None:
        said.append(f"it had {format_bytes(seen.memory_peak_bytes)} of {format_bytes(seen.memory_limit_bytes)} at most")
    options = [f"--sm {percent:g}"] if percent is not None else []
    options += [f"--mem {size // MIB}M"] if size is not None and size < seen.memory_limit_bytes else []
    typed = f": vgpuctl set {seen.vgpu} {' '.join(options)}" if options else ""
    sentences = ["; ".join(said) + typed] if said else []
    if seen.temporal and seen.wasted is not None:
        held, used = (f"{100 * part:.0f} %" for part in seen.wasted)
        sentences.append(
            f"The vGPUs of GPU {seen.gpu_index} held it for {held} of a minute, and kernels ran for {used} (NVML). "
            f"In spatial mode their programs run side by side: vgpuctl gpu set {seen.gpu_index} --mode spatial, once "
            "no program is attached"
        )
    return Advice(
        observed_ns=seen.seconds * SECOND_NS,
        busy_ratio=seen.busy_ratio,
        memory_peak_bytes=seen.memory_peak_bytes,
        sm_percent=percent,
        memory_bytes=size,
        text=". ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences),
    )


def _compute(seen: Seen) -> tuple[float | None, list[str]]:
    """The percentage of compute, if one can be named, and why."""
    if seen.seconds < LEAST_SECONDS:
        return None, []
    limit_ratio = seen.limit_ppm / PPM
    used = f"{seen.busy_ratio * 100:.0f} % of the GPU's time or less in 95 of 100 seconds of work"
    if seen.busy_ratio >= AT_ITS_LIMIT * limit_ratio and limit_ratio < 1:
        return None, [f"it used {used}, which is what it may: more might serve it better"]
    if not seen.temporal:
        return None, [f"it used {used}; how many SMs it needs is not measured"]
    percent = float(min(100, max(1, math.ceil(seen.busy_ratio * 100 * HEADROOM))))
    return (percent if percent < limit_ratio * 100 else None), [f"it used {used}"]


def _memory(seen: Seen) -> int | None:
    if not seen.memory_peak_bytes or seen.memory_refusals or seen.memory_peak_bytes > seen.memory_limit_bytes:
        return None
    steps = math.ceil(seen.memory_peak_bytes * HEADROOM / MEMORY_STEP_BYTES)
    return min(seen.memory_limit_bytes, steps * MEMORY_STEP_BYTES)
