"""Which container has which vGPU, as the kubelet says it: its PodResources service.

The labels of a vGPU's claim get the names, so ``vgpuctl ps``, ``inspect`` and the metric ``vgpu_claim_info`` have them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import grpc

from vgpu.api.link import Link
from vgpu.api.node import Node
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import cdi
from vgpu.integrations.kubernetes import dra, resources, wire
from vgpu.integrations.kubernetes.dra import Object

ANSWER_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Holder:
    """A container. ``claims``: of its vGPUs, by the devices of device plugins. ``vgpus``: by the claims of its pod."""

    namespace: str
    pod: str
    container: str
    claims: frozenset[str]
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
            claims = resources.uids(device for resource in one.devices for device in resource.device_ids)
            yield Holder(pod.namespace, pod.name, one.name, claims, vgpus)


def claims_of(found: Iterable[Holder]) -> frozenset[str]:
    return frozenset(uid for holder in found for uid in holder.claims)


def names(vgpu: Object, found: Iterable[Holder]) -> dict[str, str] | None:
    """The labels that the claim of a vGPU should have and has not; None: it has them, or no container has the vGPU. If
    several have it, the first by name counts."""
    claim = vgpu.get("claim") or {}
    mine = [one for one in found if vgpu["vgpu_id"] in one.vgpus or claim.get("uid") in one.claims]
    if not claim or not mine:
        return None
    first = min(mine, key=lambda one: (one.namespace, one.pod, one.container))
    wanted = claim["labels"] | {"namespace": first.namespace, "pod": first.pod, "container": first.container}
    return None if wanted == claim["labels"] else wanted


def name_vgpus(node: Node, found: Sequence[Holder]) -> None:
    """Bring the labels of all vGPUs up to date. ``VgpuError``: the node does not answer."""
    with node.open_link() as link:
        for vgpu in dra.own(link.ask("list")["vgpus"], os.geteuid()):
            labels = names(vgpu, found)
            if labels is not None:
                rename(link, vgpu, labels=labels)


def rename(link: Link, vgpu: Object, **fields: Any) -> None:
    """The node gives the vGPU of a claim the fields of the last request for it. The others are as they are now."""
    request = {"request_id": uuid4().hex, "lifetime": "kept", "attach": vgpu["attach"]}
    with suppress(VgpuError):  # its size is being changed, or it goes: the next turn finds it or does not
        now = link.ask("inspect", vgpu=vgpu["vgpu_id"])["vgpu"]
        claim = {**now["claim"], **fields}
        link.change("create", spec=now["spec"], gpu=str(now["gpu_index"]), claim=claim, **request)
