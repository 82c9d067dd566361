"""Swapped vGPUs of one group (--group) are on their GPUs all or none. Pure: the members' states in, a rule for one out.

Each GPU Server decides for its own GPU (``gpuserver/core/states/residency.py``). It knows its own member's state, and
the last state that each other server sent of its member. From these ``unite`` makes what ``residency`` needs:

    a gang wants       if any member does, and none is suspended
    a member may come  once all members on lower GPUs are granted: on their GPUs, or on the way. The first waits until
                       the others are ready, which could come at once; but not for longer than two stays, or twice
                       as long after each time that the others did not come
    it assembles       while it is there and others are yet to come: it does not make room, for ``ASSEMBLY_NS`` at most
    it must leave      if a lower member is not granted, or one that was there with it has left; or if a member is
                       suspended; or if others have not come for ``ASSEMBLY_NS``, and the gang wants nothing

Every gang takes GPUs in the order of their numbers. A member waits only for members on higher GPUs, and those wait
for vGPUs whose stays end: no gangs wait for each other in a circle (Havender, 1968). A gang's stay counts from the
moment when it was complete.

No rule depends on a message that must arrive. Each message is the whole state, and each rule is about the present
states and what this server saw itself (``Seen``). A server that is silent for ``LAPSE_NS`` binds no member: the
others are swapped without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpuserver.core.states.residency import stay_ns

ASSEMBLY_NS: Final = 60_000_000_000
LAPSE_NS: Final = 2_000_000_000
PATIENCE_MOST_NS: Final = 600_000_000_000


@dataclass(frozen=True, slots=True)
class MemberResidence:
    """The state of one swapped member.

    ``granted``: its memory is on the GPU, or on its way there. ``there``: all of it is there. ``wants``: its programs
    would use the GPU. ``suspended``: until a person or a trigger resumes it. ``able``: False while it could not come
    even if it were its turn. ``ready``: it could come at once. ``move_ns``: the time that one of its moves takes.
    """

    granted: bool = False
    there: bool = False
    wants: bool = False
    suspended: bool = False
    able: bool = True
    ready: bool = False
    move_ns: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What the server saw of the gang. ``gpus``: since the member here came, the members there were there with it, the
    last of them since ``complete_ns``. ``waits_ns``: since then the gang wants, and the member here is not granted.
    ``failures``: so often in a row the member here came, and others did not; the last time when it came at
    ``failed_ns``."""

    gpus: frozenset[int] = frozenset()
    complete_ns: int = 0
    waits_ns: int | None = None
    failures: int = 0
    failed_ns: int = 0


NOT_SEEN: Final = Seen()


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
    gpu_index: int, own: MemberResidence, others: Mapping[int, MemberResidence], seen: Seen, came_ns: int, now_ns: int
) -> tuple[GangResidence, Seen]:
    """``others``: by GPU, the members whose servers are known to live; ``came_ns``: when the member here came."""
    members = {**others, gpu_index: own}
    complete = all(member.there for member in members.values())
    suspended = any(member.suspended for member in members.values())
    wants = any(member.wants for member in members.values()) and not suspended
    late = now_ns >= came_ns + ASSEMBLY_NS
    seen = Seen(
        *_completed(seen, own, frozenset(others), complete, now_ns),
        _waits_ns(seen, own, wants, now_ns),
        *_failures(seen, complete, own.there and late, came_ns),
    )
    absent = [gpu for gpu in sorted(others) if not others[gpu].granted]
    able = all(others[gpu].able for gpu in absent)
    lower = all(gpu > gpu_index for gpu in absent)
    parted = any(gpu in seen.gpus for gpu in absent)
    move_ns = max(member.move_ns for member in members.values())
    patient = seen.waits_ns is None or now_ns < seen.waits_ns + patience_ns(stay_ns(move_ns), seen.failures)
    early = patient and len(absent) == len(others) and not all(others[gpu].ready for gpu in absent)
    residence = GangResidence(
        wants=wants,
        complete=complete,
        may_come=lower and able and not suspended and not early,
        assembling=own.there and not complete and wants and able and not late,
        must_leave=not lower or parted or suspended or bool(absent and late and not wants),
        since_ns=max(came_ns, seen.complete_ns),
        move_ns=move_ns,
        awaits=_awaits(gpu_index, own, others, absent, early=early),
    )
    return residence, seen


def patience_ns(stay_ns: int, failures: int) -> int:
    """How long the first member waits for the others to be ready."""
    return max(2 * stay_ns, min(PATIENCE_MOST_NS, 2 * stay_ns << min(failures, 10)))


def _completed(
    seen: Seen, own: MemberResidence, others: frozenset[int], complete: bool, now_ns: int
) -> tuple[frozenset[int], int]:
    if not own.there:
        return NOT_SEEN.gpus, NOT_SEEN.complete_ns
    if not complete or others <= seen.gpus:
        return seen.gpus, seen.complete_ns
    return seen.gpus | others, now_ns


def _failures(seen: Seen, complete: bool, failed: bool, came_ns: int) -> tuple[int, int]:
    """Each time that the member here comes counts once."""
    if complete:
        return NOT_SEEN.failures, NOT_SEEN.failed_ns
    if not failed or came_ns == seen.failed_ns:
        return seen.failures, seen.failed_ns
    return seen.failures + 1, came_ns


def _waits_ns(seen: Seen, own: MemberResidence, wants: bool, now_ns: int) -> int | None:
    if own.granted or not wants:
        return None
    return now_ns if seen.waits_ns is None else seen.waits_ns


def _awaits(
    gpu_index: int, own: MemberResidence, others: Mapping[int, MemberResidence], absent: list[int], *, early: bool
) -> str:
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
        if gpu < gpu_index or own.granted or (early and not others[gpu].ready):
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
