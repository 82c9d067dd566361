"""Which swapped vGPUs have their memory on the GPU (--oversubscribe swap). Pure: figures in, moves out.

Each such vGPU may own as much memory as the GPU has; together they own more. So their memory is on the GPU by turns,
and the vGPUs on the GPU share its compute as ever. A vGPU that is swapped out and wants the GPU waits in line: by
class, then by the time that it has waited. Only the first of the line is served, even where a later one would fit, so
that no wait is without end. The vGPUs that need their memory least make room for it:

    1. a vGPU that wants nothing, the longest first (least recently needed),
    2. then a vGPU that has had its stay: it came before the others, at least ``stay_ns`` ago.

A vGPU begins to come as soon as those in its way leave: chunk for chunk it gets what they have given up (``admit``).
Memory that is swapped out is in a store of the vGPU's user. All stores together are bounded, and the memory of all
vGPUs fits GPU and stores: an allocation beyond that is hopeless (``spare_bytes``). A vGPU may not take what it is
offered, for example because its program was stopped. It is then passed over for a while (``patience_ns``), longer each
time.

A stay is long enough to pay for itself: ``STAY_FACTOR`` times what the vGPU's moves take, and not less than
``STAY_LEAST_NS``. Memory that is promised to other vGPUs, or borrowed, may leave less room than those on the GPU take.
Some have to leave at once then.

The vGPUs of a group are on their GPUs all or none (``gpuserver/core/states/together.py``). One of them may have to wait
for the others before it comes, may stay until they are there, and leaves where another one has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpuserver.core.scheduler.leases import VgpuIndex
from vgpu.packing.lending import UNBOUNDED
from vgpu.share import Priority

STAY_FACTOR: Final = 8
"""Of a stay and the two moves around it, the moves take a fifth of the time."""
STAY_LEAST_NS: Final = 1_000_000_000
PASSING_BYTES: Final = 64 << 20
"""So much of GPU and store stays empty for vGPUs that pass each other: two chunks."""
STORE_SLACK_BYTES: Final = PASSING_BYTES + (128 << 20)
"""A store has that much more than is swapped out at the most: room to pass, and the rest of a segment."""
AGAIN_LEAST_NS: Final = 1_000_000_000
AGAIN_MOST_NS: Final = 60_000_000_000


@dataclass(frozen=True, slots=True)
class Tenant:
    """A vGPU whose memory can leave the GPU.

    ``resident``: its memory (``memory_bytes``) is on the GPU. ``moving``: on its way, out if ``resident``. ``wants``:
    it would use the GPU if it could, since ``wants_ns``; while it wants nothing, that is when it last did.
    ``room_bytes``: an allocation waits for so much more. ``user``: the owner of the store that its memory leaves for.
    ``pinned``: it cannot be moved now. ``came_ns``, ``left_ns``: when it came onto the GPU, and left it. ``move_ns``:
    the time that one of its moves takes. ``stray_bytes``: memory of a swapped-out vGPU that is on the GPU all the same,
    because a move was not completed. Of a vGPU whose group is swapped with it: ``may_come``: False while it is
    not in line, because others come first; ``assembling``: it makes no room, because others are on their way to theirs;
    ``must_leave``: whether or not its room is needed.
    """

    key: VgpuIndex
    resident: bool
    memory_bytes: int
    wants: bool
    wants_ns: int
    moving: bool = False
    room_bytes: int = 0
    user: int = 0
    pinned: bool = False
    came_ns: int = 0
    left_ns: int = 0
    move_ns: int = 0
    stray_bytes: int = 0
    priority: Priority = Priority.NORMAL
    may_come: bool = True
    assembling: bool = False
    must_leave: bool = False

    @property
    def need_bytes(self) -> int:
        """The room that others have to make for it."""
        return self.room_bytes if self.resident else self.memory_bytes - self.stray_bytes + self.room_bytes

    @property
    def taken_bytes(self) -> int:
        """What it has on the GPU, or will have as soon as it begins to come."""
        return self.memory_bytes if self.resident or self.moving else self.stray_bytes

    @property
    def waits(self) -> bool:
        if self.moving or self.pinned:
            return False
        return self.room_bytes > 0 or (self.wants and not self.resident)

    @property
    def waits_ns(self) -> int:
        """Since when it waits. A vGPU that has just had a stay is the last of the line, however long it has wanted."""
        return self.wants_ns if self.resident else max(self.wants_ns, self.left_ns)

    @property
    def stay_ns(self) -> int:
        return stay_ns(self.move_ns)


@dataclass(frozen=True, slots=True)
class Moves:
    """``leave`` and ``come``: vGPUs whose move begins now. ``hopeless``: vGPUs that want more than there is room for.
    ``offered``: vGPUs that wait for room that is there."""

    leave: tuple[VgpuIndex, ...] = ()
    come: tuple[VgpuIndex, ...] = ()
    hopeless: tuple[VgpuIndex, ...] = ()
    offered: tuple[VgpuIndex, ...] = ()


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The bound of all swapped-out memory. ``kept_bytes``: by user, what the store has and no other user can have."""

    limit_bytes: int = UNBOUNDED
    kept_bytes: Mapping[int, int] = field(default_factory=dict)


NO_BOUNDS: Final = HostMemory()


def stay_ns(move_ns: int) -> int:
    """How long a vGPU stays on the GPU though others wait. ``move_ns``: the time that one of its moves takes."""
    return max(STAY_LEAST_NS, STAY_FACTOR * move_ns)


def patience_ns(failures: int) -> int:
    """How long a vGPU is not asked to move again that has not done so, so many times in a row."""
    return min(AGAIN_MOST_NS, AGAIN_LEAST_NS << min(failures - 1, 10))


def usable_bytes(room_bytes: int, short_bytes: int, tenants: Iterable[Tenant]) -> int:
    """The room, less what the driver has lately refused. The largest tenant may still try for the room by itself, with
    the allocation for which it waits."""
    largest = max((t.memory_bytes + t.room_bytes for t in tenants), default=0)
    return max(room_bytes - short_bytes, min(room_bytes, largest))


def spare_bytes(tenants: Sequence[Tenant], room_bytes: int, host: HostMemory) -> dict[VgpuIndex, int]:
    """How much more memory each can own at the very most, as things stand; below 0 where it does not fit already.

    GPU and store count together: a vGPU that comes frees room in the store, and the next of the same user takes it as
    it leaves. Other users cannot take that room, since a store gives nothing back while its user has programs. Where
    several users own memory, each store needs room for all that its user owns, unless the GPU has room for the memory
    of all. Reason: a swapped-out vGPU could otherwise wait for ever for a resident one that cannot leave.
    """
    owned: dict[int, int] = {}
    for t in tenants:
        owned[t.user] = owned.get(t.user, 0) + t.memory_bytes
    needs = {user: bytes_ + STORE_SLACK_BYTES if bytes_ else 0 for user, bytes_ in owned.items()}
    needs |= {user: max(bytes_, needs.get(user, 0)) for user, bytes_ in host.kept_bytes.items()}
    all_owned, needed = sum(owned.values()), sum(needs.values())
    spare: dict[VgpuIndex, int] = {}
    for t in tenants:
        store = host.limit_bytes - (needed - needs[t.user])
        if owned[t.user] == all_owned:
            left = room_bytes + max(0, store - PASSING_BYTES) - all_owned
        else:
            left = room_bytes - all_owned
            if host.kept_bytes.get(t.user, 0) <= store:
                left = max(left, store - STORE_SLACK_BYTES - owned[t.user])
        spare[t.key] = min(room_bytes - t.memory_bytes, left)
    return spare


def is_hopeless(tenant: Tenant, spare_bytes: int, room_bytes: int) -> bool:
    """Whether it waits in vain. Memory that is owned already gets its room by turns."""
    return tenant.room_bytes > spare_bytes if tenant.room_bytes else tenant.memory_bytes > room_bytes


def decide(
    tenants: Sequence[Tenant], room_bytes: int, now_ns: int, host: HostMemory = NO_BOUNDS, short_bytes: int = 0
) -> Moves:
    """``room_bytes``: what all of them may have on the GPU together; ``host``: the bounds of the stores.
    ``short_bytes``: what the driver seems to keep of the room. Others leave for it, but it makes no wait hopeless.

    Memory of a leaving vGPU counts as taken until it has left, and that of a coming one as soon as its move begins.
    """
    parting = [t for t in tenants if t.must_leave and t.resident and not (t.moving or t.pinned)]
    if parting:
        keys = tuple(t.key for t in parting)
        rest = [replace(t, moving=True) if t in parting else t for t in tenants]
        moves = decide(rest, room_bytes, now_ns, host, short_bytes)
        return replace(moves, leave=(*keys, *moves.leave))
    taken = sum(t.taken_bytes for t in tenants)
    going = sum(t.memory_bytes for t in tenants if t.resident and t.moving)
    free = usable_bytes(room_bytes, short_bytes, tenants) - taken
    here = [t for t in tenants if t.resident and not t.moving and not t.pinned]
    line = in_line(tenants)
    spare = spare_bytes(tenants, room_bytes, host)
    hopeless = tuple(t.key for t in line if is_hopeless(t, spare[t.key], room_bytes))
    if free + going < 0:
        leaving = enough(least_needed_first(here, ()), -(free + going))
        return Moves(leave=tuple(t.key for t in leaving), hopeless=hopeless)
    in_vain = frozenset(hopeless)
    line = [t for t in line if t.key not in in_vain and (t.resident or t.may_come)]
    if not line:
        return Moves(hopeless=hopeless)
    first = line[0]
    missing = first.need_bytes - free - going
    come = () if first.resident else (first.key,)  # a resident vGPU takes the room by itself
    if missing <= 0:  # the room is there, or is being made
        offered = (first.key,) if first.resident and first.need_bytes <= free else ()
        return Moves(come=come, hopeless=hopeless, offered=offered)
    others = [t for t in here if t is not first]
    ready = [t for t in least_needed_first(others, line) if is_free_to_go(t, now_ns)]
    leaving = enough(ready, missing)
    if sum(t.memory_bytes for t in leaving) < missing:
        return Moves(hopeless=hopeless)  # no use before more of them have had their stay
    return Moves(tuple(t.key for t in leaving), come, hopeless)


def could_come(
    key: VgpuIndex,
    tenants: Sequence[Tenant],
    room_bytes: int,
    now_ns: int,
    host: HostMemory = NO_BOUNDS,
    short_bytes: int = 0,
) -> bool:
    """Whether it would begin to come now, if it wanted to and might."""
    asked = [replace(t, wants=True, may_come=True) if t.key == key else t for t in tenants]
    return key in decide(asked, room_bytes, now_ns, host, short_bytes).come


@dataclass(frozen=True, slots=True)
class Arrival:
    """A vGPU on its way onto the GPU: it has ``here_bytes`` of its ``memory_bytes`` there, and its last allowance was
    ``allowed_bytes``."""

    key: VgpuIndex
    memory_bytes: int
    here_bytes: int
    allowed_bytes: int = 0


def admit(arrivals: Sequence[Arrival], others_bytes: int, room_bytes: int) -> dict[VgpuIndex, int]:
    """How much each may have on the GPU by now, in the order in which they began. An allowance is never reduced: the
    memory may be there. ``others_bytes``: what vGPUs have on the GPU that are not on their way to it."""
    allowed = {a.key: max(a.here_bytes, a.allowed_bytes) for a in arrivals}
    left = room_bytes - others_bytes - sum(allowed.values())
    for a in arrivals:
        grown = max(0, min(left, a.memory_bytes - allowed[a.key]))
        allowed[a.key] += grown
        left -= grown
    return allowed


def least_used_first(used: Mapping[VgpuIndex, tuple[bool, int]]) -> list[VgpuIndex]:
    """The order in which vGPUs on the GPU lose their copies in a store that is too small. ``used``: whether each wants
    the GPU, and when it last did, ns."""
    return sorted(used, key=lambda key: (*used[key], key))


def in_line(tenants: Iterable[Tenant]) -> list[Tenant]:
    """The vGPUs that wait, in the order in which they are served."""
    return sorted((t for t in tenants if t.waits), key=lambda t: (-t.priority, t.waits_ns, t.key))


def is_free_to_go(tenant: Tenant, now_ns: int) -> bool:
    if tenant.assembling:
        return False
    return not (tenant.wants or tenant.room_bytes) or now_ns >= tenant.came_ns + tenant.stay_ns


def least_needed_first(here: Iterable[Tenant], line: Sequence[Tenant]) -> list[Tenant]:
    """Those on the GPU; the ones that wait in ``line`` for more room are the last."""
    waiting = {t.key for t in line}
    return sorted(
        here,
        key=lambda t: (t.key in waiting, t.wants, t.priority, t.came_ns if t.wants else t.wants_ns, t.key),
    )


def enough(candidates: Iterable[Tenant], missing: int) -> list[Tenant]:
    """The first candidates that have ``missing`` bytes together; all of them, if they have less."""
    chosen: list[Tenant] = []
    for tenant in candidates:
        if missing <= 0:
            break
        if tenant.memory_bytes:
            chosen.append(tenant)
            missing -= tenant.memory_bytes
    return chosen
