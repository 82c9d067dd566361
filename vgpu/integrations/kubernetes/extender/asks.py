"""What a pod asks for, pure. The names are those of other projects, so that their manifests need no change.

===================================  ==================================================================================
``aliyun.com/gpu-mem``               GiB of one GPU; the containers of a pod share the GPU
``nvidia.com/gpu``                   vGPUs, each on a GPU of its own (HAMi's meaning)
``nvidia.com/gpumem``                MiB of each of them
``nvidia.com/gpumem-percentage``     or percent of its GPU; without either, the whole memory
``nvidia.com/gpucores``              percent of its GPU's time, guaranteed and at most
===================================  ==================================================================================

Without ``gpucores`` a vGPU is guaranteed the same part of the time as of the memory, and may use what is idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.kubernetes.dra import Object, amount
from vgpu.integrations.kubernetes.profiles import GIB
from vgpu.integrations.kubernetes.resources import MEMORY
from vgpu.spec import SMALLEST_MEMORY_BYTES
from vgpu.units import MIB

SHARES: Final = "nvidia.com/gpu"
MEBIBYTES: Final = "nvidia.com/gpumem"
PERCENTAGE: Final = "nvidia.com/gpumem-percentage"
CORES: Final = "nvidia.com/gpucores"
NAMES: Final = (MEMORY, SHARES, MEBIBYTES, PERCENTAGE, CORES)
ALLOCATED: Final = (MEMORY, SHARES)
"""The kubelet allocates devices of these two. The others are words between pod and extender."""
MOST_GPUS: Final = 16
_LEAST_SM: Final = 1.0

Size = tuple[str, int]
"""All that the kubelet says of a container: the resource, and how many of its devices."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """Of one vGPU on one GPU. ``sm``: percent of the time that is guaranteed. ``limited``: it is also the most."""

    sm: float
    memory_bytes: int
    limited: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """What one container asks for: ``gpus`` vGPUs that are alike. ``cores``: 0 if it does not say."""

    container: str
    size: Size
    gpus: int = 1
    memory_bytes: int = 0
    memory_percent: int = 0
    cores: int = 0

    def on(self, total_memory_bytes: int) -> Amounts:
        """Each of its vGPUs on a GPU with so much memory."""
        memory = self.memory_bytes or total_memory_bytes * self.memory_percent // 100 // MIB * MIB
        if self.cores:
            return Amounts(float(self.cores), memory, limited=True)
        whole = total_memory_bytes // GIB * GIB or total_memory_bytes or 1
        return Amounts(min(100.0, max(_LEAST_SM, 100 * memory / whole)), memory, limited=False)


def asks_of(pod: Object) -> list[Ask]:
    """Empty: it asks for no GPU. ``VgpuError`` (invalid): no vGPU can be what it asks for."""
    spec = pod.get("spec") or {}
    for one in spec.get("initContainers") or []:
        if name := next(iter(_amounts(one)), None):
            text = f"init container {one.get('name')} asks for {name}, and init containers get no vGPU here"
            raise VgpuError(ErrorCode.INVALID, text, "move it to a container")
    return [ask for one in spec.get("containers") or [] for ask in _asks(one)]


def _asks(container: Object) -> Iterator[Ask]:
    name, asked = str(container.get("name", "")), _amounts(container)
    if not asked:
        return
    theirs = [each for each in asked if each != MEMORY]
    if MEMORY in asked and theirs:
        text = f"container {name} asks for {MEMORY} and for {theirs[0]}, which are two vGPUs in one"
        raise VgpuError(ErrorCode.INVALID, text, "ask for one of them")
    if MEMORY in asked:
        yield Ask(name, (MEMORY, asked[MEMORY]), memory_bytes=asked[MEMORY] * GIB)
        return
    gpus, mebibytes, cores = asked.get(SHARES, 0), asked.get(MEBIBYTES, 0), asked.get(CORES, 0)
    percent = 0 if mebibytes else asked.get(PERCENTAGE, 100)
    if not gpus:
        text = f"container {name} asks for {theirs[0]} without {SHARES}, so the kubelet gives it no device"
        raise VgpuError(ErrorCode.INVALID, text, f"add {SHARES}: 1")
    if gpus > MOST_GPUS:
        raise VgpuError(ErrorCode.INVALID, f"container {name} asks for {gpus} vGPUs, and {MOST_GPUS} are the most")
    if percent > 100 or cores > 100:
        text = f"container {name} asks for more than 100 percent of a GPU"
        raise VgpuError(ErrorCode.INVALID, text, f"{SHARES} says how many GPUs")
    if mebibytes and mebibytes * MIB < SMALLEST_MEMORY_BYTES:
        text = f"container {name} asks for {mebibytes} MiB, and {SMALLEST_MEMORY_BYTES // MIB} MiB are the least"
        raise VgpuError(ErrorCode.INVALID, text)
    yield Ask(name, (SHARES, gpus), gpus, mebibytes * MIB, percent, cores)


def _amounts(container: Object) -> dict[str, int]:
    """Of each resource that is served here. Kubernetes wants limits and requests of such resources to be equal."""
    said: Mapping[str, Any] = container.get("resources") or {}
    both = {**(said.get("requests") or {}), **(said.get("limits") or {})}
    found = {name: amount(both[name]) for name in NAMES if name in both}
    if wrong := [name for name, count in found.items() if count < 0]:
        raise VgpuError(ErrorCode.INVALID, f"container {container.get('name')} asks for less than no {wrong[0]}")
    return {name: count for name, count in found.items() if count}
