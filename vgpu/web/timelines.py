"""Live timelines of leases: for each GPU that a page shows, one ``Trace`` that all pages share. It is renewed for as
long as one page shows the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import trio
from pydantic import ValidationError

from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.codec import ProtocolError
from vgpu.protocol.hello import Hello
from vgpu.protocol.messages import TRACE_MOST_NS, Failure, Notice, Trace
from vgpu.protocol.service import checked, open_link
from vgpu.protocol.stream import LINK_ENDED
from vgpu.protocol.trace import LeaseRecord, TraceChunk, WaitRecord

KEPT_CHUNKS: Final = 120
"""A server sends ten a second. A page that opens later begins with these, and a slow page is at most so far behind."""
RETRY_S: Final = 1.0


class Timeline:
    """The timeline of one GPU. ``chunks``: numbered, as JSON of ``TraceChunk``; or why there are none, as JSON of
    ``Failure``."""

    def __init__(self, control_socket: Path, gpu: int) -> None:
        self._control_socket = control_socket
        self._gpu = gpu
        self._number = 0
        self.viewers = 0
        self.scope = trio.CancelScope()
        self.chunks: deque[tuple[int, str, bytes]] = deque(maxlen=KEPT_CHUNKS)
        self.changed = trio.Event()

    async def run(self) -> None:
        with self.scope:
            while True:
                try:
                    await self._follow()
                    continue  # it was over, as every recording is some time
                except VgpuError as error:
                    self._fail(error)
                except (*LINK_ENDED, ProtocolError, ValidationError) as error:
                    self._fail(VgpuError(ErrorCode.UNAVAILABLE, f"the recording of GPU {self._gpu} broke off: {error}"))
                await trio.sleep(RETRY_S)

    async def _follow(self) -> None:
        link, _ = await open_link(self._control_socket, Hello())
        async with link:
            trace = Trace(id=1, gpu=str(self._gpu), duration_ns=TRACE_MOST_NS, work=False)
            await link.send(trace.model_dump(mode="json"))
            while True:
                received = await link.receive()
                if received is None or "ok" in received[0]:
                    checked(received)
                chunk = Notice.model_validate(received[0] if received else {}).trace
                if chunk is None or chunk.done:
                    return
                self._tell("chunk", _leases_and_waits(chunk).model_dump_json().encode())

    def _fail(self, error: VgpuError) -> None:
        failure = Failure(id=1, code=error.code, error=error.message, hint=error.hint)
        self._tell("failure", failure.model_dump_json().encode())

    def _tell(self, kind: str, data: bytes) -> None:
        self._number += 1
        self.chunks.append((self._number, kind, data))
        self.changed.set()
        self.changed = trio.Event()


def _leases_and_waits(chunk: TraceChunk) -> TraceChunk:
    return chunk.model_copy(
        update={"records": tuple(r for r in chunk.records if isinstance(r, LeaseRecord | WaitRecord))}
    )


class Timelines:
    """All of a node's. ``nursery``: theirs."""

    def __init__(self, control_socket: Path, nursery: trio.Nursery) -> None:
        self._control_socket = control_socket
        self._nursery = nursery
        self._shown: dict[int, Timeline] = {}

    @contextmanager
    def looking(self, gpu: int) -> Iterator[Timeline]:
        """The GPU's timeline, recorded while a page is in here."""
        timeline = self._shown.get(gpu)
        if timeline is None:
            timeline = self._shown[gpu] = Timeline(self._control_socket, gpu)
            self._nursery.start_soon(timeline.run)
        timeline.viewers += 1
        try:
            yield timeline
        finally:
            timeline.viewers -= 1
            if not timeline.viewers:
                timeline.scope.cancel()
                del self._shown[gpu]
