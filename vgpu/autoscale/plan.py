"""All vGPUs of a node that have bounds: sizes first, then another GPU, then one replica more.

A vGPU that has room on its GPU grows there. One that wants to grow for some seconds without room moves to a GPU of the
node that fits the size which it wants. If there is none, or its upper bound does not suffice, it needs a replica: the
engine decides about that. What a vGPU gives up is free for others of the same round, so commands that shrink come
first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeAlias

from vgpu.autoscale.size import DOWN_AFTER_S, MEMORY_STEP_BYTES, STEP, UP_AT, Compute, Memory, tenths
from vgpu.units import format_bytes

PATIENCE_S: Final = 6.0
"""A vGPU wants to grow for so long before it moves, or needs a replica: a move costs its programs seconds."""
MOVE_AGAIN_S: Final = 60.0
REFUSED_S: Final = 10.0
"""After a refusal. Readings of the node are older than the GPU Server's own."""
NOT_MOVED_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One vGPU since the reading before. ``busy``, ``throttled``: parts of the time. A range is None where the vGPU
    has one size. ``movable``: it may have another GPU."""

    vgpu: str
    gpu: int
    sm_percent: float
    memory_bytes: int
    busy: float
    throttled: float
    memory_used_bytes: int = 0
    refusals: int = 0
    refused_bytes: int = 0
    sm_range: tuple[float, float] | None = None
    memory_range: tuple[int, int] | None = None
    movable: bool = True


@dataclass(slots=True)
class Room:
    """What a GPU has not promised."""

    gpu: int
    sm_percent: float
    memory_bytes: int
    takes_vgpus: bool = True
    """It is not drained."""


@dataclass(frozen=True, slots=True)
class Resize:
    """Another size of the vGPU; None: that size stays."""

    vgpu: str
    sm_percent: float | None
    memory_bytes: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """The vGPU goes to another GPU with the size that it has, and grows there."""

    vgpu: str
    gpu: int
    reason: str


@dataclass(frozen=True, slots=True)
class Replica:
    """How many replicas more the vGPU's service needs: 1, or 0 again."""

    vgpu: str
    wanted: int
    reason: str


Command: TypeAlias = Resize | Move | Replica


@dataclass(slots=True)
class _Track:
    compute: Compute = field(default_factory=Compute)
    memory: Memory = field(default_factory=Memory)
    short_since_s: float | None = None
    """Since when it has wanted more than it can have here. None: it does not."""
    enough_since_s: float | None = None
    replicas: int = 0
    resize_at_s: float = -inf
    move_at_s: float = -inf


@dataclass(slots=True)
class _Wish:
    reading: Reading
    track: _Track
    sm_percent: float
    memory_bytes: int

    @property
    def shrinks(self) -> bool:
        return self.sm_percent < self.reading.sm_percent or self.memory_bytes < self.reading.memory_bytes

    @property
    def pressure(self) -> float:
        """The vGPU that lacks most grows first."""
        return self.track.compute.demand / self.reading.sm_percent


class Plan:
    """``step`` with each round of readings. Its state is half a minute of readings: without it, it begins anew."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}

    @property
    def replicas(self) -> dict[str, int]:
        """The vGPUs that need replicas, and how many."""
        return {vgpu: track.replicas for vgpu, track in self._tracks.items() if track.replicas}

    def refused(self, command: Command, now_s: float) -> None:
        """The node or its GPU Server did not carry out ``command``."""
        track = self._tracks.get(command.vgpu)
        if track is None:
            return
        if isinstance(command, Move):
            track.move_at_s = now_s + NOT_MOVED_S
        else:
            track.resize_at_s = now_s + REFUSED_S

    def keep(self, vgpus: Iterable[str]) -> None:
        """Forget all vGPUs but these."""
        self._tracks = {vgpu: self._tracks[vgpu] for vgpu in vgpus if vgpu in self._tracks}

    def step(self, now_s: float, readings: Sequence[Reading], rooms: Iterable[Room]) -> list[Command]:
        """What to do now. ``readings``: of the vGPUs with bounds whose state is known."""
        left = {room.gpu: Room(room.gpu, room.sm_percent, room.memory_bytes, room.takes_vgpus) for room in rooms}
        wishes = [self._wish(now_s, reading) for reading in readings]
        commands: list[Command] = [self._shrunk(wish, left) for wish in wishes if wish.shrinks]
        for wish in sorted(wishes, key=lambda one: -one.pressure):
            commands += self._grown(now_s, wish, left)
        return commands

    def _wish(self, now_s: float, reading: Reading) -> _Wish:
        track = self._tracks.setdefault(reading.vgpu, _Track())
        track.compute.take(now_s, reading.sm_percent, reading.busy, reading.throttled)
        track.memory.take(
            now_s, reading.memory_bytes, reading.memory_used_bytes, reading.refusals, reading.refused_bytes
        )
        sm, memory = reading.sm_percent, reading.memory_bytes
        if now_s >= track.resize_at_s:
            if reading.sm_range is not None:
                sm = track.compute.wanted(now_s, *reading.sm_range)
            if reading.memory_range is not None:
                memory = track.memory.wanted(now_s, *reading.memory_range)
        return _Wish(reading, track, sm, memory)

    def _shrunk(self, wish: _Wish, left: dict[int, Room]) -> Resize:
        """The part of a wish that gives something up."""
        reading, room = wish.reading, left.get(wish.reading.gpu)
        sm = wish.sm_percent if wish.sm_percent < reading.sm_percent else None
        memory = wish.memory_bytes if wish.memory_bytes < reading.memory_bytes else None
        if room is not None:
            room.sm_percent += 0 if sm is None else reading.sm_percent - sm
            room.memory_bytes += 0 if memory is None else reading.memory_bytes - memory
        return Resize(reading.vgpu, sm, memory, _reason(wish, sm, memory))

    def _grown(self, now_s: float, wish: _Wish, left: dict[int, Room]) -> list[Command]:
        reading, track = wish.reading, wish.track
        more_sm, more_memory = wish.sm_percent - reading.sm_percent, wish.memory_bytes - reading.memory_bytes
        commands: list[Command] = []
        sm = memory = None
        room = left.get(reading.gpu)
        if room is not None and more_sm > 0:
            part = min(more_sm, int(max(0.0, room.sm_percent) * 10 + 1e-6) / 10)
            if part >= min(more_sm, STEP * reading.sm_percent):
                sm = round(reading.sm_percent + part, 1) if part < more_sm else wish.sm_percent
                room.sm_percent -= sm - reading.sm_percent
        if room is not None and more_memory > 0:
            size = min(more_memory, max(0, room.memory_bytes) // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES)
            if size > 0:
                memory = reading.memory_bytes + size
                room.memory_bytes -= size
        if sm is not None or memory is not None:
            commands.append(Resize(reading.vgpu, sm, memory, _reason(wish, sm, memory)))
        lacks_memory = more_memory > 0 and memory is None and track.memory.needed > reading.memory_bytes
        no_room = (more_sm > 0 and sm is None) or lacks_memory
        at_most = _at_upper_bound(reading, track)
        return commands + self._elsewhere(now_s, wish, left, no_room=no_room, at_most=at_most)

    def _elsewhere(
        self, now_s: float, wish: _Wish, left: dict[int, Room], *, no_room: bool, at_most: bool
    ) -> list[Command]:
        reading, track = wish.reading, wish.track
        if not no_room and not at_most:
            if now_s < track.resize_at_s:  # a refusal stands: whether it has enough is not known
                return []
            track.short_since_s = None
            return self._enough(now_s, reading, track)
        track.enough_since_s = None
        if track.short_since_s is None:
            track.short_since_s = now_s
        if now_s - track.short_since_s < PATIENCE_S:
            return []
        if no_room and reading.movable and now_s >= track.move_at_s:
            there = _roomiest(wish, left)
            if there is not None:
                there.sm_percent -= wish.sm_percent
                there.memory_bytes -= wish.memory_bytes
                track.move_at_s, track.short_since_s = now_s + MOVE_AGAIN_S, None
                return [Move(reading.vgpu, there.gpu, f"moves to GPU {there.gpu}: {_lacks(wish)}")]
        if track.replicas:
            return []
        track.replicas = 1
        why = _lacks(wish) if no_room else _beyond(wish)
        return [Replica(reading.vgpu, 1, f"needs one replica more: {why}")]

    def _enough(self, now_s: float, reading: Reading, track: _Track) -> list[Command]:
        if track.enough_since_s is None:
            track.enough_since_s = now_s
        if not track.replicas or now_s - track.enough_since_s < DOWN_AFTER_S:
            return []
        track.replicas = 0
        return [Replica(reading.vgpu, 0, "needs no further replica: its size suffices")]


def _at_upper_bound(reading: Reading, track: _Track) -> bool:
    """Whether it needs more than its upper bound."""
    sm, memory = reading.sm_range, reading.memory_range
    compute = sm is not None and reading.sm_percent >= sm[1] and track.compute.demand >= UP_AT * sm[1]
    return compute or (memory is not None and reading.memory_bytes >= memory[1] and track.memory.needed > memory[1])


def _roomiest(wish: _Wish, left: dict[int, Room]) -> Room | None:
    """The GPU with most room, of those that fit all that the vGPU wants."""
    fitting = [
        room
        for room in left.values()
        if room.gpu != wish.reading.gpu
        and room.takes_vgpus
        and room.sm_percent + 1e-6 >= wish.sm_percent
        and room.memory_bytes >= wish.memory_bytes
    ]
    return max(fitting, key=lambda room: (room.sm_percent, -room.gpu), default=None)


def _reason(wish: _Wish, sm: float | None, memory: int | None) -> str:
    reading, said = wish.reading, []
    if sm is not None:
        said.append(f"--sm {reading.sm_percent:g} to {sm:g}: {_needs(wish)}")
    if memory is not None:
        used = format_bytes(wish.track.memory.needed)
        said.append(f"--mem {format_bytes(reading.memory_bytes)} to {format_bytes(memory)}: its programs need {used}")
    return "scaled, " + "; ".join(said)


def _needs(wish: _Wish) -> str:
    needed = f"its programs need {tenths(wish.track.compute.demand):g} % of the GPU"
    return needed + (" or more" if wish.reading.throttled else "")


def _lacks(wish: _Wish) -> str:
    memory = wish.memory_bytes > wish.reading.memory_bytes and wish.sm_percent <= wish.reading.sm_percent
    wanted = format_bytes(wish.memory_bytes) if memory else f"--sm {wish.sm_percent:g}"
    return f"GPU {wish.reading.gpu} has no room for {wanted}"


def _beyond(wish: _Wish) -> str:
    return f"{_needs(wish)}, and its upper bound is reached"
