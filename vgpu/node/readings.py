"""Readings where a server has none, or where less is wanted. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from vgpu.node.routing import told_once
from vgpu.protocol.messages import GpuReading, Snapshot


def only(wanted: Iterable[str], snapshot: Snapshot) -> Snapshot:
    ids = set(wanted)
    if not ids:
        return snapshot
    return snapshot.model_copy(update={"vgpus": tuple(vgpu for vgpu in snapshot.vgpus if vgpu.vgpu_id in ids)})


def restarted(snapshot: Snapshot, restarts: int) -> Snapshot:
    """What a server cannot know of itself."""
    gpus = tuple(gpu.model_copy(update={"restarts": restarts}) for gpu in snapshot.gpus)
    return snapshot.model_copy(update={"gpus": gpus})


def put_together(snapshots: Iterable[Snapshot], at_unix_s: float) -> Snapshot:
    found = tuple(snapshots)
    return Snapshot(
        at_unix_s=at_unix_s,
        gpus=tuple(gpu for snapshot in found for gpu in snapshot.gpus),
        vgpus=told_once([vgpu for snapshot in found for vgpu in snapshot.vgpus]),
    )


def unknown_gpu(index: int, *, simulated: bool) -> GpuReading:
    """A GPU whose server has never answered."""
    return GpuReading(
        index=index,
        uuid="",
        name="unknown",
        simulated=simulated,
        state="failed",
        mode="temporal",
        mode_reason="",
        period_ns=0,
        sm_count=0,
        total_memory_bytes=0,
        used_memory_bytes=0,
        guaranteed_ratio=0.0,
        guaranteed_memory_bytes=0,
        vgpus=0,
        processes=0,
        held_ratio=0.0,
        busy_ratio=0.0,
        tokens_per_second=0.0,
        server_pid=None,
        restarts=0,
    )
