"""The events of one GPU, for each client that watches. The node keeps them, and gets those that it missed."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Final

import trio

from vgpu.event_types import OF_PROGRAMS
from vgpu.protocol.messages import EventReading, Notice

REMEMBERED: Final = 256
"""For a node that begins again, in a few seconds; it asks for them each time it opens its link."""


class EventFeed:
    """What programs cause pushes out nothing else."""

    def __init__(self) -> None:
        self._past: tuple[deque[EventReading], ...] = deque(maxlen=REMEMBERED), deque(maxlen=REMEMBERED)
        self._watchers: set[trio.MemorySendChannel[EventReading]] = set()

    def tell(self, event: EventReading) -> None:
        """A watcher that does not keep up misses some."""
        self._past[event.kind in OF_PROGRAMS].append(event)
        for channel in list(self._watchers):
            with suppress(trio.WouldBlock, trio.BrokenResourceError):
                channel.send_nowait(event)

    @property
    def past(self) -> list[EventReading]:
        """The last ones, oldest first."""
        return sorted((event for kept in self._past for event in kept), key=lambda event: event.at_unix_s)

    async def watch(self, request_id: int) -> AsyncGenerator[Notice, None]:
        sending, receiving = trio.open_memory_channel[EventReading](REMEMBERED)
        self._watchers.add(sending)
        try:
            async for event in receiving:
                yield Notice(id=request_id, event=event)
        finally:
            self._watchers.discard(sending)
