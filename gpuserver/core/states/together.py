"""Swapped vGPUs of one group (--group) are on their GPUs all or none. Pure: the members' states in, a rule for one out.

Each GPU Server decides for its own GPU (``gpuserver/core/states/residency.py``). It knows its own member's state, and
the last state that each other server sent of its member. From these ``unite`` makes what ``residency`` needs:

    a gang wants       if any member does, and none is suspended
    a member may come  once all members on lower GPUs are granted: on their GPUs, or on the way
    it assembles       while it is there and others are yet to come: it does not make room, for ``ASSEMBLY_NS`` at most
    it must leave      if a lower member is not granted, or one that was there with it has left; or if the gang is not
                       complete and wants nothing; or if a member is suspended

So every gang takes GPUs in the order of their numbers. A member waits only for members on higher GPUs, and those wait
for vGPUs whose stays end: no gangs wait for each other in a circle (Havender, 1968). A gang's stay counts from the
moment when it was complete.

No rule depends on a message that must arrive. Each message is the whole state, and each rule is about the present
states and what this server saw itself (``Completed``). A server that is silent for ``LAPSE_NS`` binds no member: the
others are swapped without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ASSEMBLY_NS: Final = 60_000_000_000
LAPSE_NS: Final = 2_000_000_000


@dataclass(frozen=True, slots=True)
class MemberResidence:
    """The state of one swapped member.

    ``granted``: its memory is on the GPU, or on its way there. ``there``: all of it is there. ``wants``: its programs
    would use the GPU. ``suspended``: until a person or a trigger resumes it. ``able``: False while it could not come
    even if it were its turn. ``move_ns``: the time that one of its moves takes.
    """

    granted: bool = False
    there: bool = False
    wants: bool = False
    suspended: bool = False
    able: bool = True
    move_ns: int = 0


@dataclass(frozen=True, slots=True)
class Completed:
    """Since the member here came: the GPUs whose members were there with it, and when the last of them came."""

    gpus: frozenset[int] = frozenset()
    since_ns: int = 0


NOT_COMPLETED: Final = Completed()


@dataclass(frozen=True, slots=True)
class GangResidence:
    """What holds for the member here. ``since_ns``: its stay counts from then on; ``move_ns``: the longest move of a
    member. ``awaits``: why the gang waits, if that is another member's doing."""

    wants: bool
    complete: bool
    may_come: bool
    assembling: bool
    must_leave: bool
    since_ns: int
    move_ns: int
    awaits: str = ""


def unite(
    gpu_index: int,
    own: MemberResidence,
    others: Mapping[int, MemberResidence],
    completed: Completed,
    came_ns: int,
    now_ns: int,
) -> tuple[GangResidence, Completed]:
    """``others``: by GPU, the members whose servers are known to live; ``came_ns``: when the member here came."""
    members = {**others, gpu_index: own}
    complete = all(member.there for member in members.values())
    completed = _seen(completed, own, frozenset(others), complete, now_ns)
    absent = [gpu for gpu in sorted(others) if not others[gpu].granted]
    suspended = any(member.suspended for member in members.values())
    wants = any(member.wants for member in members.values()) and not suspended
    able = all(others[gpu].able for gpu in absent)
    lower = all(gpu > gpu_index for gpu in absent)
    parted = any(gpu in completed.gpus for gpu in absent)
    late = now_ns >= came_ns + ASSEMBLY_NS
    residence = GangResidence(
        wants=wants,
        complete=complete,
        may_come=lower and able and not suspended,
        assembling=own.there and not complete and wants and able and not late,
        must_leave=not lower or parted or suspended or bool(absent and late and not wants),
        since_ns=max(came_ns, completed.since_ns),
        move_ns=max(member.move_ns for member in members.values()),
        awaits=_awaits(gpu_index, own, others, absent),
    )
    return residence, completed


def _seen(completed: Completed, own: MemberResidence, others: frozenset[int], complete: bool, now_ns: int) -> Completed:
    if not own.there:
        return NOT_COMPLETED
    if not complete or others <= completed.gpus:
        return completed
    return Completed(completed.gpus | others, now_ns)


def _awaits(gpu_index: int, own: MemberResidence, others: Mapping[int, MemberResidence], absent: list[int]) -> str:
    """Empty: no other member is in the way."""
    if not any(member.wants for member in (own, *others.values())):
        return ""
    for gpu in sorted(others):
        if others[gpu].suspended:
            return f"the vGPU of its group on GPU {gpu} is suspended"
    for gpu in absent:
        if not others[gpu].able:
            return f"the vGPU of its group on GPU {gpu} cannot come to that GPU now"
    for gpu in absent:
        if gpu < gpu_index or own.granted:
            return f"the vGPU of its group on GPU {gpu} has no room yet"
    for gpu in sorted(others):
        if own.there and not others[gpu].there:
            return f"the vGPU of its group on GPU {gpu} is on its way to that GPU"
    return ""


class Members:
    """The last state of each member on another GPU, by gang."""

    def __init__(self) -> None:
        self._received: dict[int, tuple[int, Mapping[str, MemberResidence]]] = {}

    def receive(self, gpu_index: int, members: Mapping[str, MemberResidence], now_ns: int) -> None:
        """The server of GPU ``gpu_index`` has sent the states of all its swapped members."""
        self._received[gpu_index] = now_ns, members

    def of(self, gang: str, now_ns: int) -> dict[int, MemberResidence]:
        """By GPU, those whose servers were not silent for ``LAPSE_NS``."""
        return {
            gpu: members[gang]
            for gpu, (received_ns, members) in self._received.items()
            if gang in members and now_ns < received_ns + LAPSE_NS
        }
