"""The node's side: a device plugin whose devices only count. Which GPU a container gets, and how much of it, stands at
the pod.

The kubelet says how many devices of a resource it allocates, and no pod. The extender lets one pod of each size wait on
a node, so that the pod is known. In doubt ``Allocate`` fails, and the pod with it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from vgpu.api.node import Node
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import cdi
from vgpu.integrations.kubernetes import dra, resources, wire
from vgpu.integrations.kubernetes.dra import Made, Object
from vgpu.integrations.kubernetes.extender import assumed, gpus
from vgpu.integrations.kubernetes.extender.asks import SHARES
from vgpu.integrations.kubernetes.extender.assumed import Answer, Held, Part
from vgpu.integrations.kubernetes.extender.objects import ChangedError, Objects
from vgpu.integrations.kubernetes.plugin import LOOK_S, methods_of
from vgpu.integrations.kubernetes.resources import KIND, Cards, Resource
from vgpu.integrations.kubernetes.watched import Watched
from vgpu.loggers import get_logger

log = get_logger(__name__)
MOST_SHARES: Final = 64
DEFAULT_SHARES: Final = 10
MOST_TRIES: Final = 5
"""A pod changes between reading and writing, for example in its status."""
_UID: Final = re.compile(r"([0-9A-Za-z-]{1,60})\.\d+")
_Devices = wire.message("v1beta1.ListAndWatchResponse")
_Preferred = wire.message("v1beta1.PreferredAllocationResponse")
_Allocated = wire.message("v1beta1.AllocateResponse")


def offered(text: str) -> tuple[Resource, ...]:
    """``aliyun.com/gpu-mem``, or ``nvidia.com/gpu=10``: so many pods on each GPU at most. ``VgpuError`` (invalid)."""
    if text == resources.MEMORY:
        return resources.compatible(text)
    name, equals, count = text.partition("=")
    number = int(count) if count.isdecimal() and len(count) < 4 else 0 if equals else DEFAULT_SHARES
    if name != SHARES or not 1 <= number <= MOST_SHARES:
        raise VgpuError(
            ErrorCode.INVALID,
            f"{text!r} is no resource that an extender places",
            f"{resources.MEMORY}, or {SHARES}={DEFAULT_SHARES}: so many vGPUs on each GPU",
        )
    return (Resource(SHARES, f"nvidia{number}", None, number),)


class NodeShare:
    """What the plugins of one node share. ``name``: of this node in Kubernetes. Methods raise ``VgpuError``."""

    def __init__(self, name: str, objects: Objects, node: Node) -> None:
        self.name = name
        self.lock = threading.Lock()
        self._objects = objects
        self._node = node
        self._published = ""

    def read(self) -> tuple[list[Object], list[Object]]:
        """The GPUs, and the vGPUs of this user."""
        with self._node.open_link() as link:
            return link.ask("gpus")["gpus"], dra.own(link.ask("list")["vgpus"], os.geteuid())

    def publish(self, *, check: bool = False) -> None:
        """Write the GPUs at the Node, for the extender. ``check``: also if nothing changed here."""
        written = gpus.published(*self.read())
        if check:
            node = self._objects.node(self.name)
            self._published = ((node or {}).get("metadata", {}).get("annotations") or {}).get(gpus.ANNOTATION, "")
        if written != self._published:
            self._objects.annotate_node(self.name, {gpus.ANNOTATION: written})
            self._published = written
            log.info("the GPUs are written at the node", node=self.name)

    def devices(self, size: tuple[str, int]) -> list[str]:
        """The CDI devices of the container that waits for so many devices of a resource."""
        pods = self._objects.pods_on(self.name)
        found, vgpus = self.read()
        made = frozenset(one.uid for one in dra.made_of(vgpus, KIND))
        answer = assumed.answer(pods, self.name, size, made)
        readings = [self._made(answer, at, part, found) for at, part in answer.parts.items()]
        if answer.last:
            self._assign(answer.held)
        log.info("a container has its vGPUs", pod=str(answer.held), container=answer.container)
        return [name for reading in readings for name in _cdi_devices(reading)]

    def _assign(self, held: Held) -> None:
        """``VgpuError``: the extender has taken the GPU back meanwhile, or the pod is gone."""
        for _ in range(MOST_TRIES):
            pod = self._objects.pod(held.namespace, held.name)
            now = None if pod is None else assumed.held_of(pod)
            if pod is None or now is None or now.assigned or (now.uid, now.parts) != (held.uid, held.parts):
                raise VgpuError(ErrorCode.REMOVED, f"the extender has taken the GPU of {held} back, or the pod is over")
            with suppress(ChangedError):
                self._objects.annotate(pod, {assumed.ASSIGNED: "true"})
                return
        raise VgpuError(ErrorCode.UNAVAILABLE, f"{held} changed {MOST_TRIES} times while its GPU was allocated")

    def _made(self, answer: Answer, position: int, part: Part, found: Sequence[Object]) -> Object:
        gpu = next((gpu for gpu in found if part.gpu in (gpu["uuid"], str(gpu["index"]))), None)
        if gpu is None:
            text = f"the node serves no GPU {part.gpu}, which the extender chose for {answer.held}"
            raise VgpuError(ErrorCode.NOT_FOUND, text, "vgpuctl gpu ls")
        try:
            return self._make(answer, position, part, gpu)
        except VgpuError as error:
            if error.code is not ErrorCode.NO_ROOM or not self.remove_unused():
                raise
        return self._make(answer, position, part, gpu)

    def _make(self, answer: Answer, position: int, part: Part, gpu: Object) -> Object:
        held = answer.held
        claim = {
            "kind": KIND,
            "uid": assumed.claim_uid(held, position),
            "tenant": held.namespace,
            "labels": {"namespace": held.namespace, "pod": held.name, "container": part.container},
            "pods": [held.uid],
        }
        return self._node.create(part.spec(), gpu=gpu["uuid"], keep=True, attach="mount", claim=claim).reading

    def tidy(self) -> None:
        """The API server is asked only where a vGPU has no processes. ``VgpuError``."""
        if any(_pod_of(one) and not one.processes for one in dra.made_of(self.read()[1], KIND)):
            with self.lock:
                self.remove_unused()

    def remove_unused(self) -> int:
        """Remove the vGPUs of pods that are over or gone; how many."""
        _, vgpus = self.read()
        pods = self._objects.pods_on(self.name)  # after the vGPUs: a pod is there before its vGPU
        alive = {pod["metadata"]["uid"] for pod in pods if (pod.get("status") or {}).get("phase") not in assumed.OVER}
        unused = [one for one in dra.made_of(vgpus, KIND) if (uid := _pod_of(one)) and uid not in alive]
        return sum(self._remove(one.vgpu_id) for one in unused)

    def _remove(self, vgpu_id: str) -> bool:
        try:
            with self._node.open_link() as link:
                link.change("remove", vgpu=vgpu_id, force=False)
        except VgpuError as error:
            if error.code not in {ErrorCode.NOT_FOUND, ErrorCode.REMOVED, ErrorCode.IN_USE}:
                raise
            return False
        log.info("the vGPU of a pod that is over is removed", vgpu=vgpu_id)
        return True


def _pod_of(made: Made) -> str:
    """ "": the vGPU has no claim of an assumed pod."""
    found = _UID.fullmatch(made.uid)
    return found[1] if found else ""


def _cdi_devices(reading: Object) -> list[str]:
    gpu = [] if reading["simulated"] else [f"nvidia.com/gpu={reading['gpu_uuid']}"]
    return [*gpu, f"{cdi.KIND}={reading['vgpu_id']}"]


class AssumedPlugin:
    """The plugin of one resource, with the methods that the kubelet calls."""

    def __init__(self, resource: Resource, served: NodeShare) -> None:
        self.resource = resource
        self._served = served
        self._health: Watched[dict[str, bool]] = Watched({})
        self.close = self._health.close

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        return methods_of(self.watch, self.prefer, self.allocate)

    def refresh(self) -> None:
        """Read the node, and say what changed. ``VgpuError``."""
        found, _ = self._served.read()
        self._health.set(health(found, self.resource))

    def watch(self, _: Any, is_active: Callable[[], bool]) -> Iterator[Any]:
        words = {True: "Healthy", False: "Unhealthy"}
        for found in self._health.values(is_active, LOOK_S):
            yield _Devices(devices=[{"ID": device, "health": words[serves]} for device, serves in found.items()])

    def prefer(self, request: Any) -> Any:
        """All are alike."""
        return _Preferred(
            container_responses=[
                {
                    "deviceIDs": list(dict.fromkeys([*one.must_include_deviceIDs, *one.available_deviceIDs]))[
                        : one.allocation_size
                    ]
                }
                for one in request.container_requests
            ]
        )

    def allocate(self, request: Any) -> Any:
        if isinstance(self.resource, Cards):
            self.resource.pieces(())  # says why not
        with self._served.lock:
            sizes = [(self.resource.name, len(one.devices_ids)) for one in request.container_requests]
            return _Allocated(
                container_responses=[
                    {"cdi_devices": [{"name": name} for name in self._served.devices(size)]} for size in sizes
                ]
            )


def health(found: Iterable[Object], resource: Resource) -> dict[str, bool]:
    """Each device, and whether its GPU serves. What a GPU has left is the extender's to know."""
    return {device: gpu["state"] == "serving" for gpu in found for device in resources.ids_of(gpu, resource)}
