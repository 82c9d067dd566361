"""Limits reports of what a peer can cause without end: at most one per pause. Those between are counted. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class _Pause:
    until_s: float
    missed: int = 0


@dataclass(slots=True)
class Pace(Generic[Key]):
    """One report of each key in ``pause_s``. ``most_keys``: so many keys have a pause of their own, and all others
    share one. So the memory is bounded, however many keys a peer invents. Times are of any clock that does not go
    back."""

    pause_s: float
    most_keys: int = 1024
    _pauses: dict[Key | None, _Pause] = field(default_factory=dict)

    def due(self, key: Key, now_s: float) -> int | None:
        """How many reports of ``key`` have been left out since the last one; None: leave this one out, too."""
        shared: Key | None = key if key in self._pauses or len(self._pauses) < self.most_keys else None
        pause = self._pauses.get(shared)
        if pause is not None and now_s < pause.until_s:
            pause.missed += 1
            return None
        missed = 0 if pause is None else pause.missed
        self._pauses[shared] = _Pause(now_s + self.pause_s)
        if len(self._pauses) >= self.most_keys:
            self._pauses = {k: p for k, p in self._pauses.items() if now_s < p.until_s or p.missed}
        return missed

    def left_out(self, key: Key) -> int:
        """How many reports of ``key`` were left out. They count as reported from now on."""
        pause = self._pauses.get(key)
        if pause is None:
            return 0
        missed, pause.missed = pause.missed, 0
        return missed


def and_more(missed: int) -> str:
    """To put behind a report: `` (and 240 more)``; "" for none."""
    return f" (and {missed} more)" if missed else ""
