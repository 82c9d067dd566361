"""Snapshots for servers that have none, and parts of snapshots. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vgpu.node.routing import merge_migrating
from vgpu.protocol.messages import GpuStatus, Snapshot


def only(wanted: Iterable[str], snapshot: Snapshot) -> Snapshot:
    ids = set(wanted)
    if not ids:
        return snapshot
    return snapshot.model_copy(update={"vgpus": tuple(vgpu for vgpu in snapshot.vgpus if vgpu.vgpu_id in ids)})


def restarted(snapshot: Snapshot, restarts: int, replicas: Mapping[str, int]) -> Snapshot:
    """Add what a server cannot know of itself: how often the node has restarted it, and which of its vGPUs need
    ``replicas``."""
    gpus = tuple(gpu.model_copy(update={"restarts": restarts}) for gpu in snapshot.gpus)
    vgpus = snapshot.vgpus
    if replicas:
        vgpus = tuple(v.model_copy(update={"replicas_wanted": replicas.get(v.vgpu_id, 0)}) for v in vgpus)
    return snapshot.model_copy(update={"gpus": gpus, "vgpus": vgpus})


def merge_snapshots(snapshots: Iterable[Snapshot], at_unix_s: float) -> Snapshot:
    found = tuple(snapshots)
    return Snapshot(
        at_unix_s=at_unix_s,
        gpus=tuple(gpu for snapshot in found for gpu in snapshot.gpus),
        vgpus=merge_migrating([vgpu for snapshot in found for vgpu in snapshot.vgpus]),
    )


def stale(
    last: Snapshot | None,
    index: int,
    *,
    simulated: bool,
    failed: bool,
    reason: str,
    server: Mapping[str, int | None],
    at_unix_s: float,
) -> Snapshot:
    """The snapshot of a server that does not answer: its ``last`` one, if there is one, with the reason why it is not
    current. ``server``: what the node knows of the server."""
    mark = {"state": "failed" if failed else "restarting", "reason": reason}
    gpu = last.gpus[0] if last else unknown_gpu(index, simulated=simulated)
    return Snapshot(
        at_unix_s=at_unix_s,
        gpus=(gpu.model_copy(update={**mark, **server}),),
        vgpus=tuple(vgpu.model_copy(update=mark) for vgpu in last.vgpus) if last else (),
    )


def unknown_gpu(index: int, *, simulated: bool) -> GpuStatus:
    """A GPU with a server that has never answered."""
    return GpuStatus(
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
