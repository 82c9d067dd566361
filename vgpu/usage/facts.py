"""The figures from which ``why`` finds what holds a vGPU back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vgpu.protocol.messages import GpuStatus, OutsideProcess, VgpuStatus
from vgpu.usage.account import SECOND_NS, asked_ratio, is_limited, is_waiting
from vgpu.usage.rows import Sums

WINDOW_S: Final = 3600
"""The history that counts."""
LEAST_NS: Final = 30 * SECOND_NS
"""With less of it, the last second counts alone."""


@dataclass(frozen=True, slots=True)
class Facts:
    """``gpus``: all of the node; ``neighbours``: the other vGPUs of its GPU. ``recent``: its sums over the last
    ``WINDOW_S``. ``idle_s``: since it used the GPU last, or since it was made. ``advised_percent``: the size that its
    GPU Server derived from its use; None: it has none."""

    vgpu: VgpuStatus
    gpu: GpuStatus
    gpus: Sequence[GpuStatus]
    neighbours: Sequence[VgpuStatus]
    recent: Sums
    idle_s: float
    advised_percent: float | None = None

    @property
    def name(self) -> str:
        return self.vgpu.name or self.vgpu.vgpu_id

    @property
    def here(self) -> str:
        return f"GPU {self.gpu.index}"

    @property
    def live(self) -> bool:
        """Whether the last second counts, for want of history with a program in it."""
        return self.recent.attached_ns < LEAST_NS

    @property
    def used(self) -> float:
        """Of the GPU, while a program was in it."""
        if self.live:
            return self.vgpu.busy_ratio * self.vgpu.sm_percent_granted / 100
        return self.recent.used_ns / self.recent.attached_ns

    @property
    def promised(self) -> float:
        return self.vgpu.guarantee_ratio * self.vgpu.sm_percent_granted / 100

    @property
    def limited(self) -> float:
        """The part of the time with a program in it for which it was at its limit."""
        return float(is_limited(self.vgpu)) if self.live else self.recent.limited_ns / self.recent.attached_ns

    @property
    def waiting(self) -> float:
        return float(is_waiting(self.vgpu)) if self.live else self.recent.waiting_ns / self.recent.attached_ns

    @property
    def refusals(self) -> int:
        return self.vgpu.memory_refusals if self.live else self.recent.refusals

    @property
    def swaps_per_hour(self) -> float:
        hours = self.recent.measured_ns / SECOND_NS / 3600
        return self.recent.swaps / hours if self.recent.measured_ns >= LEAST_NS else 0.0

    @property
    def percent(self) -> float:
        """What ``--sm`` of the vGPU is."""
        return self.vgpu.spec.compute_ratio * 100

    @property
    def outside(self) -> list[OutsideProcess]:
        """Its owner's processes on this GPU that are in no vGPU."""
        return [process for process in self.gpu.outside if process.uid == self.vgpu.owner_uid]


def figures(facts: Facts) -> dict[str, float]:
    """What the findings were found from."""
    return {
        "promised_percent": round(facts.promised * 100, 1),
        "used_percent": round(facts.used * 100, 1),
        "at_limit_percent": round(facts.limited * 100, 1),
        "waiting_percent": round(facts.waiting * 100, 1),
        "free_percent": round(free(facts.gpu) * 100, 1),
        "measured_seconds": round(facts.recent.measured_ns / SECOND_NS, 1),
        "attached_seconds": round(facts.recent.attached_ns / SECOND_NS, 1),
        "idle_seconds": round(facts.idle_s, 1),
        "refusals": facts.refusals,
        "swaps_per_hour": round(facts.swaps_per_hour, 1),
        "memory_used_bytes": facts.vgpu.memory_used_bytes,
        "memory_limit_bytes": facts.vgpu.memory_limit_bytes,
    }


def free(gpu: GpuStatus) -> float:
    """The part of the GPU that is promised to no vGPU."""
    return max(0.0, 1 - gpu.guaranteed_ratio)


def free_memory(gpu: GpuStatus) -> int:
    return max(0, gpu.total_memory_bytes - gpu.guaranteed_memory_bytes)


def asked(vgpu: VgpuStatus) -> float:
    """The part of the GPU that its specification asks for."""
    return asked_ratio(vgpu) * vgpu.sm_percent_granted / 100
