"""What the node's snapshots show of the vGPUs that have bounds, and of the room on its GPUs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from vgpu.autoscale.plan import Reading, Room
from vgpu.protocol.messages import Snapshot, VgpuStatus

KNOWN: Final = frozenset({"idle", "waiting", "running"})
"""States in which a reading shows the demand. A suspended vGPU, say, wants nothing because it may not."""


def readings_of(
    before: Snapshot | None, now: Snapshot, passed_s: float, besides: Collection[str] = ()
) -> list[Reading]:
    """The vGPUs with bounds whose demand is known, but for ``besides``. ``passed_s``: between the snapshots."""
    last = {} if before is None else {vgpu.vgpu_id: vgpu for vgpu in before.vgpus}
    return [
        reading_of(last.get(vgpu.vgpu_id), vgpu, passed_s)
        for vgpu in now.vgpus
        if vgpu.spec.scales and vgpu.state in KNOWN and vgpu.leaving_to is None and vgpu.vgpu_id not in besides
    ]


def reading_of(before: VgpuStatus | None, now: VgpuStatus, passed_s: float) -> Reading:
    return Reading(
        vgpu=now.vgpu_id,
        gpu=now.gpu_index,
        sm_percent=now.spec.compute_ratio * 100,
        memory_bytes=now.spec.memory_bytes or now.memory_limit_bytes,
        busy=_busy(before, now, passed_s),
        throttled=now.throttled_ratio,
        memory_used_bytes=now.memory_used_bytes,
        refusals=now.memory_refusals,
        refused_bytes=now.memory_refused_bytes,
        sm_range=now.spec.sm_range_percent,
        memory_range=now.spec.memory_range_bytes,
        movable=now.mode == "temporal" and now.spec.group is None,
    )


def _busy(before: VgpuStatus | None, now: VgpuStatus, passed_s: float) -> float:
    """The busy part since the reading before. After a restart of the GPU Server, or a move, its totals may be those of
    a second ago; then the part of the last second."""
    if before is not None and before.gpu_index == now.gpu_index and passed_s > 0:
        part = (now.busy_ns - before.busy_ns) / 1e9 / passed_s
        if 0 <= part <= 1:
            return part
    return min(1.0, now.busy_ratio)


def rooms_of(now: Snapshot) -> list[Room]:
    """What the GPUs that serve have not promised. In spatial mode no share grows, and no vGPU comes."""
    return [
        Room(
            gpu.index,
            max(0.0, 100 * (1 - gpu.guaranteed_ratio)),
            max(0, gpu.total_memory_bytes - gpu.guaranteed_memory_bytes),
            not gpu.draining,
        )
        for gpu in now.gpus
        if gpu.state == "serving" and gpu.mode == "temporal"
    ]
