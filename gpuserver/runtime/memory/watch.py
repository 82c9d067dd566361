"""Compares the driver's figures for memory with the ledgers. It charges implicit memory and releases the dead.

Implicit memory (contexts, modules, stacks) cannot be refused. It is what NVML shows for a process beyond the process's
ledger, and it narrows what the vGPU may still allocate. A program with a new context requests a reading, and waits
until the page shows that there was one. The memory of a dead process is released once the driver no longer shows the
process. What the process shared stays charged until its importers have let it go (sharing.py). The watch reads NVML
every 10 ms while a program waits for a reading or a dead process holds memory, else once a second.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from cython_ext.readings import DEVICE, SlotReading, SlotState, Where
from gpuserver.device.base import Device, MemoryUse
from gpuserver.runtime.memory.outside import (
    UnmanagedProcess,
    committed_by_pid,
    drift_by_pid,
    outsiders,
    sentence,
    unhooked_by_pid,
    unhooked_sentence,
)
from gpuserver.runtime.memory.sharing import Left, importers, only_shared, shared_bytes, without_imports
from gpuserver.runtime.vgpus import NO_LEDGER, Ledger, Vgpu
from vgpu.errors import VgpuError
from vgpu.event_types import EventType
from vgpu.identity import Process
from vgpu.loggers import get_logger
from vgpu.protocol.peer import is_alive
from vgpu.units import format_bytes

log = get_logger(__name__)

CALM_S: Final = 1.0
FRESH_S: Final = 0.1  # after an attach: its contexts and modules appear now
FRESH_FOR_S: Final = 3.0
URGENT_S: Final = 0.01  # the watch asks the driver no more often than that
URGENT_FOR_S: Final = 2.0  # a driver that takes longer to let go (large memory) is asked less often
WAITED_S: Final = 1.0  # so long a program waits for its context to be charged (hook/memory/implicit.pyx)
ASK_AGAIN_S: Final = 1.0  # a broker that was asked to release answers within milliseconds, or was replaced
BACK_S: Final = 15.0
"""Programs whose server and broker both died try to attach once a second. On a busy machine they took ten seconds.
Until then the watch reports no process as an outsider."""
AGAIN_S: Final = 0.02  # after a reading during which something was allocated or freed; doubled if it is again
FALL_S: Final = 0.5  # a driver that gives much memory back passes through every lower figure on its way
REFRESH_S: Final = 1.0
NO_USE: Final = MemoryUse(0, {})


@dataclass(slots=True)
class Dead:
    """A process that the driver may still show."""

    vgpu: Vgpu
    slot: int
    process: Process
    since: float
    asked: float = float("-inf")
    holders: frozenset[Process] | None = None
    """The processes that have memory which it shared; None: not read yet."""
    kept: bool = False
    """Nothing but that is charged any more."""


@dataclass(frozen=True, slots=True)
class Fall:
    """Readings of one process that say less than is charged: since when, and the most that one of them said."""

    since: float
    most: int


class MemoryWatch:
    """``latest`` is the last reading. ``implicit`` has the last figure per (vGPU id, pid). ``drift`` has what a ledger
    says beyond the driver's figure, where that is much. ``outside`` has the processes in no vGPU. ``notice`` records an
    event about each of the latter two, once: kind, vGPU, sentence, pid. ``judge`` gets the processes outside and those
    inside after each reading."""

    def __init__(
        self,
        gpu: Device,
        vgpus: Callable[[], Iterable[Vgpu]],
        release: Callable[[Vgpu, int, Process, bool], Awaitable[bool]],
        notice: Callable[[EventType, Vgpu | None, str, int], None],
        mps_pid: Callable[[], int | None] = lambda: None,
        judge: Callable[[Sequence[UnmanagedProcess], Mapping[int, str]], Awaitable[None]] | None = None,
    ) -> None:
        self._gpu = gpu
        self._vgpus = vgpus
        self._release = release
        self._dead: dict[tuple[str, int], Dead] = {}
        self._fresh_until = 0.0
        self._waited_until = 0.0
        self._back_by = 0.0
        self._wake = trio.Event()
        self._asked = 0
        """How often the driver was asked, whether it answered or not."""
        self._asking = False
        self._answered = trio.Event()
        self._notice = notice
        self._mps_pid = mps_pid
        self._judge = judge
        self._inside: dict[int, str] = {}
        self._suspects: frozenset[Process] = frozenset()
        """Outside in the last reading. A process that attaches at that moment may be outside in one reading."""
        self._doubted: frozenset[tuple[str, int]] = frozenset()
        """The processes whose ledger said too much in the last reading."""
        self.latest = NO_USE
        self._left: list[Left] = []
        self._shown: Mapping[int, int] = {}
        """The same per process, without memory that others are charged with."""
        self.readings = 0
        """Of the driver, since this server began."""
        self.implicit: dict[tuple[str, int], int] = {}
        self.least_context_bytes = 0
        """The least that a program took beside what it allocated, twice in a row: its context. 0: none was seen."""
        self.drift: dict[tuple[str, int], int] = {}
        self._unhooked: dict[tuple[str, int], bool] = {}
        """Hooked processes with memory past the hook in the last reading: whether an event has reported that."""
        self.outside: tuple[UnmanagedProcess, ...] = ()
        self._past_read: dict[tuple[str, int], int] = {}
        self._read: dict[tuple[str, int], int] = {}
        """What the last reading, and this one, say is implicit."""
        self._falls: dict[tuple[str, int], Fall] = {}
        """Of the processes whose last readings said less than is charged."""
        self._past_peak: dict[tuple[str, int], int] = {}
        self._peak: dict[tuple[str, int], int] = {}
        """The most that it has been: while a process is suspended the driver shows nothing of it."""
        self._past_ledgers: Mapping[str, Ledger] = {}
        """As they were after the last reading."""
        self._uncertain = False
        self._again_s = AGAIN_S

    def expect_growth(self) -> None:
        """A process attached: its implicit memory appears within the next moments."""
        self._fresh_until = trio.current_time() + FRESH_FOR_S
        self._wake.set()

    def look(self) -> None:
        """A program has a new context, and waits until it is charged."""
        self._waited_until = trio.current_time() + WAITED_S
        self._wake.set()

    def died(self, vgpu: Vgpu, slot: int, process: Process) -> bool:
        """Watch until the driver releases the process. False: known already. A broker repeats an unanswered message."""
        known = self._dead.get((vgpu.record.vgpu_id, slot))
        if known is not None and known.process == process:
            return False
        self._dead[vgpu.record.vgpu_id, slot] = Dead(vgpu, slot, process, trio.current_time())
        self._wake.set()
        return True

    def reaped(self, vgpu: Vgpu, slot: int) -> Process | None:
        """The broker has given the slot back. Returns the slot's process; None: known already."""
        dead = self._dead.pop((vgpu.record.vgpu_id, slot), None)
        return None if dead is None else dead.process

    def forget(self, vgpu: Vgpu) -> None:
        """The vGPU was removed. What it has shared with others stays on the card until they have let it go."""
        shared, uid = shared_bytes(vgpu.slots), vgpu.record.owner.uid
        holders = frozenset[Process]().union(
            *(importers(other.slots) for other in self._vgpus() if other is not vgpu and other.record.owner.uid == uid)
        )
        if shared and holders:
            self._left.append(Left(uid, shared, holders))
        for key in [key for key in self._dead if key[0] == vgpu.record.vgpu_id]:
            del self._dead[key]

    async def refresh(self) -> None:
        """Return once the driver was asked after this call, or does not answer in time."""
        wanted = self._asked + (2 if self._asking else 1)
        with trio.move_on_after(REFRESH_S):
            while self._asked < wanted:
                self._wake.set()
                await self._answered.wait()

    async def run(self) -> None:
        silent = False
        self._back_by = trio.current_time() + BACK_S
        while True:
            self._wake = trio.Event()
            soonest = trio.current_time() + URGENT_S
            before = {vgpu.record.vgpu_id: vgpu.ledger for vgpu in self._vgpus()}
            begun_ns = time.monotonic_ns()
            self._asking = True
            try:
                self.latest = await trio.to_thread.run_sync(self._gpu.memory_use)
                silent = False
                self._compare(before, begun_ns)
                self.readings += 1
                if self._judge is not None:
                    await self._judge(self.outside, self._inside)
            except VgpuError as error:
                if silent:
                    self._answer_blindly(before, begun_ns)
                else:
                    log.warning("no memory reading", reason=str(error))
                silent = self._uncertain = True
                self.latest = MemoryUse(self.latest.used_bytes, self._alive_by_proc())
            self._asking, self._asked = False, self._asked + 1
            answered, self._answered = self._answered, trio.Event()
            answered.set()
            await self._release_dead()
            with trio.move_on_after(self._interval()):
                await self._wake.wait()
            await trio.sleep_until(soonest)

    def _compare(self, before: Mapping[str, Ledger], begun_ns: int) -> None:
        """The driver's figures, asked for at ``begun_ns``, with the ledgers of a moment ago and of now."""
        past, self.implicit = self.implicit, {}
        after = {vgpu.record.vgpu_id: vgpu.ledger for vgpu in self._vgpus()}
        self._past_read, self._read = self._read, {}
        self._past_peak, self._peak = self._peak, {}
        doubted: dict[tuple[str, int], int] = {}
        self._uncertain = False
        self._forget_left(after)
        self._shown = self._without_imports(after)
        for vgpu in self._vgpus():
            vgpu_id = vgpu.record.vgpu_id
            if not vgpu.quiesced:  # the driver shows nothing of suspended processes
                mine = {slot.pid for slot in after[vgpu_id].slots}
                vgpu.driver_bytes = {pid: amount for pid, amount in self.latest.by_pid.items() if pid in mine}
            earlier, later = before.get(vgpu_id, NO_LEDGER), after[vgpu_id]
            if self._charge_implicit(vgpu, earlier, later, past) and later.known:
                vgpu.grants.implicit_ns = begun_ns
            if earlier.rests_until(later):
                found = drift_by_pid(earlier.slots, later.slots, self.latest.by_pid)
                doubted |= {(vgpu_id, pid): amount for pid, amount in found.items()}
        self._past_ledgers = after
        self._tell_drift(doubted)
        self._tell_unhooked()
        self._find_outsiders([*before.values(), *after.values()])

    @property
    def left_bytes(self) -> int:
        """What removed vGPUs have shared, and others hold."""
        return sum(one.bytes_ for one in self._left)

    def _forget_left(self, ledgers: Mapping[str, Ledger]) -> None:
        if all(ledger.known for ledger in ledgers.values()):
            now = frozenset[Process]().union(*(importers(ledger.slots) for ledger in ledgers.values()))
            self._left = [one for one in self._left if one.holders & now]

    def _without_imports(self, ledgers: Mapping[str, Ledger]) -> Mapping[int, int]:
        slots: dict[int, list[SlotReading]] = {}
        for vgpu in self._vgpus():
            slots.setdefault(vgpu.record.owner.uid, []).extend(ledgers[vgpu.record.vgpu_id].slots)
        shown: Mapping[int, int] = self.latest.by_pid
        for uid, mine in slots.items():
            if any(slot.imported_bytes for slot in mine):
                shared = shared_bytes(mine) + sum(one.bytes_ for one in self._left if one.uid == uid)
                shown = without_imports(shown, mine, shared, self.least_context_bytes)
        return shown

    def _answer_blindly(self, before: Mapping[str, Ledger], begun_ns: int) -> None:
        """The driver has failed twice in a row, so no program waits for a reading. The last figures still count."""
        for vgpu in self._vgpus():
            vgpu.driver_bytes = None
            if before.get(vgpu.record.vgpu_id, NO_LEDGER).known:
                vgpu.grants.implicit_ns = begun_ns

    def _tell_drift(self, doubted: Mapping[tuple[str, int], int]) -> None:
        """Report processes that the last two readings doubted."""
        known, self.drift = self.drift, {name: doubted[name] for name in doubted.keys() & self._doubted}
        self._doubted = frozenset(doubted)
        for vgpu in self._vgpus():
            for (vgpu_id, pid), amount in self.drift.items():
                if vgpu_id == vgpu.record.vgpu_id and (vgpu_id, pid) not in known:
                    text = f"process {pid} says that it owns {format_bytes(amount)} more than the driver shows"
                    self._notice(EventType.DRIFT, vgpu, text, pid)

    def _tell_unhooked(self) -> None:
        """Report each process once, in the second reading that shows it. No more happens to it: it is in its vGPU."""
        before, self._unhooked = self._unhooked, {}
        for vgpu in self._vgpus():
            vgpu_id, used, limit = vgpu.record.vgpu_id, vgpu.used_bytes, vgpu.record.memory_limit_bytes
            mine = {slot.pid for slot in vgpu.slots}
            implicit = {pid: n for (owner, pid), n in self.implicit.items() if owner == vgpu_id and pid in mine}
            for pid, amount in unhooked_by_pid(implicit, used, limit).items():
                self._unhooked[vgpu_id, pid] = (vgpu_id, pid) in before
                if before.get((vgpu_id, pid)) is False:
                    self._notice(EventType.UNMANAGED, vgpu, unhooked_sentence(pid, amount, used, limit), pid)

    def _find_outsiders(self, ledgers: Sequence[Ledger]) -> None:
        """Report nothing while a broker is away or has just come back: the list of its processes is incomplete."""
        if trio.current_time() < self._back_by or any(not ledger.known for ledger in ledgers):
            return
        inside = {slot.pid for ledger in ledgers for slot in ledger.slots}
        self._inside = {slot.pid: vgpu.record.vgpu_id for vgpu in self._vgpus() for slot in vgpu.slots}
        # Processes in the journal count, too: they may not have come back to a new broker yet.
        inside |= {process.pid for vgpu in self._vgpus() for process in vgpu.programs}
        found = outsiders(self.latest.by_pid, inside, self._mps_pid())
        known = {outsider.process for outsider in self.outside}
        self.outside = tuple(outsider for outsider in found if outsider.process in self._suspects)
        self._suspects = frozenset(outsider.process for outsider in found)
        for outsider in self.outside:
            if outsider.process not in known:
                self._notice(EventType.OUTSIDE, None, sentence(outsider), outsider.process.pid)

    def _interval(self) -> float:
        now = trio.current_time()
        again_s = self._again_s if self._uncertain else CALM_S
        self._again_s = min(2 * self._again_s, CALM_S) if self._uncertain else AGAIN_S
        awaited = [dead for dead in self._dead.values() if not dead.kept]
        if any(now - dead.since < URGENT_FOR_S for dead in awaited):
            return URGENT_S
        if self._uncertain and now < self._waited_until:
            return URGENT_S
        return min(again_s, FRESH_S if awaited or now < self._fresh_until else CALM_S)

    def _alive_by_proc(self) -> dict[int, int]:
        """Without NVML, the dead processes that /proc still shows. Without figures nothing is charged."""
        return {dead.process.pid: 0 for dead in self._dead.values() if is_alive(dead.process)}

    def _charge_implicit(self, vgpu: Vgpu, earlier: Ledger, later: Ledger, past: Mapping[tuple[str, int], int]) -> bool:
        """Whether all that the driver showed is charged. If a program allocated or freed during the reading, the figure
        fits neither ledger. Then the last figure still counts, as far as either ledger allows, and another reading
        follows soon. A process that is stopped in the middle of an allocation gets no better reading."""
        vgpu_id = vgpu.record.vgpu_id
        by_pid = implicit_by_pid(later.slots, self._shown)
        exact = rests = earlier.rests_until(later)
        if not rests:
            self._uncertain = True
            bounds = implicit_bounds(earlier.slots, later.slots, self._shown)
            by_pid = {pid: min(max(past.get((vgpu_id, pid), low), low), high) for pid, (low, high) in bounds.items()}
            unsure = {pid for pid, (low, high) in bounds.items() if low != high}
            past_slots = self._past_ledgers.get(vgpu_id, NO_LEDGER).slots
            exact = unsure <= standing(past_slots, earlier.slots, later.slots)
        import_pids = {slot.pid for slot in later.slots if slot.imported_bytes}
        for pid in contradicted(earlier.slots, later.slots, self._shown):
            by_pid[pid] = past.get((vgpu_id, pid), by_pid[pid])
        for pid, amount in by_pid.items():
            name = vgpu_id, pid
            self.implicit[name] = self._confirmed(name, amount, past.get(name, amount), rests)
            self._peak[name] = max(self._past_peak.get(name, 0), self.implicit[name])
            if amount and amount == past.get(name) and rests and pid not in import_pids:
                self.least_context_bytes = min(self.least_context_bytes or amount, amount)
        total = sum(self.implicit[vgpu_id, pid] for pid in by_pid)
        if vgpu.grants.implicit_bytes != total:
            vgpu.grants.implicit_bytes = total
        vgpu.implicit_peak_bytes = sum(self._peak[vgpu_id, pid] for pid in by_pid)
        return exact and all(self.implicit[vgpu_id, pid] >= amount for pid, amount in by_pid.items())

    def _confirmed(self, name: tuple[str, int], amount: int, known: int, rests: bool) -> int:
        """A higher figure counts at once if the ledger is at rest, else as far as two readings in a row agree. Reason:
        a single reading may fall on a peak that was over before the ledger was read.

        Less counts once every reading of ``FALL_S`` has said so. Between a free and its entry the ledger says too much,
        and the driver needs up to a second to give tens of GiB back. A process of which the driver shows nothing at all
        has no context, or is suspended: then two readings are enough.
        """
        before, self._read[name] = self._past_read.get(name, known), amount
        if amount > known:
            self._falls.pop(name, None)
            believed = amount if rests else max(known, min(before, amount))
        else:
            nothing = self._shown.get(name[1], 0) == 0
            believed = max(before, amount) if nothing and before <= known else self._fallen(name, amount, known)
        self._uncertain |= believed != amount
        return believed

    def _fallen(self, name: tuple[str, int], amount: int, known: int) -> int:
        now = trio.current_time()
        fall = self._falls.pop(name, None)
        if amount == known:
            return known
        if fall is not None and now - fall.since >= FALL_S:
            return max(fall.most, amount)
        self._falls[name] = Fall(now, amount) if fall is None else Fall(fall.since, max(fall.most, amount))
        return known

    async def _release_dead(self) -> None:
        for dead in list(self._dead.values()):
            if self._still_held(dead):
                continue
            shared = self._is_shared(dead)
            if not shared and dead.kept:
                dead.asked, dead.kept = float("-inf"), False
            if dead.kept or trio.current_time() - dead.asked < ASK_AGAIN_S:
                continue
            if await self._release(dead.vgpu, dead.slot, dead.process, shared):
                dead.asked = trio.current_time()

    def _is_shared(self, dead: Dead) -> bool:
        """Other processes of its user have memory that it shared: the card has it yet, and the vGPU is charged with it.
        While a page is away the importers in it are not known."""
        slot = next((slot for slot in dead.vgpu.slots if slot.index == dead.slot), None)
        if slot is None or not shared_bytes([slot]):
            return False
        vgpus = [vgpu for vgpu in self._vgpus() if vgpu.record.owner.uid == dead.vgpu.record.owner.uid]
        ledgers = [vgpu.ledger for vgpu in vgpus]
        now = frozenset[Process]().union(*(importers(ledger.slots) for ledger in ledgers))
        if not all(ledger.known for ledger in ledgers):
            now |= dead.holders or frozenset()
        elif dead.holders is None:
            dead.holders = now
        holds = dead.holders is None or bool(dead.holders & now)
        dead.kept = holds and only_shared(slot)
        return holds

    def _still_held(self, dead: Dead) -> bool:
        if dead.process.pid not in self.latest.by_pid:
            return False
        # The pid is shown, but is it the same process? It may have been reused, or have called exec and attached anew:
        # both come after the driver has let the old one go.
        return not any(
            slot.pid == dead.process.pid and slot.index != dead.slot and slot.state is SlotState.ACTIVE
            for vgpu in self._vgpus()
            for slot in vgpu.slots
        )


def implicit_by_pid(slots: Iterable[SlotReading], by_pid: Mapping[int, int]) -> dict[int, int]:
    """Bytes that the driver shows beyond the ledger, per process.

    The ledger is a tenant's word: a process that claims to own more than it does has so much less implicit memory, and
    is charged with its claim.
    """
    return {pid: max(0, by_pid.get(pid, 0) - total) for pid, total in committed_by_pid(slots).items()}


def contradicted(earlier: Iterable[SlotReading], later: Iterable[SlotReading], by_pid: Mapping[int, int]) -> set[int]:
    """The processes of which the driver shows less than both ledgers say: it is giving memory back that the ledger
    still has, so its figure does not show what is implicit. Managed memory that is not on the card looks the same. A
    process with the figure 0 is suspended, or the driver does not give its figure."""
    before, after = committed_by_pid(earlier), committed_by_pid(later)
    return {pid for pid, now in after.items() if 0 < by_pid.get(pid, 0) < min(before.get(pid, now), now)}


def standing(*readings: Iterable[SlotReading]) -> set[int]:
    """The processes of the last reading of a ledger whose part of it does not change by itself: the dead, and those
    with the same figures in all ``readings``. The latter are stopped, or wait in the driver. The watch charges what
    such a process has reserved, even if the driver does not show it yet."""
    *past, now = (tuple(slots) for slots in readings)
    before = [{slot.index: ledger_of(slot) for slot in slots} for slots in past]
    goes_on = {
        slot.pid
        for slot in now
        if slot.state is not SlotState.DEAD
        and (slot.where == Where.MOVING or any(known.get(slot.index) != ledger_of(slot) for known in before))
    }
    return {slot.pid for slot in now} - goes_on


def ledger_of(slot: SlotReading) -> tuple[int, int, tuple[int, ...], int]:
    return slot.pid, slot.reserved_bytes, slot.committed_bytes, slot.away_bytes


def implicit_bounds(
    earlier: Iterable[SlotReading], later: Iterable[SlotReading], by_pid: Mapping[int, int]
) -> dict[int, tuple[int, int]]:
    """The least and the most that can be implicit of the driver's figure, per process of ``later``, if the ledger was
    between the two readings. The driver may show reserved memory, or not."""
    earlier, later = tuple(earlier), tuple(later)
    before, after = committed_by_pid(earlier), committed_by_pid(later)
    more: dict[int, int] = {}
    less: dict[int, int] = {}
    for slot in later:
        more[slot.pid] = more.get(slot.pid, 0) + slot.reserved_bytes
    for slot in (*earlier, *later):  # on its way from or to the host, it may be anywhere
        if slot.where == Where.MOVING:
            more[slot.pid] = more.get(slot.pid, 0) + slot.committed_bytes[DEVICE]
            less[slot.pid] = slot.committed_bytes[DEVICE]
    found = {}
    for pid, now in after.items():
        then, shown = before.get(pid, now), by_pid.get(pid, 0)
        most = max(then, now) + more[pid]
        found[pid] = max(0, shown - most), max(0, shown - max(0, min(then, now) - less.get(pid, 0)))
    return found
