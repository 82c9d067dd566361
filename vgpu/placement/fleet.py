"""Many nodes. Nodes with the same room left are one group, so that a decision costs as much as there are groups.

For each different request the fleet keeps a ranking of the groups. A placement changes two groups. A request that comes
again ranks only the rooms that are new since. Requests of nearly the same size share a ranking.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from vgpu.placement.mix import Mix
from vgpu.placement.policies.base import AllowsAll, Policy
from vgpu.placement.ranking import NOWHERE, Group, Ranking
from vgpu.placement.state import ANY_CORES, Gpu, Kind, Option, Request, Room, given_back
from vgpu.share import PPM, Mode

REMEMBERED: Final = 16_384
"""Requests of late, which make the mix."""
ANOTHER_MIX: Final = 0.05
"""If a larger part of the requests differs, the fleet drops all ranks."""
MOST_RANKINGS: Final = 1024
MOST_CHANGES: Final = 1_000_000
MOST_KNOWN: Final = 2_000_000
"""New rooms, and their ranks in all rankings, until the fleet forgets the rooms that no node has."""


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
        self._allows = None if getattr(type(policy), "allows", None) is AllowsAll.allows else policy.allows
        self._alone = getattr(policy, "rank_alone", None) if self._allows is None else None
        self._group_of: list[Group] = []
        self._groups: list[Group] = []
        self._by_room: dict[Room, Group] = {}
        self._present: set[int] = set()
        """The groups that have nodes."""
        self._came: list[int] = []
        """Groups, each time when they had nodes again."""
        self._forgotten = 0
        self._rankings: dict[Request, Ranking] = {}
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
        node = len(self._group_of)
        self._group_of.append(self._join(node, room._replace(kind=kind, gpus=tuple(sorted(room.gpus)))))
        return node

    def room(self, node: int) -> Room:
        """What the node has left."""
        return self._group_of[node].room

    def place(self, asked: Request, *, node: int | None = None, again: bool = False) -> Placement | None:
        """Place the request, on ``node`` if that is given. None: no node has room, or the policy allows none; ``why``
        says which. ``again``: it was asked before, so the mix has it already."""
        if not again:
            self._remember(asked)
        group = self._chosen(asked) if node is None else self._group_of[node]
        option = None if group is None else self._option(group.room, asked)
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
        found = ((*self._best(group.room, asked), group) for group in self._used())
        able = [(rank, option, group) for rank, option, group in found if option is not None]
        best = nlargest(most, able, key=lambda one: (one[0], -one[2].nodes[0]))
        offers = [
            Offer(node, rank, self.policy.parts(option, self.mix))
            for rank, option, group in best
            for node in group.nodes[:most]
        ]
        return offers[:most]

    def why(self, asked: Request) -> str:
        """Why no node takes the request."""
        rooms = [group.room for group in self._used()]
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

    def _chosen(self, asked: Request) -> Group | None:
        best = self._ranking(asked.rounded_up).best(self._groups)
        if best is None and asked.rounded_up != asked:  # what is rounded up may not fit where the request does
            best = self._ranking(asked).best(self._groups)
        return best

    def _best(self, room: Room, asked: Request) -> tuple[float, Option | None]:
        best, found = NOWHERE, None
        for option in room.options(asked, self._allows):
            rank = self.policy.rank(option, self.mix)
            if rank > best:
                best, found = rank, option
        return best, found

    def _option(self, room: Room, asked: Request) -> Option | None:
        """The best placement of the request there."""
        if len(room.gpus) == 1 and self._is_simple(asked):
            return next(iter(room.options(asked, self._allows)), None)
        return self._best(room, asked)[1]

    def _is_simple(self, asked: Request) -> bool:
        """The request takes one GPU, of any node, under a policy that ranks such placements without an ``Option``."""
        return self._alone is not None and asked.gpus == 1 and not (asked.label or asked.models)

    def _rank(self, room: Room, asked: Request) -> float:
        """The rank of the best placement of the request there. The most frequent case takes no ``Option``: a simple
        request, and one GPU in temporal mode whose node has no other."""
        kind, gpus, cores, host_bytes = room
        if self._alone is None or len(gpus) != 1 or cores < ANY_CORES >> 1 or kind.mode is not Mode.TEMPORAL:
            return self._best(room, asked)[0]
        [gpu] = gpus
        time_ppm, memory_bytes = gpu.time_ppm - asked.area_ppm, gpu.memory_bytes - asked.memory_bytes
        if time_ppm < 0 or memory_bytes < 0 or asked.host_bytes > host_bytes:
            return NOWHERE
        return float(self._alone(kind, gpu, Gpu(time_ppm, memory_bytes, (), gpu.labels), self.mix))

    def _best_rank(self, room: Room, asked: Request) -> float:
        return self._best(room, asked)[0]

    def _ranking(self, asked: Request) -> Ranking:
        """With the rooms that are new since it was asked for last."""
        if self._known > MOST_KNOWN:
            self._forget()
        ranking = self._rankings.pop(asked, None) or Ranking()
        came = self._present
        if ranking.seen >= self._forgotten:
            came = came.intersection(self._came[ranking.seen - self._forgotten :])
        groups, known = self._groups, ranking.known
        ranked = self._rank if self._is_simple(asked) else self._best_rank
        for number in came - ranking.queued:
            rank = known.get(number)
            if rank is None:
                rank = known[number] = ranked(groups[number].room, asked)
                self._known += 1
            ranking.add(number, rank)
        ranking.seen = self._forgotten + len(self._came)
        self._rankings[asked] = ranking  # the last one again
        if len(self._rankings) > MOST_RANKINGS:
            del self._rankings[next(iter(self._rankings))]
        return ranking

    def _used(self) -> Iterator[Group]:
        return (group for group in self._groups if group.nodes)

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

    def _join(self, node: int, room: Room) -> Group:
        group = self._by_room.get(room)
        if group is None:
            group = self._by_room[room] = Group(room, len(self._groups))
            self._groups.append(group)
            self._known += 1
        if not group.nodes:
            self._present.add(group.number)
            self._came.append(group.number)
            if len(self._came) > MOST_CHANGES:
                self._forgotten += len(self._came)
                self._came.clear()
        insort(group.nodes, node)
        return group

    def _move(self, node: int, room: Room) -> None:
        group = self._group_of[node]
        del group.nodes[bisect_left(group.nodes, node)]
        if not group.nodes:
            self._present.remove(group.number)
        self._group_of[node] = self._join(node, room)

    def _forget(self) -> None:
        """Forget the rooms that no node has, and their ranks."""
        self._groups = list(self._used())
        for ranking in self._rankings.values():
            ranking.keep(self._groups)
        for number, group in enumerate(self._groups):
            group.number = number
        self._by_room = {group.room: group for group in self._groups}
        self._present = set(range(len(self._groups)))
        self._forgotten += len(self._came) + 1
        self._came.clear()
        self._known = 0
