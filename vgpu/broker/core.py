"""The broker's decisions: which process may attach, in which slot, and when a slot is free again.

This module uses no socket, no clock and no page.

Theory of operation
-------------------
A slot of the activity page belongs to one process from its admission until the driver has released its memory:

    free ──admit──▶ held ──died──▶ dead ──gone──▶ free

This module decides about ``admit``, and the shell carries it out (page, descriptors, watches). The slot's robust mutex
and the pidfd both report ``died``. The second report finds the slot dead, or in another process's hands, and changes
nothing. ``gone`` comes from the GPU Server, which reads NVML. A slot is therefore released exactly once per admission.

After a broker's death the next broker gets the list of slots from its GPU Server and ``adopt``s it. The broker does not
take that list from the page, because a tenant can write each word in it. A slot that the page shows in use, and that is
in no list, is ``set_aside`` for a while. Its process may have been admitted in the moment in which the broker died.
That process knocks again. It gets the slot if the page names the very process that the kernel reports as the peer.

A process has one slot at a time. A process may knock anew while it has a slot, for one of two reasons. It failed before
it took that slot, and gets the same one. Or it became another program (``exec``): the shell has then found its old slot
left, and has called ``died`` for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from vgpu.identity import Peer, Process
from vgpu.integrations.cgroups import Place
from vgpu.paths import VGPU_ID
from vgpu.protocol.broker import HOOK_VERSION, OBSERVER_SLOT, Adopt, Attach, Refused
from vgpu.units import counted

MAX_PROCESSES = 64  # of a vGPU; the page's own constant, checked against it when a page is mapped
CLOCK_SKEW_NS = 30_000_000_000  # no visitor waits this long; a larger difference is another time namespace


class SlotState(StrEnum):
    """The state of a slot that is not free: its process lives, or has died and the driver may still show it."""

    HELD = "held"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Admission:
    """Admit the process. ``slot`` −1: it is an observer, and gets the pages but no slot. ``known``: the process held
    this slot already. ``found``: the process held this slot, and no list had it. The slot stays as it is, and the
    broker watches it from now on."""

    slot: int
    known: bool
    found: bool = False


@dataclass(slots=True)
class _Slot:
    process: Process
    state: SlotState


class Asleep(Refused):
    """The vGPU is suspended. The process may be let in once it is resumed."""


class IllegalMove(Exception):
    """Our own fault: a slot was asked to do what its state does not allow. Nothing was changed."""


class Admissions:
    """The slots of one vGPU."""

    def __init__(self, capacity: int = MAX_PROCESSES) -> None:
        self._capacity = capacity
        self._slots: dict[int, _Slot] = {}
        self._aside: set[int] = set()
        self._returning: dict[Process, int] = {}
        self.removed = False

    def __len__(self) -> int:
        """Slots that are not free."""
        return len(self._slots)

    @property
    def alive(self) -> int:
        """Processes attached and not known to be dead."""
        return sum(slot.state is SlotState.HELD for slot in self._slots.values())

    def dead(self) -> Iterator[tuple[int, Process]]:
        """Slots that wait for the driver, lowest first."""
        for number, slot in sorted(self._slots.items()):
            if slot.state is SlotState.DEAD:
                yield number, slot.process

    def process_in(self, slot: int) -> Process | None:
        return self._slots[slot].process if slot in self._slots else None

    def slot_of(self, process: Process) -> int | None:
        """The slot that a living process holds."""
        for number, slot in self._slots.items():
            if slot.process == process and slot.state is SlotState.HELD:
                return number
        return None

    def held(self) -> Iterator[tuple[int, Process]]:
        """Slots of living processes, lowest first."""
        for number, slot in sorted(self._slots.items()):
            if slot.state is SlotState.HELD:
                yield number, slot.process

    def set_aside(self, slots: Iterable[int]) -> None:
        """Keep these slots from new processes: their own processes may come back for them."""
        self._aside = set(slots) - set(self._slots)

    @property
    def aside(self) -> frozenset[int]:
        return frozenset(self._aside)

    def give_up(self, slot: int) -> None:
        """No process came back for a slot that was set aside."""
        self._aside.discard(slot)

    def expect(self, returning: Mapping[Process, int]) -> None:
        """Take the processes of a page that is lost, with the slots that they had there. They may attach again,
        whichever user they run as now."""
        self._returning = dict(returning)

    def returning(self) -> Iterator[tuple[int, Process]]:
        """Expected processes that have not come back."""
        for process, slot in self._returning.items():
            yield slot, process

    def knock(
        self,
        attach: Attach,
        peer: Peer,
        vgpu: Adopt,
        now_ns: int,
        *,
        unused: bool = False,
        names: bool = False,
        mounted: bool = False,
    ) -> Admission | Refused:
        """Decide about one attach request. An admission with a new slot takes that slot at once.

        ``unused``: the slot that the process holds was never taken by its hook. ``names``: the page says that the slot
        it asks for is its own. ``mounted``: it came through the socket that only a mount leads to.
        """
        refused = self._refusal(attach, peer, vgpu, now_ns, mounted=mounted)
        if refused is not None:
            return refused
        if attach.role == "observer":
            return Admission(OBSERVER_SLOT, known=False)
        mine = self.slot_of(peer.process)
        if mine is not None and (attach.slot == mine or unused):
            return Admission(mine, known=True)
        if mine is not None:
            return Refused(
                code="unavailable",
                error=f"process {peer.process.pid} is in {vgpu.vgpu_id} already, and a process attaches once; "
                "start the program again",
            )
        if names and attach.slot in self._aside:
            self._take(attach.slot, peer.process)
            return Admission(attach.slot, known=False, found=True)
        if vgpu.suspended and attach.slot < 0:  # a process that had a slot in a lost page must be found again
            return Asleep(
                code="unavailable", error=f"{vgpu.vgpu_id} is suspended; vgpuctl resume {vgpu.vgpu_id} brings it back"
            )
        # A process that held a slot in a page that is lost (server and broker died together) gets its number again.
        wanted = [attach.slot] if 0 <= attach.slot < self._capacity else []
        for number in (*wanted, *range(self._capacity)):
            if number not in self._slots and number not in self._aside:
                self._take(number, peer.process)
                return Admission(number, known=False)
        return Refused(
            code="full",
            error=f"{vgpu.vgpu_id} has {counted(self._capacity, 'process')} already, its most; end one, or create "
            "another vGPU",
        )

    def _take(self, slot: int, process: Process) -> None:
        self._slots[slot] = _Slot(process, SlotState.HELD)
        self._aside.discard(slot)
        self._returning.pop(process, None)

    def knows(self, process: Process) -> bool:
        """Whether the process was admitted before. It may run as another user since then."""
        return process in self._returning or self.slot_of(process) is not None

    def _refusal(self, attach: Attach, peer: Peer, vgpu: Adopt, now_ns: int, *, mounted: bool) -> Refused | None:
        if attach.version != HOOK_VERSION:
            return Refused(
                code="version",
                error=f"the hook speaks version {attach.version}, {vgpu.vgpu_id} speaks {HOOK_VERSION}; "
                "install the hook of the node's release: vgpuctl hook install",
            )
        if self.removed:
            return Refused(code="removed", error=f"{vgpu.vgpu_id} is being removed; create another: vgpuctl create")
        if peer.process.pid == 0:
            return Refused(
                code="mode",
                error="the node runs in a PID namespace that does not contain this process; run the node on the host, "
                "or in a pod with hostPID: true",
            )
        if peer.process.start_time == 0:
            return Refused(code="unavailable", error=f"process {peer.process.pid} ended while it attached")
        if not mounted and not may_attach(peer, vgpu) and not (attach.role == "process" and self.knows(peer.process)):
            return Refused(
                code="not-yours",
                error=f"{vgpu.vgpu_id} belongs to uid {vgpu.owner_uid}, this process runs as uid {peer.uid}; "
                "create one of your own: vgpuctl create",
            )
        if attach.now_ns and abs(attach.now_ns - now_ns) > CLOCK_SKEW_NS:
            return Refused(
                code="mode",
                error="this process has a time namespace of its own, so leases cannot be compared with its clock; "
                "start the container without one",
            )
        return None

    def adopt(self, slot: int, process: Process, *, dead: bool) -> None:
        """Take over a slot from the server's list, which an earlier broker has given."""
        if slot in self._slots:
            raise IllegalMove(f"slot {slot} is held already")
        self._slots[slot] = _Slot(process, SlotState.DEAD if dead else SlotState.HELD)

    def died(self, slot: int, process: Process) -> bool:
        """``process`` of ``slot`` has died. True if this was the first report of it."""
        found = self._slots.get(slot)
        if found is None or found.process != process or found.state is SlotState.DEAD:
            return False
        found.state = SlotState.DEAD
        return True

    def gone(self, slot: int, process: Process) -> bool:
        """The driver no longer shows ``process``, and its memory was released: the slot is free. True if this was the
        first report of it."""
        if not self.awaits_release(slot, process):
            return False
        del self._slots[slot]
        return True

    def awaits_release(self, slot: int, process: Process) -> bool:
        """Whether ``slot`` is that of ``process``, and dead. ``IllegalMove`` if it still lives."""
        found = self._slots.get(slot)
        if found is None or found.process != process:
            return False
        if found.state is SlotState.HELD:
            raise IllegalMove(f"slot {slot}: process {process.pid} was called gone before it was known to be dead")
        return True


def company(vgpus: str, vgpu_id: str) -> tuple[str, ...]:
    """The vGPUs of a process, sorted, from its own list. Empty if that does not name ``vgpu_id`` and another one."""
    named = tuple(sorted({one for one in vgpus.split(",") if VGPU_ID.fullmatch(one)}))
    return named if len(named) > 1 and vgpu_id in named else ()


def gpu_full(vgpu: Adopt, processes: int) -> Refused:
    """The refusal where the MPS server of the GPU has no place left. All its places are in use, or the rest is kept for
    other vGPUs. ``processes``: of all vGPUs of the GPU."""
    full = f"GPU {vgpu.gpu_index} has {counted(vgpu.most_processes, 'process')} already, the most of its MPS server"
    if processes <= vgpu.most_processes:
        full = (
            f"GPU {vgpu.gpu_index} takes {counted(vgpu.most_processes, 'process')}, the most of its MPS server, and "
            f"those that are left are kept for other vGPUs than {vgpu.vgpu_id}"
        )
    return Refused(code="full", error=f"{full}; end one (vgpuctl ps), or use a GPU in temporal mode")


def is_foreign(place: Place, vgpu: Adopt) -> bool:
    """Whether a process that runs at ``place`` is in none of the pods whose processes the vGPU admits."""
    return vgpu.pods is not None and place.pod not in vgpu.pods


def foreign(place: Place, vgpu: Adopt) -> Refused:
    """The refusal of such a process."""
    where = f"in {place}" if place.pod else "in no pod"
    text = f"{vgpu.vgpu_id} is for the pods that have its claim, and this process runs {where}"
    return Refused(code="not-yours", error=f"{text}; let its pod claim a vGPU")


def may_attach(peer: Peer, vgpu: Adopt) -> bool:
    """The owner, the host's root, and the group it was shared with."""
    return peer.uid in {0, vgpu.owner_uid} or (vgpu.share_gid >= 0 and vgpu.share_gid in peer.groups)
