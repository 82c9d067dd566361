"""Reads the node's notices in a thread of its own. When the node restarts, the feed connects again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vgpu.errors import VgpuError
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import EventReading, NodeStatus, Notice, Snapshot

RETRY_S: Final = 0.5
EARLIER_EVENTS: Final = 5
CLOSE_S: Final = 1.0
"""``close`` does not wait longer for a node that hangs in the middle of the handshake."""


@dataclass(frozen=True, slots=True)
class Met:
    """The node answers. ``events``: the last ones before that."""

    status: NodeStatus
    events: tuple[EventReading, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The node no longer answers. The feed asks it again every ``RETRY_S``."""

    error: VgpuError


News = Met | Lost | Snapshot | EventReading


class Feed:
    """Calls ``take`` with news, in a thread of its own, until it is closed. The feed itself never raises."""

    def __init__(self, path: Path, interval_s: float, take: Callable[[News], None]) -> None:
        self._path = path
        self._interval_s = interval_s
        self._take = take
        self._link: ControlLink | None = None
        self._lock = threading.Lock()
        self._wanted = interval_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def set_interval(self, interval_s: float) -> None:
        """Of snapshots, from now on."""
        with self._lock:
            self._wanted = interval_s
        self._hang_up()

    def close(self) -> None:
        """End the feed. It calls ``take`` no more afterwards."""
        self._closed.set()
        self._hang_up()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _hang_up(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.hang_up()

    def _run(self) -> None:
        anew = True
        while not self._closed.is_set():
            with self._lock:
                self._interval_s = self._wanted
            try:
                self._watch(anew)
            except VgpuError as error:
                # The link that set_interval has hung up is no loss.
                anew = self._wanted == self._interval_s
                if anew and not self._closed.is_set():
                    self._take(Lost(error))
                    self._closed.wait(RETRY_S)

    def _watch(self, anew: bool) -> None:
        with ControlLink(self._path) as link:
            with self._lock:
                self._link = link
            try:
                if self._closed.is_set() or self._wanted != self._interval_s:
                    return
                if anew:
                    self._take(Met(link.status(), self._earlier(link)))
                for notice in link.watch(events=True, interval_ns=int(self._interval_s * 1e9)):
                    self._tell(notice)
            finally:
                with self._lock:
                    self._link = None

    def _earlier(self, link: ControlLink) -> tuple[EventReading, ...]:
        with suppress(VgpuError):  # a node of an older release keeps no events
            return link.events(since_unix_s=time.time() - 3600)[-EARLIER_EVENTS:]
        return ()

    def _tell(self, notice: Notice) -> None:
        for news in (notice.snapshot, notice.event):
            if news is not None and not self._closed.is_set():
                self._take(news)
