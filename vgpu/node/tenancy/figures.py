"""What the queue needs of a snapshot: the GPUs that take vGPUs, what they have left, and what users hold. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from vgpu.autoscale.plan import Reading
from vgpu.autoscale.reclaim import spare_bytes, spare_sm
from vgpu.errors import VgpuError
from vgpu.node.routing import find_gpu
from vgpu.placement.box import left
from vgpu.placement.state import Gpu, Request
from vgpu.protocol.messages import Create, GpuStatus, Snapshot
from vgpu.queueing.order import Room, User
from vgpu.share import PPM
from vgpu.spec import VgpuSpec
from vgpu.units import format_bytes


def open_gpus(snapshot: Snapshot) -> list[GpuStatus]:
    """The GPUs that take vGPUs now."""
    return [gpu for gpu in snapshot.gpus if gpu.state == "serving" and not gpu.draining]


def wanted(asked: Create, gpus: Sequence[GpuStatus]) -> list[GpuStatus]:
    """Those of the GPUs that the request may have."""
    if asked.gpu.lower() == "auto":
        return list(gpus)
    try:
        return [find_gpu(asked.gpu, gpus)]
    except VgpuError:
        return []


def room(gpu: GpuStatus) -> Room:
    has = left(gpu)
    return Room(has.time_ppm / PPM, has.memory_bytes / (gpu.total_memory_bytes or 1))


def with_what_is_given_back(gpu: GpuStatus, grown: Iterable[Reading]) -> Gpu:
    """What the GPU has left, with what its vGPUs have beyond their lower bounds: the admission may take that back."""
    has = left(gpu)
    own = [reading for reading in grown if reading.gpu == gpu.index]
    time_ppm = has.time_ppm + round(sum(map(spare_sm, own)) / 100 * PPM)
    return has._replace(time_ppm=time_ppm, memory_bytes=has.memory_bytes + sum(map(spare_bytes, own)))


def parts(asked: Iterable[tuple[GpuStatus, Request]]) -> dict[int, float]:
    """By GPU, the part of the scarcer of time and memory that is asked for. A GPU with too little memory is left
    out."""
    return {
        gpu.index: max(asks.time_ppm / PPM, asks.memory_bytes / (gpu.total_memory_bytes or 1))
        for gpu, asks in asked
        if asks.memory_bytes <= gpu.total_memory_bytes
    }


def held(snapshot: Snapshot, user_of: Callable[[int], User], but: Container[str]) -> dict[User, float]:
    """What each user holds, in GPUs of the scarcer resource. ``but``: vGPUs that hold nothing now."""
    memory = {gpu.index: gpu.total_memory_bytes for gpu in snapshot.gpus}
    found: dict[User, float] = {}
    for vgpu in snapshot.vgpus:
        if vgpu.vgpu_id not in but:
            user = user_of(vgpu.owner_uid)
            found[user] = found.get(user, 0.0) + _part(vgpu.spec, memory.get(vgpu.gpu_index, 0) or 1)
    return found


def why(gpus: Sequence[GpuStatus], allowed: Container[int], kept: int | None) -> str:
    """Why a request waits that may have ``gpus``, in one sentence. ``allowed``: those that are kept for no other
    request; ``kept``: the one that is kept for it."""
    if not gpus:
        return "no GPU that it may have takes vGPUs now"
    free = [gpu for gpu in gpus if gpu.index in allowed]
    if not free:
        return "each GPU that it may have is kept for a request that has waited longer"
    emptiest = max(free, key=lambda gpu: min(room(gpu).time, room(gpu).memory))
    has = left(emptiest)
    which = f"GPU {emptiest.index}" if len(free) == 1 else f"GPU {emptiest.index}, the emptiest,"
    part = f"{has.time_ppm / PPM * 100:.3g} % of its time and {format_bytes(has.memory_bytes)} of its memory left"
    return f"{which} has {part}" + (f"; GPU {kept} is kept for it" if kept is not None else "")


def _part(spec: VgpuSpec, total_memory_bytes: int) -> float:
    return max(spec.compute_ratio * spec.quota_request_ratio, spec.memory_on(total_memory_bytes) / total_memory_bytes)
