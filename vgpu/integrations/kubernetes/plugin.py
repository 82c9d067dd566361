"""The device plugin: a resource for each size of vGPU, such as ``vgpu.dev/30sm-8g``, for clusters without claims.

The id of a device says what to make: ``GPU-UUID--30sm-8g--2`` is the third vGPU of 30 percent and 8 GiB on that GPU.
The kubelet says no pod when it allocates one, and none is needed: the id is the vGPU's claim. The kubelet also does not
say when a pod has ended. So the vGPU of a device that no container has is removed later, or serves the next pod.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from vgpu.api.node import Node
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import cdi
from vgpu.integrations.kubernetes import dra, resources, wire
from vgpu.integrations.kubernetes.dra import GRACE_S, Made, Object
from vgpu.integrations.kubernetes.resources import KIND, Piece, Resource
from vgpu.integrations.kubernetes.watched import Watched
from vgpu.loggers import get_logger

log = get_logger(__name__)
LOOK_S: Final = 5.0
"""Between two looks whether the kubelet has left a stream."""
_Devices = wire.message("v1beta1.ListAndWatchResponse")
_Options = wire.message("v1beta1.DevicePluginOptions")
_Preferred = wire.message("v1beta1.PreferredAllocationResponse")
_Allocated = wire.message("v1beta1.AllocateResponse")
_Started = wire.message("v1beta1.PreStartContainerResponse")
OPTIONS: Final = _Options(get_preferred_allocation_available=True)


def methods_of(
    watch: Callable[..., Any], prefer: Callable[..., Any], allocate: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    """The methods that the kubelet calls, by their names."""
    return {
        "GetDevicePluginOptions": lambda _: OPTIONS,
        "ListAndWatch": watch,
        "GetPreferredAllocation": prefer,
        "Allocate": allocate,
        "PreStartContainer": lambda _: _Started(),
    }


class Plugin:
    """One resource. ``held``: the claims of the vGPUs that containers have, by the devices that the kubelet gave them;
    ``VgpuError``."""

    def __init__(self, resource: Resource, node: Node, held: Callable[[], frozenset[str]]) -> None:
        self.resource = resource
        self._node = node
        self._held = held
        self._lock = threading.Lock()
        self._health: Watched[dict[str, bool]] = Watched({})
        self.close = self._health.close
        self._allocated_s: dict[str, float] = {}

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        return methods_of(self.watch, self.prefer, self.allocate)

    def refresh(self) -> None:
        """Read the node, and say what changed. While it does not answer, its devices are what they were: the kubelet
        would otherwise refuse a pod that starts again. ``VgpuError``."""
        gpus, vgpus = self._read()
        self._health.set(resources.health(gpus, vgpus, self.resource))

    def watch(self, _: Any, is_active: Callable[[], bool]) -> Iterator[Any]:
        words = {True: "Healthy", False: "Unhealthy"}
        for found in self._health.values(is_active, LOOK_S):
            yield _Devices(devices=[{"ID": device, "health": words[fits]} for device, fits in found.items()])

    def prefer(self, request: Any) -> Any:
        gpus, vgpus = self._read()
        made = frozenset(one.uid for one in dra.made_of(vgpus, KIND))
        return _Preferred(
            container_responses=[
                {
                    "deviceIDs": self.resource.choose(
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
                    {"cdi_devices": [{"name": name} for name in self._cdi_devices(one.devices_ids)]}
                    for one in request.container_requests
                ]
            )

    def _cdi_devices(self, devices: Sequence[str]) -> list[str]:
        if unknown := [device for device in devices if device not in self._health.now]:
            raise VgpuError(ErrorCode.NOT_FOUND, f"{self.resource.name} has no device {unknown[0]}")
        return [name for piece in self.resource.pieces(devices) for name in self._made(piece)]

    def _made(self, piece: Piece) -> list[str]:
        """The CDI devices of a vGPU."""
        gpus, vgpus = self._read()
        now_s = time.monotonic()
        # The kubelet gives the devices of an init container to the others of its pod, before any of them runs.
        young = {uid for uid, at_s in self._allocated_s.items() if now_s - at_s < GRACE_S}
        self._allocated_s[piece.uid] = now_s
        replaced = resources.replaced(piece, self._own(vgpus))
        self._remove(one for one in replaced if one.uid not in young)
        try:
            vgpu = self._make(piece, gpus)
        except VgpuError as error:
            if error.code is not ErrorCode.NO_ROOM:
                raise
            self._remove(replaced)
            self._remove_unused(0.0)
            vgpu = self._make(piece, gpus)
        gpu = [] if vgpu["simulated"] else [f"nvidia.com/gpu={vgpu['gpu_uuid']}"]
        return [*gpu, f"{cdi.KIND}={vgpu['vgpu_id']}"]

    def _make(self, piece: Piece, gpus: Iterable[Object]) -> Object:
        gpu = next((gpu for gpu in gpus if gpu["uuid"] == piece.gpu), None)
        if gpu is None:
            raise VgpuError(ErrorCode.NOT_FOUND, f"the node serves no GPU {piece.gpu}", "vgpuctl gpu ls")
        spec = self.resource.spec(gpu, len(piece.devices))
        claim = {"kind": KIND, "uid": piece.uid, "labels": dict(piece.labels)}
        return self._node.create(spec, gpu=piece.gpu, keep=True, attach="mount", claim=claim).reading

    def remove_unused(self) -> None:
        """``VgpuError``: the node or the kubelet does not answer."""
        with self._lock:
            self._remove_unused(GRACE_S)

    def _remove_unused(self, grace_s: float) -> int:
        """How many were removed. A device that was allocated lately may not yet be in the kubelet's list."""
        _, vgpus = self._read()
        made = dra.made_of(self._own(vgpus), KIND)
        since_s = time.monotonic() - GRACE_S
        lately = {uid for uid, at_s in self._allocated_s.items() if at_s > since_s}
        found = resources.unused(made, self._held() | lately, time.time() + GRACE_S - grace_s)
        self._remove(found)
        return len(found)

    def _remove(self, made: Iterable[Made]) -> None:
        for one in made:
            try:
                with self._node.open_link() as link:
                    link.change("remove", vgpu=one.vgpu_id, force=False)
                log.info("the vGPU of a device that no container has is removed", device=one.uid, vgpu=one.vgpu_id)
            except VgpuError as error:
                if error.code not in {ErrorCode.NOT_FOUND, ErrorCode.REMOVED, ErrorCode.IN_USE}:
                    raise

    def _own(self, vgpus: Iterable[Object]) -> list[Object]:
        """The vGPUs of this resource."""
        return [
            vgpu
            for vgpu in vgpus
            if (claim := vgpu.get("claim") or {}).get("kind") == KIND
            and not self._health.now.keys().isdisjoint(resources.devices_of(claim))
        ]

    def _read(self) -> tuple[list[Object], list[Object]]:
        with self._node.open_link() as link:
            return link.ask("gpus")["gpus"], dra.own(link.ask("list")["vgpus"], os.geteuid())
