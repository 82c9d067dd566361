"""The objects of the API server that the driver reads and writes: claims, and the ResourceSlices of this node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import httpx2
from lightkube import Client
from lightkube.core.exceptions import ConfigError
from lightkube.models.meta_v1 import Status
from lightkube.resources.core_v1 import Node
from lightkube.resources.resource_v1 import ResourceClaim, ResourceSlice
from lightkube.types import PatchType

from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.kubernetes.dra import DRIVER, Object

ANSWER_S: Final = 10.0
"""Prepare asks twice, within what the kubelet allows it."""
_GONE: Final = 404
_LEAST: Final[tuple[tuple[Any, dict[str, Any]], ...]] = (
    (Node, {}),
    (ResourceClaim, {"spec": {}}),
    (ResourceClaim.Status, {"spec": {}}),
    (ResourceSlice, {"spec": {"driver": "", "pool": {"name": "", "generation": 0, "resourceSliceCount": 0}}}),
    (Status, {}),
)
"""What is read here, with the least that each may have."""
_EITHER: Final = {"devices": None, "sharedCounters": None}
"""A slice has one of these; a patch removes the other."""
T = TypeVar("T")


def open_client() -> Client:
    """By the service account of the pod, else by ``KUBECONFIG``. ``VgpuError``: neither names a cluster."""
    try:
        return Client(timeout=httpx2.Timeout(ANSWER_S), field_manager=DRIVER)
    except (ConfigError, OSError) as error:
        text = f"no cluster is known here: {error}"
        raise VgpuError(ErrorCode.INVALID, text, "run it in a pod, or set KUBECONFIG") from error


class Cluster:
    """What this node's driver does at the API server. Any thread may call. Methods raise ``VgpuError``.

    lightkube reads JSON with msgspec, which prepares a type when it first reads one. The process ends with SIGSEGV if
    two threads do that at once, so it is done here.
    """

    def __init__(self, node: str, client: Client) -> None:
        self.node = node
        self._client = client
        for kind, least in _LEAST:
            kind.from_dict(least)

    def claim(self, namespace: str, name: str) -> Object | None:
        """None: there is none."""
        found = _asked(lambda: self._client.get(ResourceClaim, name, namespace=namespace))
        return None if found is None else found.to_dict()

    def say(self, claim: Object, devices: Sequence[Mapping[str, Any]]) -> None:
        """Make these the entries of this node in the status of the claim; those of other drivers stay. A claim that is
        gone, or that has another uid by now, stays as it is."""
        metadata = {name: claim["metadata"][name] for name in ("name", "namespace", "uid")}
        body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata}
        _asked(
            lambda: self._client.patch(
                ResourceClaim.Status,
                metadata["name"],
                {**body, "status": {"devices": list(devices)}},
                namespace=metadata["namespace"],
                patch_type=PatchType.APPLY,
                field_manager=f"{DRIVER}-{self.node}",
                force=True,
            )
        )

    def publish(self, specs: Sequence[Mapping[str, Any]], *, changed: bool) -> bool:
        """Bring the node's slices to these; whether any was written. ``changed``: they are not those of the last call.
        If they are, a slice that is missing alone is reason enough: the API server writes quantities in its own form,
        so what it has says little about what was asked."""
        listed = _asked(lambda: list(self._client.list(ResourceSlice, fields={"spec.nodeName": self.node})))
        found: dict[str, Any] = {_metadata(one).name: one for one in listed or () if self._is_ours(one)}
        names = [f"{self.node}-{DRIVER}-{number}" for number in range(len(specs))]
        if not changed and found.keys() == set(names):
            return False
        generation = max((one.spec.pool.generation for one in found.values()), default=0) + 1
        owners = self._owners()
        for name, spec in zip(names, specs, strict=True):
            self._write(name, {**spec, "pool": {**spec["pool"], "generation": generation}}, owners, found.get(name))
        for name in found.keys() - set(names):
            _asked(lambda name=name: self._client.delete(ResourceSlice, name))  # type: ignore[misc]
        return True

    def _is_ours(self, one: ResourceSlice) -> bool:
        return (one.spec.driver, one.spec.nodeName) == (DRIVER, self.node)

    def _owners(self) -> list[dict[str, Any]]:
        """The slices of a node go with it."""
        node = _asked(lambda: self._client.get(Node, self.node))
        if node is None or node.metadata is None or node.metadata.uid is None:
            return []
        return [{"apiVersion": "v1", "kind": "Node", "name": self.node, "uid": node.metadata.uid, "controller": True}]

    def _write(self, name: str, spec: Mapping[str, Any], owners: list[dict[str, Any]], found: Any) -> None:
        metadata: dict[str, Any] = {"name": name} | ({"ownerReferences": owners} if owners else {})
        if found is None:
            made: Any = ResourceSlice.from_dict({"metadata": metadata, "spec": spec})
            _asked(lambda: self._client.create(made))
            return
        if found.metadata.resourceVersion:
            metadata["resourceVersion"] = found.metadata.resourceVersion
        body = {"metadata": metadata, "spec": {**_EITHER, **spec}}
        _asked(lambda: self._client.patch(ResourceSlice, name, body, patch_type=PatchType.MERGE))


def _metadata(one: Any) -> Any:
    return one.metadata


def _asked(ask: Callable[[], T]) -> T | None:
    """The API server's answer; None: it has no such object."""
    try:
        return ask()
    except httpx2.HTTPStatusError as error:
        if says_gone(error.response):
            return None
        raise VgpuError(ErrorCode.UNAVAILABLE, f"the API server refuses: {error}") from error
    except (httpx2.HTTPError, OSError, ValueError) as error:
        raise VgpuError(ErrorCode.UNREACHABLE, f"the API server does not answer: {error}") from error


def says_gone(response: httpx2.Response) -> bool:
    """A 404 of a proxy does not count: vGPUs would be removed for it."""
    try:
        return response.status_code == _GONE and response.json()["kind"] == "Status"
    except (ValueError, TypeError, KeyError):
        return False
