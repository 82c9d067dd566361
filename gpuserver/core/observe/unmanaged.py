"""Programs of a vGPU that use its GPU past the hook: when one is such a program, and what is done with it.

A program leaves its vGPU's limits by a library that binds to the driver alone (``dlmopen``, ``RTLD_DEEPBIND``, another
copy of the driver), or by an environment without the hook. The driver shows it all the same. Its own environment, or
that of its parents, says which vGPU it belongs to: without such evidence nothing is done to it.

Pure: what was seen comes in with the time, commands go out. A process is judged once; one that is no longer seen is
forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vgpu.identity import Process

GRACE_NS: Final = 3_000_000_000
"""A process that attaches is seen before its broker's page shows it; a broker that died is back by then."""


class Response(StrEnum):
    """What happens to such a process (``serve --unmanaged``)."""

    REPORT = "report"
    SUSPEND = "suspend"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class Sighting:
    """A process that the driver shows and no vGPU has admitted. ``vgpu_id`` "": nothing ties it to one."""

    process: Process
    uid: int
    command: str
    memory_bytes: int
    vgpu_id: str


@dataclass(frozen=True, slots=True)
class Respond:
    """Record an event; then stop or end that very process, unless ``response`` is REPORT."""

    sighting: Sighting
    response: Response


class Unmanaged:
    """``see`` every sighting of one reading of the driver."""

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
