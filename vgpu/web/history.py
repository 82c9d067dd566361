"""The last minutes of a few figures, bounded, for the charts of a page that has just been opened. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from vgpu.protocol.hello import Reading
from vgpu.protocol.messages import Snapshot

MOST_SAMPLES: Final = 600
"""Five minutes at two a second."""


class VgpuHistory(Reading):
    """One vGPU, with a value per instant of ``History.at_unix_s``; None: the vGPU did not exist then."""

    tokens_per_second: tuple[float | None, ...]
    held_ratio: tuple[float | None, ...]
    busy_ratio: tuple[float | None, ...]
    memory_used_bytes: tuple[int | None, ...]


class GpuHistory(Reading):
    """One GPU, likewise."""

    tokens_per_second: tuple[float | None, ...]
    held_ratio: tuple[float | None, ...]
    busy_ratio: tuple[float | None, ...]
    utilization_ratio: tuple[float | None, ...]


class History(Reading):
    """Oldest first. The instants are not evenly spaced: they are far apart from times when no page was open."""

    at_unix_s: tuple[float, ...]
    gpus: dict[int, GpuHistory]
    vgpus: dict[str, VgpuHistory]


@dataclass(frozen=True, slots=True)
class _Sample:
    at_unix_s: float
    gpus: dict[int, tuple[float, float, float, float | None]]
    vgpus: dict[str, tuple[float, float, float, int]]


class Samples:
    """The last ``MOST_SAMPLES`` snapshots, of each only the figures of ``History``."""

    def __init__(self, most: int = MOST_SAMPLES) -> None:
        self._samples: deque[_Sample] = deque(maxlen=most)

    def add(self, snapshot: Snapshot) -> None:
        gpus = {
            gpu.index: (round(gpu.tokens_per_second, 2), round(gpu.held_ratio, 4), round(gpu.busy_ratio, 4), used)
            for gpu in snapshot.gpus
            for used in (gpu.utilization_ratio,)
        }
        vgpus = {
            vgpu.vgpu_id: (
                round(vgpu.tokens_per_second, 2),
                round(vgpu.held_ratio, 4),
                round(vgpu.busy_ratio, 4),
                vgpu.memory_used_bytes,
            )
            for vgpu in snapshot.vgpus
        }
        self._samples.append(_Sample(round(snapshot.at_unix_s, 3), gpus, vgpus))

    def since(self, unix_s: float) -> History:
        """What is kept since then; of vGPUs and GPUs that are there now."""
        kept = [sample for sample in self._samples if sample.at_unix_s >= unix_s]
        last = kept[-1] if kept else _Sample(0.0, {}, {})
        return History(
            at_unix_s=tuple(sample.at_unix_s for sample in kept),
            gpus={index: _gpu([sample.gpus.get(index) for sample in kept]) for index in last.gpus},
            vgpus={vgpu_id: _vgpu([sample.vgpus.get(vgpu_id) for sample in kept]) for vgpu_id in last.vgpus},
        )


def _gpu(rows: list[tuple[float, float, float, float | None] | None]) -> GpuHistory:
    return GpuHistory(
        tokens_per_second=tuple(row and row[0] for row in rows),
        held_ratio=tuple(row and row[1] for row in rows),
        busy_ratio=tuple(row and row[2] for row in rows),
        utilization_ratio=tuple(row and row[3] for row in rows),
    )


def _vgpu(rows: list[tuple[float, float, float, int] | None]) -> VgpuHistory:
    return VgpuHistory(
        tokens_per_second=tuple(row and row[0] for row in rows),
        held_ratio=tuple(row and row[1] for row in rows),
        busy_ratio=tuple(row and row[2] for row in rows),
        memory_used_bytes=tuple(row and row[3] for row in rows),
    )
