"""Reads the node's counters, for scrapes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import trio
from pydantic import BaseModel, ValidationError

from vgpu.errors import ErrorCode, VgpuError
from vgpu.metrics.kinds import Seen
from vgpu.protocol.hello import Hello, Request
from vgpu.protocol.messages import GetMetrics, GpuList, Gpus, MetricsSnapshot
from vgpu.protocol.service import checked, open_link, software_version
from vgpu.protocol.stream import LINK_ENDED
from vgpu.spec import explain

ANSWER_S: Final = 4.5
"""The node waits 2 s for a GPU Server that does not answer, once, and Prometheus 5 s for us in many places."""
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Answer:
    """``error``: why there is none. ``asked_s``: when it was asked for, on trio's clock."""

    metering: MetricsSnapshot | None
    software: str
    error: VgpuError | None
    asked_s: float


class Source:
    """One node, by its control socket. The source sends the node one request at a time, however many scrapes arrive.
    Each scrape gets the answer to a request that was sent after the scrape arrived."""

    def __init__(self, control_socket: Path, *, answer_s: float = ANSWER_S) -> None:
        self._control_socket = control_socket
        self._answer_s = answer_s
        self._asking = trio.Lock()
        self._last: Answer | None = None

    async def see(self) -> Seen:
        """The node's readings, or why it does not answer."""
        began_s, came_s = time.perf_counter(), trio.current_time()
        async with self._asking:
            if self._last is None or self._last.asked_s < came_s:
                self._last = await self._ask()
            last = self._last
        return Seen(last.metering, last.error, last.software, software_version(), lambda: time.perf_counter() - began_s)

    async def gpus(self) -> GpuList:
        """The status of its GPUs. ``VgpuError``: the node does not answer."""
        return (await self._asked(Gpus(), GpuList))[0]

    async def _ask(self) -> Answer:
        asked_s = trio.current_time()
        try:
            metering, software = await self._asked(GetMetrics(), MetricsSnapshot)
        except VgpuError as error:
            return Answer(None, "", error, asked_s)
        return Answer(metering, software, None, asked_s)

    async def _asked(self, request: Request, model: type[Model]) -> tuple[Model, str]:
        path = self._control_socket
        with trio.move_on_after(self._answer_s):
            try:
                link, welcome = await open_link(path, Hello())
                async with link:
                    await link.send(request.model_dump(mode="json"))
                    return model.model_validate(checked(await link.receive())), welcome.software
            except LINK_ENDED as error:
                raise VgpuError(ErrorCode.UNAVAILABLE, f"the link to {path} broke: {error}") from error
            except ValidationError as error:
                raise VgpuError(
                    ErrorCode.VERSION,
                    f"the node's answer is not understood: {explain(error)}",
                    "install the same release on both ends",
                ) from error
        raise VgpuError(ErrorCode.TIMEOUT, f"the node at {path} did not answer within {self._answer_s:g} s")
