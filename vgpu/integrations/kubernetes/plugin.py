"""The device plugin: a resource for each size of vGPU, such as ``vgpu.dev/30sm-8g``, for clusters without claims.

The id of a device says what to make: ``GPU-UUID--30sm-8g--2`` is the third vGPU of 30 percent and 8 GiB on that GPU.
The kubelet says no pod when it allocates one, and none is needed: the id is the vGPU's claim. The kubelet also does not
say when a pod has ended. So the vGPU of a device that no container has is removed later, or serves the next pod.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vgpu.api.node import Node
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import cdi
from vgpu.integrations.kubernetes import dra, wire
from vgpu.integrations.kubernetes.dra import DRIVER, GRACE_S, Object
from vgpu.integrations.kubernetes.profiles import Profile
from vgpu.loggers import get_logger
from vgpu.spec import VgpuSpec

log = get_logger(__name__)
KIND: Final = "plugin"
LONGEST_ID: Final = 63
LOOK_S: Final = 5.0
"""Between two looks whether the kubelet has left a stream."""
COMPATIBLE: Final = ("nvshare.com/gpu", "xpushare.com/gpu")
_Devices = wire.message("v1beta1.ListAndWatchResponse")
_Options = wire.message("v1beta1.DevicePluginOptions")
_Preferred = wire.message("v1beta1.PreferredAllocationResponse")
_Allocated = wire.message("v1beta1.AllocateResponse")
_Started = wire.message("v1beta1.PreStartContainerResponse")
OPTIONS: Final = _Options(get_preferred_allocation_available=True)


# --- pure


@dataclass(frozen=True, slots=True)
class Resource:
    """``name``: in a pod's limits. ``word``: in the ids of its devices. ``profile``: the size of its vGPUs; None:
    ``shares`` of each GPU, which may use what is idle, and the memory of the whole card."""

    name: str
    word: str
    profile: Profile | None = None
    shares: int = 0

    def spec(self) -> VgpuSpec:
        if self.profile is not None:
            return VgpuSpec.parse(sm_percent=float(self.profile.sm), memory_bytes=self.profile.memory_bytes)
        return VgpuSpec.parse(sm_percent=100.0, quota_request_percent=100 / self.shares, oversubscribe="swap")

    def count(self, sm: float, memory_bytes: int) -> int:
        """How many fit into so much compute (percent) and memory."""
        if self.profile is not None:
            return self.profile.count(math.floor(sm), memory_bytes)
        return max(0, math.floor(round(sm * self.shares / 100, 6)))


def of_profile(profile: Profile) -> Resource:
    return Resource(f"{DRIVER}/{profile.name}", profile.name, profile)


def compatible(text: str) -> Resource:
    """``nvshare.com/gpu=4``: four of each GPU. ``VgpuError`` (invalid)."""
    name, _, count = text.partition("=")
    if name not in COMPATIBLE or not count.isdecimal() or not 1 <= int(count) <= 64:
        raise VgpuError(
            ErrorCode.INVALID, f"{text!r} is no resource of another project", f"{COMPATIBLE[0]}=4 is four of each GPU"
        )
    return Resource(name, f"{name.partition('.')[0]}{count}", None, int(count))


def ids_of(gpu: Object, resource: Resource) -> list[str]:
    """The devices of a resource on an empty GPU. They are the same at each start."""
    count = resource.count(100, gpu["total_memory_bytes"])
    ids = [f"{gpu['uuid']}--{resource.word}--{number}" for number in range(count)]
    if too_long := [each for each in ids if len(each) > LONGEST_ID]:
        raise VgpuError(ErrorCode.INVALID, f"the kubelet takes no id of more than {LONGEST_ID} letters: {too_long[0]}")
    return ids


def gpu_of(device: str) -> str:
    return device.partition("--")[0]


def health(gpus: Iterable[Object], vgpus: Iterable[Object], resource: Resource) -> dict[str, bool]:
    """Each device, and whether a pod may have it now: its vGPU exists, or fits beside those that do."""
    made = {claim["uid"] for vgpu in vgpus if (claim := vgpu.get("claim") or {}).get("kind") == KIND}
    found: dict[str, bool] = {}
    for gpu in gpus:
        sm, memory = _room(gpu)
        fits = resource.count(sm, memory)
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


def unused(made: Iterable[dra.Made], held: Iterable[str], now_unix_s: float) -> list[dra.Made]:
    """The vGPUs whose device no container has. ``held``: the devices of containers, read after ``made``."""
    actions = dra.reconcile(held, made, now_unix_s)
    return [action.vgpu for action in actions if isinstance(action, dra.Remove)]


# --- with the node


class Plugin:
    """One resource. ``held``: the devices that containers have, as the kubelet knows them; ``VgpuError``."""

    def __init__(self, resource: Resource, node: Node, held: Callable[[], frozenset[str]]) -> None:
        self.resource = resource
        self._node = node
        self._held = held
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._health: dict[str, bool] = {}
        self._ended = False
        self._allocated_s: dict[str, float] = {}

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "GetDevicePluginOptions": lambda _: OPTIONS,
            "ListAndWatch": self.watch,
            "GetPreferredAllocation": self.prefer,
            "Allocate": self.allocate,
            "PreStartContainer": lambda _: _Started(),
        }

    def refresh(self) -> None:
        """Read the node, and say what changed. While it does not answer, its devices are what they were: the kubelet
        would otherwise refuse a pod that starts again. ``VgpuError``."""
        gpus, vgpus = self._read()
        found = health(gpus, vgpus, self.resource)
        with self._changed:
            if found != self._health:
                self._health = found
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def watch(self, _: Any, is_active: Callable[[], bool]) -> Iterator[Any]:
        said: dict[str, bool] | None = None
        while is_active() and not self._ended:
            with self._changed:
                if self._health == said:
                    self._changed.wait(LOOK_S)
                current = self._health
            if current != said:
                said = current
                words = {True: "Healthy", False: "Unhealthy"}
                yield _Devices(devices=[{"ID": device, "health": words[fits]} for device, fits in said.items()])

    def prefer(self, request: Any) -> Any:
        gpus, vgpus = self._read()
        made = frozenset(one.uid for one in dra.made_of(vgpus, KIND))
        return _Preferred(
            container_responses=[
                {
                    "deviceIDs": preferred(
                        one.available_deviceIDs, one.must_include_deviceIDs, one.allocation_size, gpus, made
                    )
                }
                for one in request.container_requests
            ]
        )

    def allocate(self, request: Any) -> Any:
        with self._lock:
            return _Allocated(
                container_responses=[
                    {"cdi_devices": [{"name": name} for device in one.devices_ids for name in self._made(device)]}
                    for one in request.container_requests
                ]
            )

    def _made(self, device: str) -> list[str]:
        """The CDI devices of one of the plugin's."""
        self._allocated_s[device] = time.monotonic()
        try:
            vgpu = self._make(device)
        except VgpuError as error:
            if error.code is not ErrorCode.NO_ROOM or not self._remove_unused(0.0):
                raise
            vgpu = self._make(device)
        gpu = [] if vgpu["simulated"] else [f"nvidia.com/gpu={vgpu['gpu_uuid']}"]
        return [*gpu, f"{cdi.KIND}={vgpu['vgpu_id']}"]

    def _make(self, device: str) -> Object:
        if device not in self._health:
            raise VgpuError(ErrorCode.NOT_FOUND, f"{self.resource.name} has no device {device}")
        claim = {"kind": KIND, "uid": device}
        made = self._node.create(self.resource.spec(), gpu=gpu_of(device), keep=True, attach="mount", claim=claim)
        return made.reading

    def remove_unused(self) -> None:
        """``VgpuError``: the node or the kubelet does not answer."""
        with self._lock:
            self._remove_unused(GRACE_S)

    def _remove_unused(self, grace_s: float) -> int:
        """How many were removed. A device that was allocated lately may not yet be in the kubelet's list."""
        _, vgpus = self._read()
        made = [one for one in dra.made_of(vgpus, KIND) if one.uid in self._health]
        since_s = time.monotonic() - GRACE_S
        lately = {device for device, at_s in self._allocated_s.items() if at_s > since_s}
        found = unused(made, self._held() | lately, time.time() + GRACE_S - grace_s)
        for one in found:
            try:
                with self._node.open_link() as link:
                    link.change("remove", vgpu=one.vgpu_id, force=False)
                log.info("the vGPU of a device that no container has is removed", device=one.uid, vgpu=one.vgpu_id)
            except VgpuError as error:
                if error.code not in {ErrorCode.NOT_FOUND, ErrorCode.REMOVED, ErrorCode.IN_USE}:
                    raise
        return len(found)

    def _read(self) -> tuple[list[Object], list[Object]]:
        with self._node.open_link() as link:
            return link.ask("gpus")["gpus"], dra.own(link.ask("list")["vgpus"], os.geteuid())
