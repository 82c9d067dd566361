"""The node's events as they happen: kept, and sent to each client that watches."""

from __future__ import annotations

from contextlib import suppress

import trio

from vgpu.node.events import EventLog, History
from vgpu.protocol.messages import EventReading

Watcher = trio.MemorySendChannel[EventReading]


class EventFeed:
    """``publish`` an event; ``add`` and ``discard`` the channels of clients that watch."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._watchers: set[Watcher] = set()

    @property
    def history(self) -> History:
        return self._events.history

    def add(self, watcher: Watcher) -> None:
        self._watchers.add(watcher)

    def discard(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def publish(self, event: EventReading) -> None:
        """Keep ``event``, and send it to every watcher, without a checkpoint in between. So a client that first watches
        and then asks for past events misses none."""
        if not self._events.tell(event):
            return
        for channel in list(self._watchers):
            with suppress(trio.WouldBlock, trio.BrokenResourceError):  # a watcher that does not keep up misses some
                channel.send_nowait(event)
