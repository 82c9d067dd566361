"""Many nodes. Nodes with the same room left are one group, so that a decision costs as much as there are groups.

For each different request the fleet keeps the rank of each group. A placement changes two groups. A request that comes
again ranks only what has changed since. Requests of nearly the same size share a ranking.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final

from vgpu.placement.mix import Mix
from vgpu.placement.policies.base import Policy
from vgpu.placement.state import Gpu, Kind, Option, Request, Room, given_back
from vgpu.share import PPM, Mode

NOWHERE: Final = float("-inf")
REMEMBERED: Final = 16_384
"""Requests of late, which make the mix."""
ANOTHER_MIX: Final = 0.05
"""If a larger part of the requests differs, the fleet drops all ranks."""
MOST_RANKINGS: Final = 1024
MOST_CHANGES: Final = 1_000_000
MOST_KNOWN: Final = 2_000_000
"""Ranks of rooms, over all rankings."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request went: the node, and its GPUs by index. ``serial``: no two placements of a fleet have the same."""

    node: int
    gpus: tuple[int, ...]
    asked: Request
    serial: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A node that has room. ``reasons``: what led to its rank, in GPUs; the rank is their sum."""

    node: int
    rank: float
    reasons: Mapping[str, float]


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
    known: dict[int, float] = field(default_factory=dict)
    """By the room's number."""


class Fleet:
    """The nodes and their placements. ``mix``: fixed; None: it follows the requests."""

    def __init__(self, policy: Policy, rooms: Iterable[Room] = (), mix: Mix | None = None) -> None:
        self.policy = policy
        self.mix = Mix(()) if mix is None else mix
        self._fixed = mix is not None or not policy.uses_mix
        self._asked: deque[Request] = deque(maxlen=REMEMBERED)
        self._until_mix = 1
        self._kinds: dict[tuple[str, int, Mode], Kind] = {}
        self._gpus: list[list[Gpu]] = []
        self._slot_of: list[int] = []
        self._groups: list[_Group | None] = []
        self._slots: dict[Room, int] = {}
        self._free_slots: list[int] = []
        self._numbers: dict[Room, int] = {}
        self._changes: list[int] = []
        self._forgotten = 0
        self._rankings: dict[Request, _Ranking] = {}
        self._known = 0
        self._live: set[int] = set()
        self._serial = 0
        for room in rooms:
            self.add(room)

    def add(self, room: Room) -> int:
        """Add a node with this room; its number. Placements that it has already follow by ``place``."""
        kind = room.kind
        kind = self._kinds.setdefault((kind.model, kind.memory_bytes, kind.mode), kind)
        self._gpus.append(list(room.gpus))
        self._slot_of.append(0)
        self._join(len(self._gpus) - 1, room._replace(kind=kind, gpus=tuple(sorted(room.gpus))))
        return len(self._gpus) - 1

    def room(self, node: int) -> Room:
        """What the node has left."""
        return self._at(self._slot_of[node]).room

    def place(self, asked: Request, *, node: int | None = None, again: bool = False) -> Placement | None:
        """Place the request, on ``node`` if that is given. None: no node has room, or the policy allows none; ``why``
        says which. ``again``: it was asked before, so the mix has it already."""
        if not again:
            self._remember(asked)
        option, group = self._chosen(asked) if node is None else self._on(node, asked)
        if option is None or group is None:
            return None
        node = group.nodes[0] if node is None else node
        used = self._take(node, option)
        self._move(node, option.after)
        self._serial += 1
        self._live.add(self._serial)
        return Placement(node, used, asked, self._serial)

    def remove(self, placement: Placement) -> None:
        """Take the placement back. ``ValueError``: it was taken back already."""
        if placement.serial not in self._live:
            raise ValueError(f"placement {placement.serial} was taken back already")
        self._live.remove(placement.serial)
        node, asked, room = placement.node, placement.asked, self.room(placement.node)
        for index in placement.gpus:
            self._gpus[node][index] = given_back(room.kind, self._gpus[node][index], asked)
        gpus = tuple(sorted(self._gpus[node]))
        self._move(node, Room(room.kind, gpus, room.cores + asked.cores, room.host_bytes + asked.host_bytes))

    def offers(self, asked: Request, most: int = 10) -> list[Offer]:
        """The best nodes for a request, with the reasons. Nothing is placed, and the mix does not change."""
        found = ((option, group) for group in self._groups if group for option in [self._best(group.room, asked)])
        able = [(self.policy.rank(option, self.mix), option, group) for option, group in found if option is not None]
        best = nlargest(most, able, key=lambda one: (one[0], -one[2].nodes[0]))
        offers = [
            Offer(node, rank, self.policy.parts(option, self.mix))
            for rank, option, group in best
            for node in group.nodes[:most]
        ]
        return offers[:most]

    def why(self, asked: Request) -> str:
        """Why no node takes the request."""
        rooms = [group.room for group in self._groups if group is not None]
        if any(room.takes(asked) for room in rooms):
            return f"{self.policy.name} allows none of the GPUs that have room"
        rooms = [room for room in rooms if not asked.models or room.kind.model in asked.models]
        if not rooms:
            return f"no node has a GPU of {', '.join(sorted(asked.models)) or 'any kind'}"
        gpus = [gpu for room in rooms for gpu in room.gpus]
        wanted = f"{100 * asked.area_ppm / PPM:g} % of a GPU"
        if asked.gpus > 1:
            wanted = f"{asked.gpus} GPUs with {100 * asked.area_ppm / PPM:g} % each"
        emptiest = max((gpu.time_ppm for gpu in gpus), default=0)
        if emptiest < asked.area_ppm:
            return f"{wanted} asked for; the emptiest of {len(gpus)} has {100 * emptiest / PPM:g} %"
        most = max((gpu.memory_bytes for gpu in gpus), default=0)
        if most < asked.memory_bytes:
            wanted = f"{asked.memory_bytes / 2**30:.4g} GiB of memory"
            return f"{wanted} asked for; the most on one GPU is {most / 2**30:.4g} GiB"
        return f"{wanted} asked for; no node has that with its memory and processors, and with SMs that fit"

    # --- which group

    def _chosen(self, asked: Request) -> tuple[Option | None, _Group | None]:
        for size in dict.fromkeys((asked.rounded_up(), asked)):  # what is rounded up may not fit where the request does
            ranks = self._ranking(size).ranks
            best = max(ranks, default=NOWHERE)
            if best > NOWHERE:
                slot = ranks.index(best)
                if ranks.count(best) > 1:  # the lowest node among equals
                    slot = min((at for at, each in enumerate(ranks) if each == best), key=self._first)
                group = self._at(slot)
                return self._best(group.room, asked), group
        return None, None

    def _on(self, node: int, asked: Request) -> tuple[Option | None, _Group | None]:
        group = self._at(self._slot_of[node])
        return self._best(group.room, asked), group

    def _best(self, room: Room, asked: Request) -> Option | None:
        best, found = NOWHERE, None
        for option in room.options(asked, self.policy.allows):
            rank = self.policy.rank(option, self.mix)
            if rank > best:
                best, found = rank, option
        return found

    def _ranking(self, asked: Request) -> _Ranking:
        """With the changes since it was asked for last."""
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
            rank = known.get(group.number)
            if rank is None:
                option = self._best(group.room, asked)
                rank = known[group.number] = NOWHERE if option is None else self.policy.rank(option, self.mix)
                self._known += 1
            ranks[slot] = rank
        ranking.seen = self._forgotten + len(self._changes)
        self._rankings[asked] = ranking  # the last one again
        if len(self._rankings) > MOST_RANKINGS:
            del self._rankings[next(iter(self._rankings))]
        if self._known > MOST_KNOWN:
            self._forget()
        return ranking

    def _first(self, slot: int) -> int:
        return self._at(slot).nodes[0]

    def _at(self, slot: int) -> _Group:
        group = self._groups[slot]
        assert group is not None
        return group

    # --- what changes

    def _take(self, node: int, option: Option) -> tuple[int, ...]:
        """The indices of the GPUs that the option takes on this node."""
        gpus, indices = self._gpus[node], []
        for old, new in zip(option.used, option.left, strict=True):
            index = next(i for i, gpu in enumerate(gpus) if gpu == old and i not in indices)
            gpus[index] = new
            indices.append(index)
        return tuple(indices)

    def _remember(self, asked: Request) -> None:
        """Compare mixes when the number of remembered requests has doubled, and later after as many as it keeps."""
        if self._fixed:
            return
        self._asked.append(asked)
        self._until_mix -= 1
        if self._until_mix <= 0:
            self._until_mix = len(self._asked)
            mix = Mix(self._asked)
            if mix.differs(self.mix) > ANOTHER_MIX:
                self.mix, self._known = mix, 0
                self._rankings.clear()

    def _join(self, node: int, room: Room) -> None:
        slot = self._slots.get(room)
        if slot is None:
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
        """Forget the rooms that no node has, and what is known of all; the ranks of the groups stay."""
        self._known = 0
        self._numbers = {}
        for ranking in self._rankings.values():
            ranking.known = {}
        for group in self._groups:
            if group is not None:
                group.number = self._numbers.setdefault(group.room, len(self._numbers))

    def _note(self, slot: int) -> None:
        self._changes.append(slot)
        if len(self._changes) > MOST_CHANGES:
            self._forgotten += len(self._changes)
            self._changes.clear()
