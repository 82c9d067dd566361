"""Room for what is asked for now: vGPUs that have grown beyond their guarantee give it back.

A lower bound is a promise, and what a vGPU has beyond it is not. So a new vGPU, or a size that a person sets, may have
it. The vGPU that lacks it then moves, or needs a replica, as ``plan`` decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from vgpu.autoscale.plan import Reading, Resize, Room
from vgpu.autoscale.size import MEMORY_STEP_BYTES, tenths, with_margin


def reclaimed(grown: Sequence[Reading], room: Room, sm_percent: float, memory_bytes: int) -> list[Resize] | None:
    """What the vGPUs of one GPU have to give back, so that ``sm_percent`` and ``memory_bytes`` fit it. None: they have
    too little beyond their guarantees. Those with most of it give first."""
    lacking_sm, lacking_bytes = sm_percent - room.sm_percent, memory_bytes - room.memory_bytes
    sizes: dict[str, float] = {}
    for reading in sorted(grown, key=lambda one: (-spare_sm(one), one.vgpu)):
        given = min(spare_sm(reading), tenths(max(0.0, lacking_sm)))
        if given > 0:
            sizes[reading.vgpu] = round(reading.sm_percent - given, 1)
            lacking_sm -= reading.sm_percent - sizes[reading.vgpu]
    memories: dict[str, int] = {}
    for reading in sorted(grown, key=lambda one: (-spare_bytes(one), one.vgpu)):
        steps = -(-max(0, lacking_bytes) // MEMORY_STEP_BYTES) * MEMORY_STEP_BYTES
        size = min(spare_bytes(reading), steps)
        if size > 0:
            memories[reading.vgpu] = reading.memory_bytes - size
            lacking_bytes -= size
    if lacking_sm > 1e-6 or lacking_bytes > 0:
        return None
    return [
        Resize(reading.vgpu, sizes.get(reading.vgpu), memories.get(reading.vgpu), _reason(reading, sizes, memories))
        for reading in grown
        if reading.vgpu in sizes.keys() | memories.keys()
    ]


def spare_sm(reading: Reading) -> float:
    """The compute that it has beyond its guarantee."""
    return 0.0 if reading.sm_range is None else max(0.0, reading.sm_percent - reading.sm_range[0])


def spare_bytes(reading: Reading) -> int:
    """The memory that it has beyond its guarantee, and does not use."""
    if reading.memory_range is None:
        return 0
    return max(0, reading.memory_bytes - max(reading.memory_range[0], with_margin(reading.memory_used_bytes)))


def _reason(reading: Reading, sizes: dict[str, float], memories: dict[str, int]) -> str:
    given = []
    if reading.vgpu in sizes:
        given.append(f"--sm {reading.sm_percent:g} to {sizes[reading.vgpu]:g}")
    if reading.vgpu in memories:
        given.append("less memory")
    return f"scaled, {' and '.join(given)}: another vGPU is promised what it had beyond its lower bound"
