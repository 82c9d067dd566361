"""Many nodes. Nodes with the same room left are one group, so that a decision costs as much as there are groups.

For each different request the fleet keeps the rank of each group. A placement changes two groups; a request that comes
again ranks only what has changed since. Ten thousand GPUs make some hundred groups.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from vgpu.placement.mix import Mix
from vgpu.placement.policies.base import Policy
from vgpu.placement.state import Gpu, Option, Request, Room, given_back
from vgpu.share import PPM

NOWHERE: Final = float("-inf")
REMEMBERED: Final = 16_384
"""Requests of late, which make the mix."""
ANOTHER_MIX: Final = 0.05
"""All ranks of the last mix are worth nothing then."""
MOST_RANKINGS: Final = 1024
MOST_CHANGES: Final = 1_000_000
MOST_ROOMS: Final = 200_000


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request went: the node, and its GPUs by index."""

    node: int
    gpus: tuple[int, ...]
    asked: Request
    policy: Policy
    option: Option
    mix: Mix

    @property
    def reasons(self) -> Mapping[str, float]:
        """What led to it and how much each reason counted, in GPUs."""
        return self.policy.parts(self.option, self.mix)


@dataclass(slots=True)
class _Group:
    room: Room
    number: int
    """Of the room; the same room has it again when it comes back."""
    nodes: list[int]
    """Sorted; the first one is taken."""


@dataclass(slots=True)
class _Ranking:
    """The ranks of the groups for one request."""

    seen: int = 0
    """How many of the changes it has followed."""
    ranks: list[float] = field(default_factory=list)
    """By the group's slot."""
    known: dict[int, tuple[float, tuple[Gpu, ...]]] = field(default_factory=dict)
    """By the room's number: the best rank there, and what the GPUs that it takes have left before."""


class Fleet:
    """The nodes and their placements. ``mix``: fixed; None: it follows the requests."""

    def __init__(self, policy: Policy, rooms: Iterable[Room], mix: Mix | None = None) -> None:
        self.policy = policy
        self.mix = Mix(()) if mix is None else mix
        self._fixed = mix is not None or not policy.uses_mix
        self._asked: deque[Request] = deque(maxlen=REMEMBERED)
        self._until_mix = 1
        self._gpus: list[list[Gpu]] = []
        self._slot_of: list[int] = []
        self._groups: list[_Group | None] = []
        self._slots: dict[Room, int] = {}
        self._free_slots: list[int] = []
        self._changes: list[int] = []
        self._forgotten = 0
        self._numbers: dict[Room, int] = {}
        self._rankings: dict[Request, _Ranking] = {}
        for node, room in enumerate(rooms):
            self._gpus.append(list(room.gpus))
            self._slot_of.append(0)
            self._join(node, room._replace(gpus=tuple(sorted(room.gpus))))

    def room(self, node: int) -> Room:
        """What the node has left."""
        return self._at(self._slot_of[node]).room

    def place(self, asked: Request) -> Placement | None:
        """Place the request. None: no node has room, or the policy allows none; ``why`` says which."""
        self._remember(asked)
        ranking = self._ranking(asked)
        best = max(ranking.ranks, default=NOWHERE)
        if best == NOWHERE:
            return None
        slot = ranking.ranks.index(best)
        if ranking.ranks.count(best) > 1:  # the lowest node among equals
            slot = min((at for at, each in enumerate(ranking.ranks) if each == best), key=self._first)
        group = self._at(slot)
        option = Option(group.room, asked, ranking.known[group.number][1])
        node = group.nodes[0]
        used = self._take(node, option)
        self._move(node, option.after)
        return Placement(node, used, asked, self.policy, option, self.mix)

    def remove(self, placement: Placement) -> None:
        """Take the placement back. ``ValueError``: its GPUs have no such vGPU."""
        node, asked, room = placement.node, placement.asked, self.room(placement.node)
        changed = {index: given_back(room.kind, self._gpus[node][index], asked) for index in placement.gpus}
        for index, gpu in changed.items():
            self._gpus[node][index] = gpu
        gpus = tuple(sorted(self._gpus[node]))
        self._move(node, Room(room.kind, gpus, room.cores + asked.cores, room.host_bytes + asked.host_bytes))

    def why(self, asked: Request) -> str:
        """Why no node takes the request."""
        rooms = [group.room for group in self._groups if group is not None]
        if any(room.takes(asked) for room in rooms):
            return f"{self.policy.name} allows none of the GPUs that have room"
        rooms = [room for room in rooms if not asked.models or room.kind.model in asked.models]
        if not rooms:
            return f"no node has a GPU of {', '.join(sorted(asked.models)) or 'any kind'}"
        gpus = [gpu for room in rooms for gpu in room.gpus]
        wanted = f"{100 * asked.time_ppm / PPM:g} % of a GPU"
        if asked.gpus > 1:
            wanted = f"{asked.gpus} GPUs with {100 * asked.time_ppm / PPM:g} % each"
        if not gpus or max(gpu.time_ppm for gpu in gpus) < asked.time_ppm:
            emptiest = max((gpu.time_ppm for gpu in gpus), default=0)
            return f"{wanted} asked for; the emptiest of {len(gpus)} has {100 * emptiest / PPM:g} %"
        most = max(gpu.memory_bytes for gpu in gpus)
        if most < asked.memory_bytes:
            wanted = f"{asked.memory_bytes / 2**30:.4g} GiB of memory"
            return f"{wanted} asked for; the most on one GPU is {most / 2**30:.4g} GiB"
        return f"{wanted} asked for, with its memory and processors; no node has all of them"

    def _take(self, node: int, option: Option) -> tuple[int, ...]:
        """The indices of the GPUs that the option takes on this node."""
        gpus, indices = self._gpus[node], []
        for old, new in zip(option.used, option.left, strict=True):
            index = next(i for i, gpu in enumerate(gpus) if gpu == old and i not in indices)
            gpus[index] = new
            indices.append(index)
        return tuple(indices)

    def _remember(self, asked: Request) -> None:
        """Once the requests have doubled, or all of them are new, see whether they are another mix."""
        if self._fixed:
            return
        self._asked.append(asked)
        self._until_mix -= 1
        if self._until_mix <= 0:
            self._until_mix = len(self._asked)
            mix = Mix(self._asked)
            if mix.differs(self.mix) > ANOTHER_MIX:
                self.mix = mix
                self._rankings.clear()

    def _ranking(self, asked: Request) -> _Ranking:
        ranking = self._rankings.pop(asked, None)
        if ranking is None or ranking.seen < self._forgotten:
            ranking, changed = _Ranking(), set(range(len(self._groups)))
        else:
            changed = set(self._changes[ranking.seen - self._forgotten :])
        ranking.ranks += [NOWHERE] * (len(self._groups) - len(ranking.ranks))
        ranks, known = ranking.ranks, ranking.known
        for slot in changed:
            group = self._groups[slot]
            if group is None:
                ranks[slot] = NOWHERE
                continue
            found = known.get(group.number)
            if found is None:
                found = known[group.number] = self._best(group.room, asked)
            ranks[slot] = found[0]
        ranking.seen = self._forgotten + len(self._changes)
        self._rankings[asked] = ranking  # the last one again
        if len(self._rankings) > MOST_RANKINGS:
            del self._rankings[next(iter(self._rankings))]
        return ranking

    def _best(self, room: Room, asked: Request) -> tuple[float, tuple[Gpu, ...]]:
        best: tuple[float, tuple[Gpu, ...]] = NOWHERE, ()
        for option in room.options(asked):
            value = self.policy.rank(option, self.mix)
            if value is not None and value > best[0]:
                best = value, option.used
        return best

    def _first(self, slot: int) -> int:
        return self._at(slot).nodes[0]

    def _at(self, slot: int) -> _Group:
        group = self._groups[slot]
        assert group is not None
        return group

    def _join(self, node: int, room: Room) -> None:
        slot = self._slots.get(room)
        if slot is None:
            if len(self._numbers) > MOST_ROOMS:
                self._forget()
            group = _Group(room, self._numbers.setdefault(room, len(self._numbers)), [])
            if self._free_slots:
                slot = self._free_slots.pop()
                self._groups[slot] = group
            else:
                slot = len(self._groups)
                self._groups.append(group)
            self._slots[room] = slot
            self._note(slot)
        insort(self._at(slot).nodes, node)
        self._slot_of[node] = slot

    def _move(self, node: int, room: Room) -> None:
        slot = self._slot_of[node]
        group = self._at(slot)
        del group.nodes[bisect_left(group.nodes, node)]
        if not group.nodes:
            self._groups[slot] = None
            del self._slots[group.room]
            self._free_slots.append(slot)
            self._note(slot)
        self._join(node, room)

    def _forget(self) -> None:
        """Number the rooms anew, and rank them anew."""
        self._rankings.clear()
        self._numbers.clear()
        for group in self._groups:
            if group is not None:
                group.number = self._numbers.setdefault(group.room, len(self._numbers))

    def _note(self, slot: int) -> None:
        self._changes.append(slot)
        if len(self._changes) > MOST_CHANGES:
            self._forgotten += len(self._changes)
            self._changes.clear()
