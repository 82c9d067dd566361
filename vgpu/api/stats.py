"""``Stats``: one reading of a vGPU."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Stats:
    """One vGPU now. ``*_ratio``: 0–1 of the GPU's time, over the last second; totals count from creation.

    ``state``            as ``vgpuctl ls`` prints it: idle, waiting, running, suspended, …
    ``guarantee_ratio``  promised; ``limit_ratio``: the most it may have.
    ``held_ratio``       with a lease in force; ``busy_ratio``: with work on the GPU.
    ``busy_ns``          GPU time, in nanoseconds.
    ``throttled``        at its limit.
    ``memory_*_bytes``   charged, at most, and at the peak. ``memory_refusals``: allocations refused at the limit.
    ``processes``        attached now.
    ``reading``          everything that the node answered, by the names of ``vgpuctl ls -o json``.
    """

    state: str
    gpu_index: int
    guarantee_ratio: float
    limit_ratio: float
    held_ratio: float
    busy_ratio: float
    busy_ns: int
    launches: int
    throttled: bool
    memory_used_bytes: int
    memory_limit_bytes: int
    memory_peak_bytes: int
    memory_refusals: int
    processes: int
    warnings: tuple[str, ...]
    reading: dict[str, Any]

    def metrics(self, prefix: str = "vgpu/") -> dict[str, float]:
        """Its numbers by name, for a logger of training runs (W&B, TensorBoard, MLflow)."""
        numbers = {field.name: getattr(self, field.name) for field in fields(self)}
        return {prefix + name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}

    @classmethod
    def of(cls, reading: dict[str, Any]) -> Stats:
        own = {field.name: reading[field.name] for field in fields(cls) if field.name not in {"reading", "warnings"}}
        return cls(**own, warnings=tuple(reading.get("warnings", ())), reading=reading)
