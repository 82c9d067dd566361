"""Which container has which vGPU, as the kubelet says it: its PodResources service."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import cdi
from vgpu.integrations.kubernetes import wire

ANSWER_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Holder:
    """A container. ``devices``: of device plugins; ``vgpus``: by the claims of its pod."""

    namespace: str
    pod: str
    container: str
    devices: frozenset[str]
    vgpus: frozenset[str]


def holders(path: Path) -> list[Holder]:
    """All containers of this machine, as the kubelet at ``path`` knows them. ``VgpuError``: it does not answer."""
    try:
        with wire.Client(wire.POD_RESOURCES, path) as kubelet:
            answer = kubelet.List(wire.message("v1.ListPodResourcesRequest")(), timeout=ANSWER_S)
    except grpc.RpcError as error:
        text = f"the kubelet does not say which container has which device: {error}"
        raise VgpuError(ErrorCode.UNREACHABLE, text.splitlines()[0], f"ls -l {path}") from error
    return list(_holders(answer.pod_resources))


def _holders(pods: Iterable[Any]) -> Iterator[Holder]:
    for pod in pods:
        for one in pod.containers:
            names = (
                device.name
                for claim in one.dynamic_resources
                for resource in claim.claim_resources
                for device in resource.cdi_devices
            )
            vgpus = frozenset(name.partition("=")[2] for name in names if name.startswith(f"{cdi.KIND}="))
            devices = frozenset(device for resource in one.devices for device in resource.device_ids)
            yield Holder(pod.namespace, pod.name, one.name, devices, vgpus)


def devices_of(found: Iterable[Holder]) -> frozenset[str]:
    return frozenset(device for holder in found for device in holder.devices)
