"""The GPUs of one node, for a new vGPU: which to try first. A GPU Server admits or refuses; this is only the order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vgpu.placement.mix import Mix
from vgpu.placement.policies import POLICIES
from vgpu.placement.state import Gpu, Kind, Request, Room
from vgpu.protocol.messages import GpuStatus, VgpuStatus
from vgpu.share import PPM
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
    figures, most room first. The mix of ``fit`` is what the vGPUs here were promised, and ``spec``.

    In spatial mode a vGPU counts by its area, SMs × time. The GPU Server finds out whether its SMs can be packed.
    """
    rule = POLICIES[policy]
    found = []
    for gpu in gpus:
        asked = request(spec, gpu)
        room = Room(Kind(gpu.name, gpu.total_memory_bytes), (left(gpu),))
        option = next(iter(room.options(asked, rule.allows)), None)
        mix = Mix([*(promised(vgpu, gpu) for vgpu in vgpus), asked] if rule.uses_mix else ())
        found.append(Rank(gpu, {} if option is None else rule.parts(option, mix)))
    found.sort(key=lambda rank: (not rank.reasons, -rank.value, -scarcer(rank.gpu), rank.gpu.index))
    return found


def scarcer(gpu: GpuStatus) -> float:
    """What is left of the scarcer of its time and its memory, 0–1."""
    room = left(gpu)
    return min(room.time_ppm / PPM, room.memory_bytes / (gpu.total_memory_bytes or 1))


def request(spec: VgpuSpec, gpu: GpuStatus) -> Request:
    """What the specification asks of a GPU like this one. Overcommitted time, and memory that is swapped or managed,
    need no room of their own."""
    time = 0 if spec.overcommit else round(spec.compute_ratio * spec.quota_request_ratio * PPM)
    memory = spec.memory_on(gpu.total_memory_bytes) if spec.oversubscribe is None else 0
    return Request(time, memory)


def promised(vgpu: VgpuStatus, gpu: GpuStatus) -> Request:
    """What the vGPU was promised, as a request for a GPU like this one."""
    area = round(vgpu.guarantee_ratio * vgpu.sm_percent_granted / 100 * PPM)
    return Request(area, vgpu.spec.memory_on(gpu.total_memory_bytes))


def left(gpu: GpuStatus) -> Gpu:
    """What the GPU has left to promise."""
    time = round((1 - gpu.guaranteed_ratio) * PPM)
    return Gpu(max(0, time), max(0, gpu.total_memory_bytes - gpu.guaranteed_memory_bytes))
