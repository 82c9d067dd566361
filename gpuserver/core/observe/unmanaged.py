"""Programs of a vGPU that bypass the hook: when a program is one of these, and how the server responds.

A program escapes its vGPU's limits by an environment without the hook. Or a library binds to the driver alone
(``dlmopen``, ``RTLD_DEEPBIND``, another copy of the driver). The driver lists it all the same. Its container, its own
environment, or that of its parents, names the vGPU that it belongs to. Without such evidence the server does nothing.

Pure: sightings and the time in, commands out. A process is judged once; one that the driver no longer lists is
forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vgpu.identity import Process

GRACE_NS: Final = 3_000_000_000
"""The driver lists a process that attaches before its broker's page does. A broker that died is back by then."""


class Response(StrEnum):
    """The server's response to such a process (``serve --unmanaged``)."""

    REPORT = "report"
    SUSPEND = "suspend"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class Sighting:
    """A process that the driver lists and no vGPU has admitted. ``vgpu_id`` "": no evidence names a vGPU. ``place``:
    its container and pod, for people."""

    process: Process
    uid: int
    command: str
    memory_bytes: int
    vgpu_id: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Respond:
    """The server records an event, and stops or ends this process unless ``response`` is REPORT."""

    sighting: Sighting
    response: Response


class Unmanaged:
    """``see`` takes all sightings of one reading of the driver."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._first_ns: dict[Process, int] = {}
        self._judged: frozenset[Process] = frozenset()

    def see(self, sightings: Iterable[Sighting], now_ns: int) -> list[Respond]:
        """``now_ns``: on any clock that does not go back."""
        found = {seen.process: seen for seen in sightings if seen.vgpu_id and seen.process.start_time}
        self._first_ns = {process: self._first_ns.get(process, now_ns) for process in found}
        due = [
            process
            for process, first_ns in self._first_ns.items()
            if process not in self._judged and now_ns - first_ns >= GRACE_NS
        ]
        self._judged = (self._judged & found.keys()) | frozenset(due)
        return [Respond(found[process], self._response) for process in due]
