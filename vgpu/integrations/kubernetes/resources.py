"""The resources of the device plugin, pure: which devices a GPU has, and which vGPU a container's devices are.

===================================  ==================================================================================
``vgpu.dev/30sm-8g``                 a device is a vGPU of this size
``nvshare.com/gpu``                  a device is a share of a GPU, with the memory of the whole card
``aliyun.com/gpu-mem``               a device is one GiB; all devices of a container are one vGPU
``aliyun.com/gpu-count``             a device is a GPU, for those that read how many there are; no container gets one
===================================  ==================================================================================

The id of a device names its GPU, its word and its number: ``GPU-UUID--30sm-8g--2``. The claim of a vGPU has the id of
its device as its uid. That of several devices says how many they are, and which is the first: ``GPU-UUID--mem-8g--16``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.kubernetes import dra
from vgpu.integrations.kubernetes.dra import DRIVER, Object
from vgpu.integrations.kubernetes.profiles import GIB, Profile
from vgpu.spec import VgpuSpec
from vgpu.units import counted

KIND: Final = "plugin"
LONGEST_ID: Final = 63
SHARES: Final = ("nvshare.com/gpu", "xpushare.com/gpu")
MEMORY: Final = "aliyun.com/gpu-mem"
CARDS: Final = "aliyun.com/gpu-count"
DEVICES: Final = "devices"
"""The label of a claim that says which devices its vGPU is: a hexadecimal number, with a bit for each device."""
_LEAST_SM: Final = 1.0
"""Percent: the least that a vGPU is guaranteed."""
_WORD: Final = "mem"
_GIB: Final = re.compile(rf".+--{_WORD}--\d+")
_TOGETHER: Final = re.compile(rf"(.+)--{_WORD}-\d+g--\d+")


@dataclass(frozen=True, slots=True)
class Piece:
    """One vGPU of a container. ``uid`` and ``labels``: of its claim. ``gpu``: its UUID."""

    uid: str
    gpu: str
    devices: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resource:
    """``name``: in a pod's limits. ``word``: in the ids of its devices. ``profile``: the size of its vGPUs; None:
    ``shares`` of each GPU, which may use what is idle, and the memory of the whole card."""

    name: str
    word: str
    profile: Profile | None = None
    shares: int = 0

    def spec(self, gpu: Object, count: int = 1) -> VgpuSpec:
        """Of the vGPU that ``count`` devices of ``gpu`` are."""
        if self.profile is not None:
            return VgpuSpec.parse(sm_percent=float(self.profile.sm), memory_bytes=self.profile.memory_bytes)
        return VgpuSpec.parse(sm_percent=100.0, quota_request_percent=100 / self.shares, oversubscribe="swap")

    def count(self, gpu: Object, sm: float, memory_bytes: int) -> int:
        """How many fit into so much compute (percent) and memory of ``gpu``."""
        if self.profile is not None:
            return self.profile.count(math.floor(sm), memory_bytes)
        return max(0, math.floor(round(sm * self.shares / 100, 6)))

    def pieces(self, devices: Sequence[str]) -> list[Piece]:
        """The vGPUs of a container with these devices. ``VgpuError``: it cannot have them."""
        return [Piece(device, gpu_of(device), (device,)) for device in devices]

    def choose(
        self, available: Sequence[str], must: Sequence[str], size: int, gpus: Iterable[Object], made: frozenset[str]
    ) -> list[str]:
        """The devices that a container of ``size`` devices had best have."""
        return preferred(available, must, size, gpus, made)


@dataclass(frozen=True, slots=True)
class Memory(Resource):
    """A device for each whole GiB of a GPU. N devices are a vGPU of N GiB. It is guaranteed the same part of the GPU's
    time as of its devices, and may use what is idle."""

    def spec(self, gpu: Object, count: int = 1) -> VgpuSpec:
        part = max(_LEAST_SM, 100 * count / _gibibytes(gpu))
        return VgpuSpec.parse(sm_percent=100.0, quota_request_percent=part, memory_bytes=count * GIB)

    def count(self, gpu: Object, sm: float, memory_bytes: int) -> int:
        by_sm = math.floor(round(sm * _gibibytes(gpu) / 100, 3)) if sm >= _LEAST_SM else 0
        return max(0, min(memory_bytes // GIB, by_sm))

    def pieces(self, devices: Sequence[str]) -> list[Piece]:
        gpus = sorted({gpu_of(device) for device in devices})
        if len(gpus) > 1:
            text = (
                f"{self.name} of one container is a vGPU of one GPU, and the kubelet chose {counted(len(gpus), 'GPU')}"
            )
            raise VgpuError(ErrorCode.INVALID, text, "ask for no more than one GPU has left")
        return [_together(gpu, devices) for gpu in gpus]

    def choose(
        self, available: Sequence[str], must: Sequence[str], size: int, gpus: Iterable[Object], made: frozenset[str]
    ) -> list[str]:
        return on_one_gpu(available, must, size)


@dataclass(frozen=True, slots=True)
class Cards(Resource):
    """A device for each GPU. Schedulers of gpushare read in a node's status how many there are."""

    def count(self, gpu: Object, sm: float, memory_bytes: int) -> int:
        return 1

    def pieces(self, devices: Sequence[str]) -> list[Piece]:
        text = f"{self.name} says how many GPUs the machine has, and no container can have one"
        raise VgpuError(ErrorCode.INVALID, text, f"ask for {MEMORY}")


def of_profile(profile: Profile) -> Resource:
    return Resource(f"{DRIVER}/{profile.name}", profile.name, profile)


def compatible(text: str) -> tuple[Resource, ...]:
    """``nvshare.com/gpu=4``: four of each GPU. ``aliyun.com/gpu-mem``: its memory. ``VgpuError`` (invalid)."""
    if text == MEMORY:
        return Memory(MEMORY, _WORD), Cards(CARDS, "card")
    name, _, count = text.partition("=")
    if name not in SHARES or not count.isdecimal() or not 1 <= int(count) <= 64:
        raise VgpuError(
            ErrorCode.INVALID,
            f"{text!r} is no resource of another project",
            f"{SHARES[0]}=4 is four of each GPU, {MEMORY} is its memory",
        )
    return (Resource(name, f"{name.partition('.')[0]}{count}", None, int(count)),)


# --- devices


def ids_of(gpu: Object, resource: Resource) -> list[str]:
    """The devices of a resource on an empty GPU. They are the same at each start."""
    count = resource.count(gpu, 100, gpu["total_memory_bytes"])
    ids = [f"{gpu['uuid']}--{resource.word}--{number}" for number in range(count)]
    if too_long := [each for each in ids if len(each) > LONGEST_ID]:
        raise VgpuError(ErrorCode.INVALID, f"the kubelet takes no id of more than {LONGEST_ID} letters: {too_long[0]}")
    return ids


def gpu_of(device: str) -> str:
    return device.partition("--")[0]


def _number_of(device: str) -> int:
    return int(device.rpartition("--")[2])


def _gibibytes(gpu: Object) -> int:
    return int(gpu["total_memory_bytes"] // GIB)


def _together(gpu: str, devices: Sequence[str]) -> Piece:
    """Containers have no device in common, so its first device tells the vGPU of one from those of others."""
    numbers = [_number_of(device) for device in devices]
    bits = sum(1 << number for number in numbers)
    uid = f"{gpu}--{_WORD}-{len(numbers)}g--{min(numbers)}"
    return Piece(uid, gpu, tuple(devices), {DEVICES: f"{bits:x}"})


def uids(devices: Iterable[str]) -> frozenset[str]:
    """Of the claims of one container's vGPUs, by its devices of all resources."""
    by_gpu: dict[str, list[str]] = {}
    found = set()
    for device in devices:
        if _GIB.fullmatch(device):
            by_gpu.setdefault(gpu_of(device), []).append(device)
        else:
            found.add(device)
    return frozenset(found | {_together(gpu, each).uid for gpu, each in by_gpu.items()})


def devices_of(claim: Object) -> list[str]:
    """The devices that the vGPU of a claim is."""
    match = _TOGETHER.fullmatch(claim["uid"])
    if match is None:
        return [claim["uid"]]
    bits = int(claim["labels"].get(DEVICES, "0"), 16)
    return [f"{match[1]}--{_WORD}--{number}" for number in range(bits.bit_length()) if bits >> number & 1]


def health(gpus: Iterable[Object], vgpus: Iterable[Object], resource: Resource) -> dict[str, bool]:
    """Each device, and whether a pod may have it now: its vGPU exists, or fits beside those that do."""
    claims = [claim for vgpu in vgpus if (claim := vgpu.get("claim") or {}).get("kind") == KIND]
    made = {device for claim in claims for device in devices_of(claim)}
    found: dict[str, bool] = {}
    for gpu in gpus:
        fits = resource.count(gpu, *_room(gpu))
        for device in ids_of(gpu, resource):
            exists = device in made
            found[device] = gpu["state"] == "serving" and (exists or fits > 0)
            fits -= not exists
    return found


def _room(gpu: Object) -> tuple[float, int]:
    return 100 - gpu["guaranteed_ratio"] * 100 + 1e-6, gpu["total_memory_bytes"] - gpu["guaranteed_memory_bytes"]


def preferred(
    available: Sequence[str], must: Sequence[str], size: int, gpus: Iterable[Object], made: frozenset[str]
) -> list[str]:
    """Of ``available``, ``size`` devices: on different GPUs, those whose vGPU exists, then on the fullest GPU."""
    room = {gpu["uuid"]: _room(gpu) for gpu in gpus}
    chosen = list(must)
    left = [device for device in available if device not in must]
    while left and len(chosen) < size:
        used = [gpu_of(device) for device in chosen]
        best = min(left, key=lambda one: (used.count(gpu_of(one)), one not in made, room.get(gpu_of(one), ()), one))
        left.remove(best)
        chosen.append(best)
    return chosen


def on_one_gpu(available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
    """Of ``available``, ``size`` devices of the GPU with the fewest that suffice. If no GPU has so many, those of
    several: ``pieces`` then refuses them."""
    left: dict[str, list[str]] = {}
    for device in available:
        left.setdefault(gpu_of(device), []).append(device)
    at = {gpu_of(device) for device in must}
    order = sorted(left, key=lambda gpu: (gpu not in at, len(left[gpu]) < size, len(left[gpu]), gpu))
    lowest = [device for gpu in order for device in sorted(left[gpu], key=_number_of)]
    return list(dict.fromkeys([*must, *lowest]))[:size]


def replaced(piece: Piece, vgpus: Iterable[Object]) -> list[dra.Made]:
    """The vGPUs of containers that have ended: the kubelet has now given one of their devices to another container."""
    devices = frozenset(piece.devices)
    left = [vgpu for vgpu in vgpus if not devices.isdisjoint(devices_of(vgpu["claim"]))]
    return [one for one in dra.made_of(left, KIND) if one.uid != piece.uid]


def unused(made: Iterable[dra.Made], held: Iterable[str], now_unix_s: float) -> list[dra.Made]:
    """The vGPUs whose devices no container has. ``held``: the claims of containers, read after ``made``."""
    actions = dra.reconcile(held, made, now_unix_s)
    return [action.vgpu for action in actions if isinstance(action, dra.Remove)]
