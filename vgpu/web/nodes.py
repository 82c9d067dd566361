"""The nodes of a file on the dashboard: one route, and a page that shows the GPUs and vGPUs of all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import trio
from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from vgpu.bounds import Bounded
from vgpu.errors import VgpuError
from vgpu.nodes.file import NodesFile
from vgpu.nodes.reach import Reached, reached
from vgpu.protocol.messages import Snapshot
from vgpu.protocol.printed import Line
from vgpu.web.files import STATIC

ANSWER_S: Final = 10.0
MOST_THREADS: Final = 32
"""At once. The threads of other requests are apart from these."""
KEPT_S: Final = 2.0
"""Several pages at once ask the nodes once."""


class NodeView(Bounded):
    """One node of the file. ``error``: why it does not answer; "": ``snapshot`` is its state."""

    name: Line
    error: Line = ""
    snapshot: Snapshot | None = None


class NodesOfFile:
    """Asks all nodes of the file in parallel, each in a thread."""

    def __init__(self, file: NodesFile) -> None:
        self._nodes: Mapping[str, Reached] = {name: reached(entry) for name, entry in file.node.items()}
        self._asking = trio.Lock()
        self._threads = trio.CapacityLimiter(MOST_THREADS)
        self._last: tuple[float, list[NodeView]] | None = None

    async def see(self) -> list[NodeView]:
        async with self._asking:
            if self._last is None or time.monotonic() > self._last[0] + KEPT_S:
                views = await self._ask_all()
                self._last = time.monotonic(), views
            return self._last[1]

    async def _ask_all(self) -> list[NodeView]:
        found: dict[str, NodeView] = {}

        async def ask(name: str, node: Reached) -> None:
            found[name] = NodeView(name=name, error=f"it did not answer within {ANSWER_S:g} s")
            with trio.move_on_after(ANSWER_S):
                try:
                    snapshot = await trio.to_thread.run_sync(
                        node.snapshot, abandon_on_cancel=True, limiter=self._threads
                    )
                    found[name] = NodeView(name=name, snapshot=snapshot)
                except VgpuError as error:
                    found[name] = NodeView(name=name, error=error.message)

        async with trio.open_nursery() as nursery:
            for name, node in self._nodes.items():
                nursery.start_soon(ask, name, node)
        return [found[name] for name in self._nodes]


def router(file: NodesFile) -> APIRouter:
    nodes = NodesOfFile(file)
    routes = APIRouter()

    @routes.get("/api/v1/nodes", tags=["node"])
    async def see() -> list[NodeView]:
        """The nodes of `vgpuctl dashboard --nodes FILE`, each with its GPUs and vGPUs, or the reason why it does not
        answer."""
        return await nodes.see()

    @routes.get("/nodes", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "nodes.html", headers={"Cache-Control": "no-cache"})

    return routes
