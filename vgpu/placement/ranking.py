"""The groups of a fleet in the order of their ranks for one request.

A room's rank never changes while the mix is the same. So a ranking keeps the groups by rank, with and without nodes. It
drops a group without nodes only when that group would be the best one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from vgpu.placement.state import Room

NOWHERE: Final = float("-inf")


@dataclass(slots=True)
class Group:
    """The nodes that have the same room."""

    room: Room
    number: int
    nodes: list[int] = field(default_factory=list)
    """Sorted; the first one is taken. A group without nodes has them again when its room comes back."""


@dataclass(slots=True)
class Ranking:
    """The ranks of the groups for one request. It knows groups by number."""

    seen: int = -1
    """How many of the fleet's rooms it has followed as they came; -1: it starts with all groups."""
    known: dict[int, float] = field(default_factory=dict)
    """The rank of each room that it has met."""
    queued: set[int] = field(default_factory=set)
    """The groups in ``_equal``, and those that do not take the request."""
    _equal: dict[float, list[int]] = field(default_factory=dict)
    """The groups of each negative rank."""
    _order: list[float] = field(default_factory=list)
    """A heap of the negative ranks."""

    def add(self, number: int, rank: float) -> None:
        self.queued.add(number)
        if rank == NOWHERE:
            return
        equal = self._equal.get(-rank)
        if equal is None:
            self._equal[-rank] = [number]
            heappush(self._order, -rank)
        else:
            equal.append(number)

    def best(self, groups: Sequence[Group]) -> Group | None:
        """The group of the highest rank; among equals the one with the lowest node."""
        order, equal = self._order, self._equal
        while order:
            numbers = equal[order[0]]
            present = [number for number in numbers if groups[number].nodes]
            if len(present) < len(numbers):
                self.queued.difference_update(numbers)
                self.queued.update(present)
            if present:
                equal[order[0]] = present
                if len(present) == 1:
                    return groups[present[0]]
                return min((groups[number] for number in present), key=_first)
            del equal[heappop(order)]
        return None

    def keep(self, groups: Iterable[Group]) -> None:
        """Begin again with these groups, each under its place as the new number; their ranks are known."""
        self.known = {
            place: self.known[group.number] for place, group in enumerate(groups) if group.number in self.known
        }
        self.seen = -1
        self.queued, self._equal, self._order = set(), {}, []


def _first(group: Group) -> int:
    return group.nodes[0]
