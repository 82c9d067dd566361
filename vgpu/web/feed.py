"""The dashboard's only link to the node: one ``Watch``, which stays open and serves all pages.

Snapshots come twice a second while a page is open, else every ``IDLE_S``, so that the charts of the next page begin
with something. A page that reads slowly skips snapshots; nothing is kept for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

import trio
from pydantic import ValidationError

from vgpu.errors import ErrorCode, VgpuError
from vgpu.loggers import get_logger
from vgpu.protocol.codec import ProtocolError
from vgpu.protocol.hello import Hello, Reading
from vgpu.protocol.messages import EventList, EventReading, Events, Notice, Snapshot, Watch
from vgpu.protocol.service import checked, open_link
from vgpu.protocol.stream import LINK_ENDED, MessageStream
from vgpu.spec import explain
from vgpu.web.history import Samples

log = get_logger(__name__)

LOOKED_AT_S: Final = 0.5
IDLE_S: Final = 5.0
LINGER_S: Final = 10.0
"""After the last page has gone, because it may be reloaded."""
RETRY_S: Final = 0.5
SILENCE_S: Final = 15.0
"""A node without a snapshot for that long hangs: it waits five seconds for a GPU Server."""
MOST_EVENTS: Final = 500
MOST_VIEWERS: Final = 64


class LinkState(Reading):
    """Whether the node answers. ``error``, ``hint``: why it does not. ``since_unix_s``: the start of this state."""

    connected: bool
    error: str = ""
    hint: str = ""
    since_unix_s: float
    software: str = ""


class Feed:
    """``run`` in a nursery. Pages read everything else: the ``number`` of a thing grows when it changes. ``changed`` is
    set at the next change of anything."""

    def __init__(self, control_socket: Path) -> None:
        self._control_socket = control_socket
        self.snapshot: Snapshot | None = None
        self.snapshot_number = 0
        self.link = LinkState(connected=False, error="the node has not been asked yet", since_unix_s=time.time())
        self.link_number = 1
        self.samples = Samples()
        self.events: deque[tuple[int, EventReading]] = deque(maxlen=MOST_EVENTS)
        self.changed = trio.Event()
        self._event_number = 0
        self._encoded = (0, b"")
        self._viewers = 0
        self._left_s = -LINGER_S
        self._pace = trio.CancelScope()
        self._interval_s = IDLE_S

    async def run(self) -> NoReturn:
        while True:
            self._interval_s = self._wanted_s()
            with trio.CancelScope() as self._pace:
                try:
                    await self._follow()
                    continue
                except VgpuError as error:
                    self._lost(error)
                except LINK_ENDED as error:
                    self._lost(VgpuError(ErrorCode.UNAVAILABLE, f"the link to the node broke: {error}"))
                except trio.TooSlowError:
                    self._lost(
                        VgpuError(ErrorCode.TIMEOUT, f"the node was silent for {SILENCE_S:g} s", "vgpuctl status")
                    )
                except ProtocolError as error:
                    self._lost(VgpuError(ErrorCode.PROTOCOL, f"the node broke the rules of its link: {error}"))
                except ValidationError as error:
                    reason = f"the node's answer is not understood: {explain(error)}"
                    self._lost(VgpuError(ErrorCode.VERSION, reason, "update st-vgpu on both ends"))
            if not self._pace.cancelled_caught:
                await trio.sleep(RETRY_S)

    def admit(self) -> None:
        """``VgpuError`` (full) with ``MOST_VIEWERS`` pages open."""
        if self._viewers >= MOST_VIEWERS:
            raise VgpuError(ErrorCode.FULL, f"{MOST_VIEWERS} pages are open already", "close some of them")

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A page is open."""
        self._viewers += 1
        if self._interval_s != LOOKED_AT_S:
            self._pace.cancel()
        try:
            yield
        finally:
            self._viewers -= 1
            self._left_s = trio.current_time()

    def encoded_snapshot(self) -> bytes:
        """As JSON, made once however many pages want it."""
        if self._encoded[0] != self.snapshot_number and self.snapshot is not None:
            self._encoded = self.snapshot_number, self.snapshot.model_dump_json().encode()
        return self._encoded[1]

    # --- the link

    def _wanted_s(self) -> float:
        looked_at = self._viewers or trio.current_time() < self._left_s + LINGER_S
        return LOOKED_AT_S if looked_at else IDLE_S

    async def _follow(self) -> None:
        """Watch until the interval has to change."""
        link, welcome = await open_link(self._control_socket, Hello())
        async with link:
            await self._catch_up(link)
            watch = Watch(id=2, events=True, interval_ns=int(self._interval_s * 1e9))
            await link.send(watch.model_dump(mode="json"))
            while self._wanted_s() == self._interval_s:
                with trio.fail_after(self._interval_s + SILENCE_S):
                    received = await link.receive()
                if received is None or "ok" in received[0]:
                    checked(received)
                notice = Notice.model_validate(received[0] if received else {})
                if notice.event is not None:
                    self._hear(notice.event)
                if notice.snapshot is not None:
                    self._see(notice.snapshot, welcome.software)

    async def _catch_up(self, link: MessageStream) -> None:
        """Read the events that happened while there was no link."""
        since_unix_s = self.events[-1][1].at_unix_s if self.events else 0.0
        request = Events(id=1, since_unix_s=since_unix_s, most=MOST_EVENTS)
        await link.send(request.model_dump(mode="json"))
        with trio.fail_after(SILENCE_S):
            received = await link.receive()
        try:
            missed = EventList.model_validate(checked(received)).events
        except VgpuError as error:
            if error.code is not ErrorCode.INVALID:
                raise
            return  # a node that keeps no events
        known = [event for _, event in self.events if event.at_unix_s >= since_unix_s]
        for event in missed:
            if event not in known:
                self._hear(event)

    def _see(self, snapshot: Snapshot, software: str) -> None:
        if not self.link.connected:
            self._say(LinkState(connected=True, since_unix_s=time.time(), software=software))
        self.snapshot = snapshot
        self.snapshot_number += 1
        self.samples.add(snapshot)
        self._tell()

    def _hear(self, event: EventReading) -> None:
        self._event_number += 1
        self.events.append((self._event_number, event))
        self._tell()

    def _lost(self, error: VgpuError) -> None:
        if self.link.connected or self.link.error != error.message:
            log.info("no link to the node", reason=error.message)
            hint = error.hint or "start it with: vgpuctl serve --detach"
            self._say(LinkState(connected=False, error=error.message, hint=hint, since_unix_s=time.time()))

    def _say(self, link: LinkState) -> None:
        self.link = link
        self.link_number += 1
        self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()
