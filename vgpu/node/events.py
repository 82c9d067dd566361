"""What has happened on this node: the last ``KEPT`` events in memory, and as JSON lines in ``events.jsonl``.

Every user of the node can read all events, as ``vgpuctl ls`` and ``ps`` show the vGPUs and processes of all users.

There are two files. When ``events.jsonl`` is full, the node renames it to ``events.jsonl.1``, so that a node that is
killed at any moment leaves both in order. A kill or a full disk may leave a torn line. It stays as a line of its own,
and readers skip it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import trio
from pydantic import ValidationError

from vgpu.errors import ErrorCode, VgpuError
from vgpu.event_types import OF_PROGRAMS, EventType
from vgpu.loggers import get_logger
from vgpu.node.routing import find_vgpu
from vgpu.protocol.codec import MAX_CONTROL_BYTES
from vgpu.protocol.messages import EventReading, VgpuStatus

log = get_logger(__name__)

KEPT: Final = 10_000
FILE_BYTES: Final = 8 << 20
"""Of each of the two files: more than ``KEPT`` events of usual size."""
ANSWER_BYTES: Final = MAX_CONTROL_BYTES - (64 << 10)
"""What one answer may hold of them, as JSON: in msgpack they take less."""

Key: TypeAlias = tuple[float, int, str, str, str]


@dataclass(frozen=True, slots=True)
class Kept:
    event: EventReading
    size_bytes: int


class _Ring:
    """The last ``most`` numbers, by source. A source has ``most_of_one`` at most; when all together are too many, the
    source with the most loses its oldest."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._sources: dict[str, deque[int]] = {}
        self._size = 0

    def oldest(self, source: str) -> int | None:
        """The number that falls out next, of a source that has no room left. None: the source has room."""
        own = self._sources.get(source)
        return own[0] if own and (self._size >= self._most or len(own) >= self._most_of_one) else None

    def add(self, number: int, source: str) -> int | None:
        """The number that falls out."""
        own = self._sources.setdefault(source, deque())
        own.append(number)
        self._size += 1
        if len(own) <= self._most_of_one and self._size <= self._most:
            return None
        longest = source if len(own) > self._most_of_one else max(self._sources, key=lambda s: len(self._sources[s]))
        out = self._sources[longest].popleft()
        if not self._sources[longest]:
            del self._sources[longest]
        self._size -= 1
        return out


class History:
    """The last ``most`` events, in the order in which they were added. Pure.

    ``of_programs``: the size of a separate ring for events that programs cause (``OF_PROGRAMS``); None: there is none.
    In both rings, no user's vGPUs push out the events of other users. A user has at most ``most_of_one`` of the events
    that people cause. When a ring is full, the user with the most events in it loses the oldest.
    """

    def __init__(self, most: int = KEPT, of_programs: int | None = None, most_of_one: int | None = None) -> None:
        self._fair = of_programs is not None
        self._people = _Ring(most, most if most_of_one is None else most_of_one)
        self._programs = self._people if of_programs is None else _Ring(of_programs, of_programs)
        self._kept: dict[int, Kept] = {}
        self._keys: set[Key] = set()
        self._owners: dict[str, str] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._kept)

    def is_past(self, event: EventReading) -> bool:
        """Whether ``event`` is older than all kept events of its source, and that source has no room left."""
        oldest = self._ring_of(event).oldest(self._source_of(event))
        return oldest is not None and event.at_unix_s < self._kept[oldest].event.at_unix_s

    def add(self, event: EventReading) -> bytes | None:
        """Its line for the file; None if it is here already, because the server sent it again on a new link."""
        key = _key(event)
        if key in self._keys:
            return None
        line = event.model_dump_json().encode() + b"\n"
        self._keys.add(key)
        self._kept[self._next] = Kept(event, len(line))
        out = self._ring_of(event).add(self._next, self._source_of(event))
        self._next += 1
        if out is not None:
            self._keys.discard(_key(self._kept.pop(out).event))
        return line

    def _ring_of(self, event: EventReading) -> _Ring:
        return self._programs if event.kind in OF_PROGRAMS else self._people

    def _source_of(self, event: EventReading) -> str:
        """The uid that made the vGPU, as far as is known; else the vGPU. "" is the node itself."""
        if not self._fair:
            return ""
        if event.kind == EventType.CREATED:
            if len(self._owners) > 2 * KEPT:  # of vGPUs that are long gone
                self._owners.clear()
            self._owners[event.vgpu_id] = str(event.fields.get("by_uid", event.vgpu_id))
        return self._owners.get(event.vgpu_id, event.vgpu_id)

    def find(
        self, vgpu_id: str = "", since_unix_s: float = 0.0, most: int = KEPT, kinds: Collection[str] = ()
    ) -> tuple[EventReading, ...]:
        """The last ``most`` that fit, oldest first; fewer if one answer could not hold them. ``vgpu_id`` "", no
        ``kinds``: any."""
        found: list[EventReading] = []
        room = ANSWER_BYTES
        for kept in reversed(self._kept.values()):
            event = kept.event
            if event.at_unix_s < since_unix_s or (vgpu_id and event.vgpu_id != vgpu_id):
                continue
            if kinds and event.kind not in kinds:
                continue
            room -= kept.size_bytes
            if len(found) == most or room < 0:
                break
            found.append(event)
        return tuple(reversed(found))

    def meant(self, reference: str, vgpus: Sequence[VgpuStatus], uid: int | None = None) -> str:
        """The id of the vGPU that ``reference`` of user ``uid`` names (id, prefix of one, or name). First it searches
        ``vgpus``, which exist. Then it searches events for vGPUs that are gone, beginning with those that ``uid`` has
        made. Errors: ``not-found``, ``ambiguous``."""
        try:
            return find_vgpu(reference, vgpus, uid).vgpu_id
        except VgpuError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
        names: dict[str, str] = {}
        made: set[str] = set()
        for kept in self._kept.values():
            event = kept.event
            if event.vgpu_id:
                names[event.vgpu_id] = str(event.fields.get("name", names.get(event.vgpu_id, "")))
                if event.kind == EventType.CREATED and event.fields.get("by_uid") == uid:
                    made.add(event.vgpu_id)
        prefix = reference if reference.startswith("vgpu-") else f"vgpu-{reference}"
        fitting = [reference] if reference in names else []
        named = [vgpu_id for vgpu_id, name in names.items() if reference and name == reference]
        fitting = fitting or [vgpu_id for vgpu_id in named if vgpu_id in made] or named
        fitting = fitting or [vgpu_id for vgpu_id in names if reference and vgpu_id.startswith(prefix)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            ids = ", ".join(fitting[:4])
            raise VgpuError(ErrorCode.AMBIGUOUS, f"{reference!r} fits {len(fitting)} vGPUs ({ids})", "write the id")
        raise VgpuError(
            ErrorCode.NOT_FOUND, f"there is no vGPU {reference!r}, and no event names one", "see: vgpuctl events"
        )


def server_restarted(gpu_index: int, pid: int, restarts: int, at_unix_s: float) -> EventReading:
    """The node's own event about a server that ended. ``pid``: of that server."""
    return EventReading(
        at_unix_s=at_unix_s,
        kind=EventType.SERVER_RESTARTED,
        gpu_index=gpu_index,
        text=f"the server of GPU {gpu_index} ended, another starts; see: vgpuctl logs gpu {gpu_index}",
        fields={"pid": pid, "restarts": restarts},
    )


def _key(event: EventReading) -> Key:
    return event.at_unix_s, event.gpu_index, event.vgpu_id, event.kind, event.text


class EventFile:
    """The file at ``path`` and the one before it. Nothing is held open between calls, so either may be removed."""

    def __init__(self, path: Path, most_bytes: int = FILE_BYTES) -> None:
        self.path = path
        self.before = path.with_name(f"{path.name}.1")
        self._most_bytes = most_bytes

    def read(self, most: int = KEPT) -> list[EventReading]:
        """The last ``most``, oldest first. Lines that are none are skipped. ``OSError``: a file that cannot be read."""
        lines: list[bytes] = []
        for path in (self.before, self.path):
            with suppress(FileNotFoundError):
                lines += path.read_bytes().split(b"\n")
        events: list[EventReading] = []
        while lines and len(events) < most:
            with suppress(ValidationError):
                events.append(EventReading.model_validate_json(lines.pop()))
        return events[::-1]

    def append(self, lines: bytes) -> None:
        """``OSError``: they are not there, or not all of them."""
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                lines = b"\n" + lines
            left = memoryview(lines)
            while left:
                left = left[os.write(file, left) :]
            full = size + len(lines) >= self._most_bytes
        finally:
            os.close(file)
        if full:
            self.path.replace(self.before)


class EventLog:
    """History and files. ``tell`` is cheap and never fails. ``write`` runs in a task of its own, at the disk's pace.
    ``of_programs``: the file for events that programs cause, so that these fill no other file; None: ``file``."""

    def __init__(self, file: EventFile, history: History | None = None, of_programs: EventFile | None = None) -> None:
        self.history = History() if history is None else history
        self._file = file
        self._of_programs = file if of_programs is None else of_programs
        self._pending: list[tuple[EventFile, bytes]] = []
        self._waiting = trio.Event()
        self._missed = 0

    def restore(self) -> None:
        """Read what earlier nodes have written."""
        found: list[EventReading] = []
        for file in dict.fromkeys((self._file, self._of_programs)):
            try:
                found += file.read()
            except OSError as error:
                log.warning("events of before are not read", file=str(file.path), reason=str(error))
        if self._of_programs is not self._file:
            found.sort(key=lambda event: event.at_unix_s)
        for event in found:
            self.history.add(event)

    def tell(self, event: EventReading) -> bool:
        """Keep ``event``. False: it was kept before."""
        line = self.history.add(event)
        if line is None:
            return False
        self._pending.append((self._of_programs if event.kind in OF_PROGRAMS else self._file, line))
        self._waiting.set()
        return True

    async def write(self) -> None:
        """Write events until it is cancelled. ``flush`` writes the later ones."""
        while True:
            await self._waiting.wait()
            self._waiting = trio.Event()
            await trio.to_thread.run_sync(self._put, self._taken())

    def flush(self) -> None:
        self._put(self._taken())

    def _taken(self) -> list[tuple[EventFile, bytes]]:
        lines, self._pending = self._pending, []
        return lines

    def _put(self, lines: list[tuple[EventFile, bytes]]) -> None:
        """Write ``lines``. The node reports when a disk becomes full or read-only, and when it works again."""
        missed = 0
        for file in dict.fromkeys(file for file, _ in lines):
            own = [line for other, line in lines if other is file]
            try:
                file.append(b"".join(own))
            except OSError as error:
                if not self._missed and not missed:
                    log.error("events are not written", file=str(file.path), reason=str(error))
                missed += len(own)
        if missed:
            self._missed += missed
        elif lines and self._missed:
            log.warning("events are written again", file=str(self._file.path), missed=self._missed)
            self._missed = 0


def history_lost(text: str, at_unix_s: float) -> EventReading:
    """The node's own event about a ``node.db`` that it moved aside. It is about no GPU."""
    return EventReading(at_unix_s=at_unix_s, kind=EventType.HISTORY_LOST, gpu_index=-1, text=text)
