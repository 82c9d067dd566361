"""In which order waiting requests are tried, and on which GPUs. Pure.

The order between users is dominant resource fairness: the next request is one of the user that holds the least of the
scarcer resource, divided by the user's weight (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011). Of users that
hold the same, the one goes first that has waited longest since its last vGPU. Each user's own requests keep the order
of their arrival. So a user with a hundred requests delays another user by one request.

Small requests may overtake a large one while it waits for room, but not for ever. Once a user's oldest request has
waited for ``patience_s``, it goes before all others, and one GPU is kept for it: the GPU that lacks least for it.
Nothing else is placed there until the request is. So a large request gets its room when what is on that GPU has ended.
No GPU is kept for a request that its user's quota keeps out: no room would help it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

User: TypeAlias = int | str


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request that waits. ``size``: by GPU that it may have, the part of the scarcer of time and memory that it
    takes there, 0–1; a GPU that can never take it is left out. ``priority``: higher goes first among a user's own.
    ``blocked``: its user's quota keeps it out now."""

    request_id: str
    user: User
    since_s: float
    size: Mapping[int, float]
    weight: float = 1.0
    priority: int = 1
    blocked: bool = False

    @property
    def largest(self) -> float:
        return max(self.size.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Room:
    """What a GPU has left, 0–1 of its time and its memory."""

    time: float
    memory: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request in its place of the order. ``gpus``: those on which it may be placed now. ``kept``: the GPU kept
    for it."""

    request: Waiting
    gpus: tuple[int, ...]
    kept: int | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """All requests in the order in which they are tried. ``kept``: by GPU, the request that it is kept for."""

    candidates: tuple[Candidate, ...] = ()
    kept: Mapping[int, str] = field(default_factory=dict)

    def position(self, request_id: str) -> int:
        """From 1; 0: it does not wait."""
        return next((n for n, one in enumerate(self.candidates, 1) if one.request.request_id == request_id), 0)


def ordered(
    now_s: float,
    waiting: Iterable[Waiting],
    held: Mapping[User, float],
    rooms: Mapping[int, Room],
    patience_s: float,
    served_s: Mapping[User, float] | None = None,
    preempting: Mapping[str, int] | None = None,
) -> Order:
    """The order at ``now_s``. ``held``: what each user has, in GPUs of the scarcer resource. ``rooms``: by GPU that
    serves. ``served_s``: when each user's last request left the queue with its vGPU. ``preempting``: by request, the
    GPU on which vGPUs were suspended for it. That request goes before all others, and the GPU is kept for it."""
    requests = sorted(waiting, key=lambda one: (one.since_s, one.request_id))
    room_for = {name: gpu for name, gpu in (preempting or {}).items() if gpu in rooms}
    makers = [one for one in requests if one.request_id in room_for]
    first = makers + _overdue(now_s, [one for one in requests if one.request_id not in room_for], patience_s)
    chosen = {one.request_id for one in first}
    rest = _fair([one for one in requests if one.request_id not in chosen], first, held, served_s or {})
    kept: dict[int, str] = {}
    candidates = []
    for request in first:
        gpu = room_for.get(request.request_id, _to_keep(request, rooms, kept))
        if gpu is not None:
            kept[gpu] = request.request_id
        # It takes any other GPU as well, if one has room earlier.
        candidates.append(Candidate(request, _open_to(request, rooms, kept), gpu))
    candidates += [Candidate(request, _open_to(request, rooms, kept)) for request in rest]
    return Order(tuple(candidates), kept)


def _overdue(now_s: float, requests: Sequence[Waiting], patience_s: float) -> list[Waiting]:
    """Of each user the request that has waited longest, if that is for ``patience_s`` or longer; the oldest first. A
    request that is blocked has no part in this."""
    oldest: dict[User, Waiting] = {}
    for request in requests:
        if request.blocked or not request.size:
            continue
        oldest.setdefault(request.user, request)
    return [one for one in oldest.values() if now_s - one.since_s >= patience_s]


def _fair(
    requests: Sequence[Waiting], before: Iterable[Waiting], held: Mapping[User, float], served_s: Mapping[User, float]
) -> list[Waiting]:
    """One after the other, a request of the user that would hold least for its weight."""
    has, placed = dict(held), Counter[User]()
    for one in before:
        has[one.user] = has.get(one.user, 0.0) + one.largest
        placed[one.user] += 1
    queues: dict[User, list[Waiting]] = {}
    for request in sorted(requests, key=lambda one: (-one.priority, one.since_s, one.request_id), reverse=True):
        queues.setdefault(request.user, []).append(request)

    def comes(user: User) -> tuple[float, int, float, float, str]:
        request = queues[user][-1]
        part = round(has.get(user, 0.0) / request.weight, 6)
        return part, placed[user], served_s.get(user, -math.inf), request.since_s, str(user)

    found = []
    while queues:
        user = min(queues, key=comes)
        request = queues[user].pop()
        if not queues[user]:
            del queues[user]
        has[user] = has.get(user, 0.0) + request.largest
        placed[user] += 1
        found.append(request)
    return found


def _open_to(request: Waiting, rooms: Mapping[int, Room], kept: Mapping[int, str]) -> tuple[int, ...]:
    """The GPUs that it may have, and that are kept for no other request."""
    return tuple(
        gpu for gpu in request.size if gpu in rooms and kept.get(gpu, request.request_id) == request.request_id
    )


def _to_keep(request: Waiting, rooms: Mapping[int, Room], kept: Mapping[int, str]) -> int | None:
    """The GPU that lacks least for the request, and is not kept for another."""
    free = [gpu for gpu in request.size if gpu in rooms and gpu not in kept]
    if not free:
        return None
    return min(free, key=lambda gpu: (request.size[gpu] - min(rooms[gpu].time, rooms[gpu].memory), gpu))
