"""Pods and nodes at the API server. They are plain dictionaries: an extender must pass on what it does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpx2
from lightkube import Client
from lightkube.core.resource import ApiInfo, NamespacedSubResource, ResourceDef
from lightkube.generic_resource import Generic, GenericGlobalResource, GenericNamespacedResource, create_api_info
from lightkube.models.meta_v1 import ObjectMeta, Status
from lightkube.types import PatchType

from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.kubernetes.dra import Object
from vgpu.integrations.kubernetes.objects import says_gone

_CONFLICT: Final = 409
_REFUSALS: Final = range(400, 500)
_SERVER_S: Final = 300
"""The API server ends a watch after this time, and the next one begins."""
_EVERYWHERE: Final = "*"
T = TypeVar("T")


class Pod(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Pod", "pods")


class Node(GenericGlobalResource):
    _api_info = create_api_info("", "v1", "Node", "nodes")


class PodBinding(NamespacedSubResource, Generic):  # type: ignore[misc]
    _api_info = ApiInfo(
        resource=ResourceDef("", "v1", "Binding"),
        parent=ResourceDef("", "v1", "Pod"),
        plural="pods",
        verbs=["post"],
        action="binding",
    )


_binding: Any = PodBinding


class ChangedError(VgpuError):
    """The object is not any more as it was when it was read. Nothing was written."""

    def __init__(self, what: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, f"{what} has changed meanwhile")


class RefusedError(VgpuError):
    """The API server has read the request and refuses it, or there is nothing to write it at. Nothing was written."""

    def __init__(self, reason: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, reason)


@dataclass(frozen=True, slots=True)
class Listed:
    items: list[Object]
    version: str


class Objects:
    """Any thread may call. Methods raise ``VgpuError``. As in ``vgpu.integrations.kubernetes.objects``, the types that
    are read are prepared here, before a second thread may read one."""

    def __init__(self, client: Client) -> None:
        self._client: Any = client
        for kind in (ObjectMeta, Status):
            kind.from_dict({})

    def pods(self) -> Listed:
        return self._listed(Pod, namespace=_EVERYWHERE)

    def pods_on(self, node: str) -> list[Object]:
        found = self._listed(Pod, namespace=_EVERYWHERE, fields={"spec.nodeName": node}).items
        return [pod for pod in found if (pod.get("spec") or {}).get("nodeName") == node]

    def nodes(self) -> Listed:
        return self._listed(Node)

    def pod(self, namespace: str, name: str) -> Object | None:
        """None: there is none."""
        return _asked("the pod", lambda: self._client.get(Pod, name, namespace=namespace))

    def node(self, name: str) -> Object | None:
        return _asked("the node", lambda: self._client.get(Node, name))

    def annotate(self, pod: Object, annotations: Mapping[str, str | None]) -> Object | None:
        """The pod afterwards, if it was still as in ``pod``; None: it is gone. ``ChangedError``."""
        metadata = pod["metadata"]
        body = {
            "metadata": {
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
                "annotations": dict(annotations),
            }
        }
        return _asked(
            "the pod",
            lambda: self._client.patch(
                Pod, metadata["name"], body, namespace=metadata["namespace"], patch_type=PatchType.MERGE
            ),
        )

    def annotate_node(self, name: str, annotations: Mapping[str, str]) -> None:
        body = {"metadata": {"annotations": dict(annotations)}}
        _asked("the node", lambda: self._client.patch(Node, name, body, patch_type=PatchType.MERGE))

    def bind(self, pod: Object, node: str) -> bool:
        """False: the pod is gone. ``ChangedError``: it is not as in ``pod`` any more, or is bound."""
        metadata = {name: pod["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")}
        binding = _binding(metadata=metadata, target={"apiVersion": "v1", "kind": "Node", "name": node})
        made = _asked(
            "the pod",
            lambda: self._client.create(binding, metadata["name"], namespace=metadata["namespace"]) or True,
        )
        return made is not None

    def watch(self, kind: type[Pod] | type[Node], version: str, changed: Callable[[str, Object], None]) -> None:
        """Call ``changed`` with ADDED, MODIFIED or DELETED and the object, until the API server does not answer, or
        wants a new list. ``VgpuError``: always, at the end."""
        place = {"namespace": _EVERYWHERE} if kind is Pod else {}

        def follow() -> None:
            events = self._client.watch(kind, resource_version=version, server_timeout=_SERVER_S, **place)
            for event, found in events:
                changed(event, found)

        _asked("the list", follow)
        raise VgpuError(ErrorCode.UNREACHABLE, "the API server ended the watch")

    def _listed(self, kind: type[Pod] | type[Node], **where: Any) -> Listed:
        def listed() -> Listed:
            answer = self._client.list(kind, **where)
            items: list[Object] = list(answer)
            return Listed(items, str(answer.resourceVersion))

        found = _asked("the list", listed)
        if found is None:
            raise VgpuError(ErrorCode.UNAVAILABLE, "the API server has no such list")
        return found


def _asked(what: str, ask: Callable[[], T]) -> T | None:
    """The API server's answer; None: it has no such object."""
    try:
        return ask()
    except httpx2.HTTPStatusError as error:
        if error.response is None:  # an event of a watch says it
            raise VgpuError(ErrorCode.UNAVAILABLE, f"the API server ended the watch: {_line(error)}") from error
        if says_gone(error.response):
            return None
        if error.response.status_code == _CONFLICT:
            raise ChangedError(what) from error
        if error.response.status_code in _REFUSALS:
            raise RefusedError(f"the API server refuses: {_line(error)}") from error
        raise VgpuError(ErrorCode.UNAVAILABLE, f"the API server fails: {_line(error)}") from error
    except (httpx2.HTTPError, OSError, ValueError) as error:
        raise VgpuError(ErrorCode.UNREACHABLE, f"the API server does not answer: {_line(error)}") from error


def _line(error: Exception) -> str:
    """httpx2 adds an address to read."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
