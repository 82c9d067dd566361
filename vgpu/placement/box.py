"""The GPUs of one node, for a new vGPU: which to try first. A GPU Server admits or refuses; this is only the order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vgpu.placement.mix import Mix
from vgpu.placement.policies import POLICIES
from vgpu.placement.state import Gpu, Kind, Option, Request, Room
from vgpu.protocol.messages import GpuStatus, VgpuStatus
from vgpu.share import CARD_MPERCENT, PPM, Mode
from vgpu.spec import VgpuSpec


@dataclass(frozen=True, slots=True)
class Rank:
    """One GPU for a new vGPU. ``reasons``: what led to its rank, in GPUs; empty: it has no room."""

    gpu: GpuStatus
    reasons: Mapping[str, float]

    @property
    def value(self) -> float:
        return sum(self.reasons.values())


def ranked(policy: str, gpus: Sequence[GpuStatus], vgpus: Sequence[VgpuStatus], spec: VgpuSpec) -> list[Rank]:
    """The GPUs by the policy, best first; of equal ones the lower index, and last those that have no room by these
    figures, most room first. The mix of ``fit`` is what the vGPUs here were promised, and ``spec``."""
    found = []
    for gpu in gpus:
        kind = Kind(gpu.name, gpu.total_memory_bytes, Mode(gpu.mode))
        here = [promised(vgpu, gpu) for vgpu in vgpus if vgpu.gpu_index == gpu.index]
        everywhere = [promised(vgpu, gpu) for vgpu in vgpus]
        asked = request(spec, gpu)
        room = Room(kind, (left(gpu, here),))
        option: Option | None = next(room.options(asked), None)
        reasons = {} if option is None else POLICIES[policy].parts(option, Mix([*everywhere, asked]))
        found.append((bool(reasons), Rank(gpu, reasons), room.gpus[0]))
    found.sort(key=lambda one: (not one[0], -one[1].value, -_scarcer(one[2], one[1].gpu), one[1].gpu.index))
    return [rank for _, rank, _ in found]


def _scarcer(gpu: Gpu, status: GpuStatus) -> float:
    """The scarcer of time and memory that the GPU has left, 0–1."""
    return min(gpu.time_ppm / PPM, gpu.memory_bytes / (status.total_memory_bytes or 1))


def request(spec: VgpuSpec, gpu: GpuStatus) -> Request:
    """What the specification asks of a GPU like this one."""
    compute, quota = spec.compute_ratio, spec.quota_request_ratio
    memory = spec.memory_on(gpu.total_memory_bytes)
    if Mode(gpu.mode) is Mode.TEMPORAL:
        return Request(int(compute * quota * PPM), memory)
    return Request(int(quota * PPM), memory, sm_mpercent=int(compute * CARD_MPERCENT))


def promised(vgpu: VgpuStatus, gpu: GpuStatus) -> Request:
    """What the vGPU was promised, as a request for a GPU like this one."""
    time = int(vgpu.guarantee_ratio * PPM)
    width = int(vgpu.sm_percent_granted * CARD_MPERCENT / 100)
    if Mode(gpu.mode) is Mode.TEMPORAL:
        return Request(time * width // CARD_MPERCENT, vgpu.memory_limit_bytes)
    return Request(time, vgpu.memory_limit_bytes, sm_mpercent=width)


def left(gpu: GpuStatus, here: Sequence[Request]) -> Gpu:
    """What the GPU has left beside the vGPUs on it."""
    memory = max(0, gpu.total_memory_bytes - gpu.guaranteed_memory_bytes)
    if Mode(gpu.mode) is Mode.TEMPORAL:
        return Gpu(max(0, round((1 - gpu.guaranteed_ratio) * PPM)), memory)
    time = PPM - sum(one.time_ppm * one.sm_mpercent // CARD_MPERCENT for one in here)
    return Gpu(max(0, time), memory, tuple(sorted((one.sm_mpercent, one.time_ppm) for one in here)))
