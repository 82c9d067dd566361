"""A value that one thread keeps up to date, and whose changes streams to the kubelet follow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Watched(Generic[Value]):
    """``now``: the value. It is replaced, never changed."""

    def __init__(self, first: Value) -> None:
        self.now = first
        self._changed = threading.Condition()
        self._ended = False

    def set(self, value: Value) -> None:
        with self._changed:
            if value != self.now:
                self.now = value
                self._changed.notify_all()

    def close(self) -> None:
        """End all streams."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def values(self, is_active: Callable[[], bool], every_s: float, *, repeat: bool = False) -> Iterator[Value]:
        """The value, then each change, until the peer has left. ``every_s``: how often that is checked; ``repeat``: and
        the value comes again."""
        said: list[Value] = []
        while is_active() and not self._ended:
            with self._changed:
                if said == [self.now]:
                    self._changed.wait(every_s)
                now = self.now
            if not self._ended and (repeat or said != [now]):
                said = [now]
                yield now
