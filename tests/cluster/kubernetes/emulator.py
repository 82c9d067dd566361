"""kmock's API server with what the extender relies on: versions of objects, preconditions, and the binding of pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp.web
import kmock
from kmock._internal import enums, k8s

APPLY: Final = "application/apply-patch+yaml"


class Emulator(kmock.KubernetesEmulator):  # type: ignore[misc]
    """Each write has a version. A write that names another version or uid than the object has is refused."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.version = 0
        self.conflicts = 0
        self.bindings: list[tuple[str, str]] = []
        """Pod and node of each."""
        self._one = asyncio.Lock()

    async def _handle(self, request: Any) -> aiohttp.web.StreamResponse:
        """kmock compares a request with all earlier ones, so most are forgotten."""
        try:
            return await self._answered(request)
        finally:
            if request.headers.get("Content-Type") != APPLY:
                self._requests[:] = [one for one in self._requests if one is not request]

    async def _answered(self, request: Any) -> aiohttp.web.StreamResponse:
        action = request.action
        binds = request.subresource == "binding"
        if action not in (enums.action.CREATE, enums.action.UPDATE, enums.action.DELETE) and not binds:
            return await super()._handle(request)
        async with self._one:
            if binds:
                return self._answer(await self._bind(request))
            body = request.data if isinstance(request.data, dict) else {}
            if action is enums.action.UPDATE:
                self._check(request, body.get("metadata") or {})
            if action is not enums.action.DELETE:
                self.version += 1
                body.setdefault("metadata", {})["resourceVersion"] = str(self.version)
            return await super()._handle(request)

    def _check(self, request: Any, wanted: dict[str, Any]) -> dict[str, Any]:
        """The object as it is."""
        key = request.resource, request.namespace, request.name
        if key not in self._objects or self._objects[key].deleted:
            raise k8s.KubernetesObjectNotFoundError()
        found = self._objects[key]
        raw: dict[str, Any] = found.last.raw
        for name in ("uid", "resourceVersion"):
            if wanted.get(name) and wanted[name] != raw["metadata"].get(name):
                self.conflicts += 1
                raise k8s.KubernetesObjectConflictError()
        return raw

    async def _bind(self, request: Any) -> dict[str, Any]:
        raw = self._check(request, request.data["metadata"])
        if raw["spec"].get("nodeName") or raw["metadata"].get("deletionTimestamp"):
            self.conflicts += 1
            raise k8s.KubernetesObjectConflictError()
        self.version += 1
        node = request.data["target"]["name"]
        found = self._objects[request.resource, request.namespace, request.name]
        found.patch({"spec": {"nodeName": node}, "metadata": {"resourceVersion": str(self.version)}})
        await self._buses[request.resource].put({"type": "MODIFIED", "object": found.raw})
        self.bindings.append((request.name, node))
        return {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Success", "code": 201}

    @staticmethod
    def _answer(body: dict[str, Any]) -> aiohttp.web.StreamResponse:
        return aiohttp.web.json_response(body, status=201)

    async def _serve_list(self, request: Any) -> Any:
        version = self.version
        answer = await super()._serve_list(request)
        return {**answer, "metadata": {"resourceVersion": str(version)}}

    async def _serve_watch(self, request: Any) -> AsyncIterator[Any]:
        """All objects, then the changes; kmock loses those that come between."""
        yield b""
        mark = await self._buses[request.resource].mark()
        async with self._lock:
            every = self._KubernetesEmulator__get_objs(request, strict=False)
            events = [{"type": "ADDED", "object": one.raw} for one in every if not one.deleted]
        for event in events:
            yield event
        async for event in mark:
            yield event
