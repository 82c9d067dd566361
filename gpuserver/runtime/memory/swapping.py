"""Swapping: ``gpuserver/core/states/residency.py`` decides which vGPU is on the card; this module moves the pages.

A vGPU that leaves gets no more leases. Once its work has drained, each of its hooks moves its own memory
(cython_ext/hook/swap/swap.pyx). The vGPU gets leases again once all of them are back. Hooks write in their slots where
their memory is and what they wait for. These are tenants' words, so the server also reads from the driver what is on
the card. No vGPU leaves for one whose programs do not answer.

A new server finds programs wherever the last one left them. Until it has read where, no page moves, and a vGPU that
may be away has no lease. A suspended vGPU that the last server had not yet put away is put away then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Final

import trio

from cython_ext.pages.storepage import STORE_BLOCK_BYTES
from cython_ext.readings import SlotReading, SlotState, Where
from gpuserver.core.states.residency import (
    PASSING_BYTES,
    STORE_SLACK_BYTES,
    Arrival,
    Tenant,
    admit,
    could_come,
    decide,
    least_used_first,
    spare_bytes,
)
from gpuserver.core.states.together import GangResidence
from gpuserver.runtime.bell import Bell
from gpuserver.runtime.memory.groups import SwappedGroups
from gpuserver.runtime.memory.places import Answer, Shortage, SwapState
from gpuserver.runtime.memory.stores import Stores
from gpuserver.runtime.memory.watch import MemoryWatch
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu
from vgpu.event_types import EventType
from vgpu.identity import Process
from vgpu.protocol.peer import is_running, is_stopped
from vgpu.units import counted, format_bytes

LOOK_S: Final = 0.01
PASS_S: Final = 0.002  # while a vGPU comes: at 50 GB/s 100 MB later
CALM_S: Final = 0.1  # while each vGPU has what it wants
AHEAD_S: Final = 0.5  # between two checks whether a store should grow
ROOM_S: Final = 60.0
STALL_S: Final = 15.0  # a move that does not get on for so long is given up
DRAIN_S: Final = 60.0  # ... where work is under way that has to end first
STOPPED_S: Final = 0.5  # ... and where a program was stopped at every reading
ANSWER_S: Final = 1.0  # a vGPU that has not begun to come by then is passed over
TAKE_NS: Final = 3_000_000_000  # so is one that has not taken what there is room for
RETURN_S: Final = 20.0  # programs of the last server that have not come back by then are not waited for
AGAIN_NS: Final = 5_000_000_000  # a program that is in the wrong place is not checked again before


class Swapping:
    """All vGPUs with --oversubscribe swap."""

    def __init__(self, state: GpuState, memory: MemoryWatch) -> None:
        self._state = state
        self._memory = memory
        self._groups = SwappedGroups(state)
        self.stores = Stores(state.settings.host_memory_bytes, state.facts.numa_node)
        self._places: dict[str, SwapState] = {}
        self._short = Shortage()
        self._arrivals = 0
        self._began = math.inf
        self._enlisted = trio.Event()
        self._bell = Bell()
        state.at_enlist.append(self.enlist)
        state.at_strike_off.append(self.forget)

    def enlist(self, vgpu: Vgpu) -> None:
        """A new vGPU gets leases once ``_settle`` has found where its memory is."""
        if vgpu.swaps:
            self._places[vgpu.record.vgpu_id] = SwapState(wants_ns=time.monotonic_ns())
            vgpu.swapped_out = True
            self._enlisted.set()
            self._state.tokens.park(vgpu.record.key)

    def forget(self, vgpu: Vgpu) -> None:
        """A vGPU is struck off. Its programs keep their part of the owner's store until they end."""
        self._places.pop(vgpu.record.vgpu_id, None)
        if not vgpu.swaps:
            return
        tenant = vgpu.tenant
        self.stores.leave(tenant, vgpu.programs)
        if not any(other.tenant == tenant for other in self._swapped() if other is not vgpu):
            self.stores.drop(tenant)

    @property
    def busy(self) -> set[int]:
        """The tenants whose programs may have their store pinned."""
        known = {vgpu_id for vgpu_id, place in self._places.items() if place.settled}
        swapped = (vgpu for vgpu in self._state.vgpus.values() if vgpu.swaps)
        return {v.tenant for v in swapped if v.programs or v.record.vgpu_id not in known}

    async def make_room(self) -> None:
        """After a promise: wait until the vGPUs that are in its way have left the card."""
        self.step_now()
        with trio.move_on_after(ROOM_S):
            while self._taken_bytes > max(0, self.room_bytes):  # noqa: ASYNC110  a changed page wakes no task
                await trio.sleep(LOOK_S)

    @property
    def room_bytes(self) -> int:
        """What all of them may have on the card together, of what can be moved."""
        state = self._state
        taken = state.registry.guaranteed_memory_bytes
        taken += sum(vgpu.borrowed_bytes for vgpu in state.vgpus.values())
        taken += sum(outsider.memory_bytes for outsider in self._memory.outside) + self._memory.left_bytes
        taken -= sum(vgpu.pending_bytes for vgpu in self._swapped())
        return state.facts.total_memory_bytes - taken + self._taken_bytes + self._lent_bytes

    @property
    def _lent_bytes(self) -> int:
        """The promises of the vGPUs that doze. Swapped memory may use them, because it can move away at any moment. A
        new allocation cannot: while a program waits to make one, nothing is lent."""
        if any(vgpu.room_bytes for vgpu in self._swapped()):
            return 0
        return sum(vgpu.record.guaranteed_memory_bytes for vgpu in self._state.vgpus.values() if vgpu.lends_memory)

    @property
    def _taken_bytes(self) -> int:
        return sum(vgpu.here_bytes for vgpu in self._swapped())

    def step_now(self) -> None:
        """A vGPU may come that could not before, or is wanted."""
        self._bell.ring()

    async def run(self) -> None:
        self._began = trio.current_time()
        while True:
            await self._has_vgpus()
            busy = self._step()
            coming = any(place.comes for place in self._places.values())
            await self._bell.wait(PASS_S if coming else LOOK_S if busy else CALM_S)

    async def grow_ahead(self) -> None:
        """Have host memory for all that swapped vGPUs own before any of them has to leave. So the first move takes as
        long as later ones: the hooks pin that memory meanwhile (cython_ext/hook/swap/pin_ahead.pyx)."""
        while True:
            await self._has_vgpus()
            wanted, more = self._wanted_bytes(), False
            if self.stores.have_room_for(wanted):  # else a part for each, and no vGPU could leave as a whole
                for tenant, bytes_ in wanted.items():
                    more |= await self.stores.have_ahead(tenant, bytes_)
            await trio.sleep(0 if more else AHEAD_S)

    async def _has_vgpus(self) -> None:
        """Wait until there is a vGPU that is swapped."""
        while not self._places:
            if self._enlisted.is_set():
                self._enlisted = trio.Event()
            await self._enlisted.wait()

    def _wanted_bytes(self) -> dict[int, int]:
        """By tenant, the store that has room for all that is owned."""
        return {tenant: bytes_ + STORE_SLACK_BYTES for tenant, bytes_ in self._owned_bytes().items()}

    def _owned_bytes(self) -> dict[int, int]:
        """By tenant; one that owns nothing has no entry. What programs report is bounded by their vGPUs' limits."""
        owned: dict[int, int] = {}
        for vgpu in self._swapped():
            if bytes_ := min(vgpu.movable_bytes, vgpu.record.memory_limit_bytes):
                owned[vgpu.tenant] = owned.get(vgpu.tenant, 0) + bytes_
        return owned

    # --- deciding

    def _swapped(self) -> Iterable[Vgpu]:
        return (vgpu for vgpu in self._state.vgpus.values() if vgpu.swaps and not vgpu.removed.is_set())

    def _step(self) -> bool:
        """Whether anything is likely to change soon."""
        if not self._places:
            return False
        now_ns = time.monotonic_ns()
        tenants: dict[int, tuple[Vgpu, SwapState]] = {}
        seen: list[Tenant] = []
        for vgpu in self._swapped():
            place = self._place(vgpu)
            if not place.settled:
                self._settle(vgpu, place)
            elif self._is_astray(vgpu, place, now_ns):
                self._begin(vgpu, place, on_card=False)
            tenants[vgpu.record.key] = vgpu, place
            group = self._groups.judge(vgpu, place)
            if place.assembles and (group is None or group.complete or (group.wants and not group.assembling)):
                place.assembles = False
                self.give_leases(vgpu)
            seen.append(self._tenant(vgpu, place, group, now_ns))
        self._groups.tell()
        if not self._knows_the_card():
            return True
        self._short.shrink(now_ns)
        room, short = self.room_bytes, self._short.bytes_
        host = self.stores.host
        moves, spare = decide(seen, room, now_ns, host, short), spare_bytes(seen, room, host)
        answer = None
        for key in moves.come:  # known before anybody leaves for them: it takes less of the store
            answer = self._begin(*tenants[key], on_card=True)
        parting = {tenant.key for tenant in seen if tenant.must_leave}
        for key in moves.leave:
            self._begin(*tenants[key], on_card=False, after=None if key in parting else answer)
        for tenant in seen:
            vgpu, place = tenants[tenant.key]
            self._pass_over(vgpu, place, now_ns, offered=tenant.key in moves.offered)
            self._tell_hopeless(vgpu, place, hopeless=tenant.key in moves.hopeless)
            vgpu.grants.spare_bytes = max(1, spare[tenant.key])
            if vgpu.record.spec.group is not None:
                place.ready = could_come(tenant.key, seen, room, now_ns, host, short)
        self._admit()
        self._pass_each_other()
        # No event reports that a resident vGPU needs room. A call of a suspended one ends the pause: ``step_now``.
        away = any(not t.resident and not tenants[t.key][0].quiesced for t in seen)
        changes = away or any(t.waits or t.moving or t.assembling for t in seen)
        return changes or bool(moves.leave) or any(not place.settled for place in self._places.values())

    def _pass_each_other(self) -> None:
        """Those that leave while others come; and of whom they take copies where their store is short of blocks."""
        vgpus = [(vgpu, self._place(vgpu)) for vgpu in self._swapped()]
        coming = any(place.comes for _, place in vgpus)
        for vgpu, place in vgpus:
            vgpu.pass_others(coming and place.leaves)
        ready = self.stores.host.kept_bytes
        if all(ready.get(tenant, 0) >= bytes_ for tenant, bytes_ in self._wanted_bytes().items()):
            return
        for tenant in {vgpu.tenant for vgpu, place in vgpus if place.leaves}:
            mine = ((vgpu, place) for vgpu, place in vgpus if vgpu.tenant == tenant and not place.leaves)
            here = {vgpu.record.key: (vgpu, place) for vgpu, place in mine}
            order = least_used_first({key: (place.wanted, place.wants_ns) for key, (_, place) in here.items()})
            programs = [program for key in order for program in here[key][0].programs]
            self.stores.take_first(tenant, programs)

    def _is_astray(self, vgpu: Vgpu, place: SwapState, now_ns: int) -> bool:
        """It is away, and is not: what the last server had begun, or what could not go back."""
        if not vgpu.swapped_out or place.moving or place.comes or vgpu.lifecycle_lock.locked() or not vgpu.here_bytes:
            return False
        if now_ns < place.tidied_ns + AGAIN_NS:
            return False
        place.tidied_ns = now_ns
        return True

    def _pass_over(self, vgpu: Vgpu, place: SwapState, now_ns: int, *, offered: bool) -> None:
        """Others have their turn if it does not take what it is offered, whatever size it says that it waits for: with
        that in hand it would wait no more, or for others to leave."""
        if not vgpu.room_bytes:
            place.refused = False
        if not offered or not place.offered_ns:
            place.offered_ns = now_ns
        elif now_ns - place.offered_ns > TAKE_NS:
            place.defer()
            tries_ns = now_ns - place.room_ns if place.room_ns else 0
            if tries_ns > TAKE_NS and not place.refused and not any(stands(slot) for slot in present(vgpu.alive)):
                # One allocation has tried all the while: the driver keeps more of the card than the books know. Once:
                # others leave as a whole then.
                self._short.grow(now_ns, self.room_bytes - self._taken_bytes - vgpu.room_bytes)
                place.refused = True

    def _knows_the_card(self) -> bool:
        """A server that has just begun knows neither what contexts take, nor what is where while a page is away."""
        return self._memory.readings > 0 and all(
            vgpu.activity is not None
            for vgpu in self._state.vgpus.values()
            if not vgpu.removed.is_set() and vgpu.passage.leaving is None  # its page comes once the other GPU answers
        )

    def _tenant(self, vgpu: Vgpu, place: SwapState, group: GangResidence | None, now_ns: int) -> Tenant:
        wants = self._state.tokens.wants(vgpu.record.key) or vgpu.expected if group is None else group.wants
        if wants != place.wanted:
            place.wanted, place.wants_ns = wants, now_ns
        if not wants:
            last_ns = self._state.tokens.last_event_ns(vgpu.record.key)
            place.wants_ns = (last_ns if group is None else max(last_ns, place.wants_ns)) or place.wants_ns
        if not vgpu.room_bytes:
            place.room_ns = 0
        elif not place.room_ns:
            place.room_ns = now_ns
        resident, moving = place.leaves or not vgpu.swapped_out, place.moving or place.leaves
        return Tenant(
            key=vgpu.record.key,
            resident=resident,
            memory_bytes=vgpu.movable_bytes,
            wants=wants,
            # a lease that it cannot use passes, and so does its wish for one; it waits all the same
            wants_ns=min(place.wants_ns, place.room_ns) if place.room_ns else place.wants_ns,
            moving=moving,
            room_bytes=vgpu.room_bytes,
            pinned=vgpu.quiesced or vgpu.lifecycle_lock.locked() or not place.settled or place.not_before_ns > now_ns,
            user=vgpu.tenant,
            came_ns=place.came_ns if group is None else group.since_ns,
            left_ns=place.left_ns,
            move_ns=place.move_ns if group is None else group.move_ns,
            stray_bytes=0 if resident or moving else vgpu.here_bytes,
            priority=vgpu.record.share.priority,
            may_come=group is None or group.may_come,
            assembling=group is not None and group.assembling,
            must_leave=group is not None and group.must_leave,
        )

    def _settle(self, vgpu: Vgpu, place: SwapState) -> None:
        """Its page is there: where are its programs? In a page that is new, as the broker died with the last server,
        they have yet to say so."""
        if vgpu.activity is None:
            return
        here = {(slot.pid, slot.start_time) for slot in present(vgpu.alive)}
        missing = any((process.pid, process.start_time) not in here for process in vgpu.programs)
        if missing and trio.current_time() < self._began + RETURN_S:
            return
        place.settled = True
        if not vgpu.quiesced and all(slot.where == Where.RESIDENT for slot in present(vgpu.alive)):
            vgpu.swapped_out, place.came_ns = False, time.monotonic_ns()
            vgpu.place(on_card=True)
            self._is_there(vgpu, place)
        else:  # some are away, or were about to go, or it is to stand still: all of them, then
            self._begin(vgpu, place, on_card=False)

    def _tell_hopeless(self, vgpu: Vgpu, place: SwapState, *, hopeless: bool) -> None:
        if hopeless and not place.hopeless:
            text = f"{vgpu.record.vgpu_id} waits for more memory than card and host have beside what others own"
            text += ": vgpuctl serve --host-memory gives more of the latter"
            self._state.record_event(EventType.NO_ROOM, vgpu, text)
        place.hopeless = hopeless

    # --- moving

    def _begin(self, vgpu: Vgpu, place: SwapState, *, on_card: bool, after: Answer | None = None) -> Answer:
        """``after``: the answer of the vGPU for which it leaves. If that vGPU does not come, it stays."""
        place.moving, place.leaves = True, not on_card
        place.answer = Answer()
        if on_card:
            self._arrives(place)
        self._state.nursery.start_soon(self._move, vgpu, place, on_card, after)
        return place.answer

    async def _move(self, vgpu: Vgpu, place: SwapState, on_card: bool, after: Answer | None) -> None:
        """One move of a vGPU at a time: while it moves, or its ``lifecycle_lock`` is held, it is barred."""
        try:
            if after is not None and not await after.comes():
                return
            async with vgpu.lifecycle_lock:
                if vgpu.removed.is_set() or (on_card and vgpu.quiesced):
                    return
                await (self.bring(vgpu) if on_card else self.put_away(vgpu))
        finally:
            place.moving = place.leaves = False
            place.comes = 0
            place.answer.give(False)

    def _arrives(self, place: SwapState) -> None:
        self._arrivals += 1
        place.comes = self._arrivals

    def _admit(self) -> None:
        """Those on their way get what the others have left."""
        vgpus = {vgpu.record.key: vgpu for vgpu in self._swapped()}
        coming = sorted((v for v in vgpus.values() if self._place(v).comes), key=lambda v: self._place(v).comes)
        if not coming:
            return
        arrivals = [Arrival(v.record.key, v.movable_bytes, v.here_bytes, v.grants.present_bytes) for v in coming]
        others = sum(v.here_bytes for v in vgpus.values() if v not in coming)
        for key, allowed in admit(arrivals, others, self.room_bytes).items():
            vgpus[key].grants.present_bytes = max(1, allowed)

    def _place(self, vgpu: Vgpu) -> SwapState:
        return self._places[vgpu.record.vgpu_id]

    def _away_bytes_of(self, tenant: int) -> int:
        """What of a tenant's is in the host's memory once those that are leaving have left, and those that are coming
        have come."""
        total = 0
        for vgpu in self._swapped():
            place = self._place(vgpu)
            if vgpu.tenant == tenant and not place.comes:
                total += vgpu.movable_bytes if place.leaves or vgpu.quiesced else vgpu.away_bytes
        return total

    async def put_away(self, vgpu: Vgpu) -> str:
        """Its memory into the host's. Why that is not possible now, and it is as it was; empty: it is away. What was
        away in part stays so, and its programs go on trying. The caller holds ``lifecycle_lock``."""
        place, began_ns, was_away = self._place(vgpu), time.monotonic_ns(), vgpu.swapped_out
        bytes_, tenant = vgpu.here_bytes, vgpu.tenant
        place.leaves = True
        lack = self.stores.lacks(tenant, self._away_bytes_of(tenant))
        if lack and not was_away:
            place.leaves = False
            return self._tell_stuck(vgpu, place, lack)
        self._state.tokens.park(vgpu.record.key)
        if not was_away:
            vgpu.swapped_out, place.left_ns, place.assembles = True, began_ns, False
            vgpu.swaps_out += 1
        lack = await self._leaves(vgpu)
        place.leaves = False
        if not lack:
            place.failures = place.not_before_ns = 0
            if bytes_:
                self._tell(vgpu, place, EventType.SWAPPED_OUT, bytes_, time.monotonic_ns() - began_ns)
            return ""
        if not was_away:
            self._tell_stuck(vgpu, place, lack)
            if await self._let_back(vgpu, place):
                self._is_there(vgpu, place)
        return lack

    async def _leaves(self, vgpu: Vgpu) -> str:
        """Empty, or why not all of it is away."""
        vgpu.place(on_card=False)
        lacks: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._provide, vgpu.tenant, lacks)
            away = await self._reached(vgpu, Where.AWAY)
            nursery.cancel_scope.cancel()
        return "" if away else [*lacks, "work that is queued waits for the host, or a program was stopped"][0]

    def _tell_stuck(self, vgpu: Vgpu, place: SwapState, reason: str) -> str:
        # Its programs have answered: for some seconds they are not asked again.
        place.failures = max(place.failures, 2)
        place.defer()
        self._state.record_event(EventType.STUCK, vgpu, f"{vgpu.record.vgpu_id} cannot leave the card now: {reason}")
        return reason

    def _record_failure(self, vgpu: Vgpu) -> None:
        """Of a move back that the driver fails: more room on the card would not help."""
        failed = [slot for slot in present(vgpu.alive) if slot.where == Where.FAILED_BACK]
        if failed:
            errors = ", ".join(f"{slot.move_result or 'unknown'} (process {slot.pid})" for slot in failed)
            text = f"{vgpu.record.vgpu_id} cannot come back onto the card now: the driver fails with error {errors}"
            self._state.record_event(EventType.STUCK, vgpu, text)

    async def _provide(self, tenant: int, lacks: list[str]) -> None:
        lack = await self.stores.have(tenant, self._away_bytes_of(tenant) + PASSING_BYTES)
        if lack:
            lacks.append(lack)

    async def bring(self, vgpu: Vgpu) -> bool:
        """Its memory onto the card. False: the card has no room after all, the driver fails the move, or a program does
        not answer, and it is away. The caller holds ``lifecycle_lock``."""
        place, began_ns = self._place(vgpu), time.monotonic_ns()
        bytes_ = vgpu.away_bytes
        if await self._let_back(vgpu, place):
            self._tell(vgpu, place, EventType.SWAPPED_IN, bytes_, time.monotonic_ns() - began_ns)
            self._is_there(vgpu, place)
            return True
        if vgpu.removed.is_set():
            return False
        place.moving = False  # what it has on the card counts, and no more
        self._record_failure(vgpu)
        refused = any(slot.where == Where.KEPT_AWAY for slot in present(vgpu.alive))
        if refused and not any(self._place(other).leaves for other in self._swapped()):
            self._short.grow(time.monotonic_ns(), self.room_bytes - self._taken_bytes - vgpu.away_bytes)
        place.defer()
        await self._leaves(vgpu)
        return False

    async def _let_back(self, vgpu: Vgpu, place: SwapState) -> bool:
        if not place.comes:
            self._arrives(place)
        vgpu.grants.present_bytes = max(1, vgpu.here_bytes)
        self._admit()
        vgpu.place(on_card=True)
        try:
            comes = await self._begins_to_come(vgpu)
            place.answer.give(comes)
            there = comes and await self._reached(vgpu, Where.RESIDENT)
        finally:
            place.comes = 0
        if not there:
            return False
        vgpu.grants.present_bytes = 0
        vgpu.swapped_out, place.came_ns, place.failures = False, time.monotonic_ns(), 0
        vgpu.expected = vgpu.expected and vgpu.record.spec.group is not None  # a group is, until all of it is there
        vgpu.swaps_in += 1
        return True

    def _is_there(self, vgpu: Vgpu, place: SwapState) -> None:
        """All of it. It gets leases, if its group is there, too."""
        group = self._groups.judge(vgpu, place)
        place.assembles = group is not None and group.assembling
        self.give_leases(vgpu)

    def give_leases(self, vgpu: Vgpu) -> None:
        """Unless its memory is away, it stands still, or the others of its group are yet to come."""
        if not (vgpu.removed.is_set() or vgpu.quiesced or vgpu.swapped_out or self._place(vgpu).assembles):
            self._state.tokens.unpark(vgpu.record.key, vgpu.share)

    async def _begins_to_come(self, vgpu: Vgpu) -> bool:
        with trio.move_on_after(ANSWER_S):
            while any(slot.where == Where.AWAY or stands(slot) for slot in astray(vgpu, Where.RESIDENT)):  # noqa: ASYNC110
                await trio.sleep(PASS_S / 4)  # a changed page wakes no task
            return True
        return False

    async def _reached(self, vgpu: Vgpu, where: Where) -> bool:
        """Whether all its programs get there, those that are attaching included once they are there."""
        stuck = {Where.STUCK} if where is Where.AWAY else {Where.KEPT_AWAY, Where.FAILED_BACK}
        at, since = vgpu.away_bytes, trio.current_time()
        moved = since  # or no program was stopped
        while not vgpu.removed.is_set():
            missing = astray(vgpu, where)
            if not missing:
                return True
            if any(slot.where in stuck for slot in missing):
                return False
            now = trio.current_time()
            if vgpu.away_bytes != at:
                at, since, moved = vgpu.away_bytes, now, now
            if not any(stands(slot) for slot in missing):
                moved = now
            drains = where is Where.AWAY and any(slot.undrained for slot in missing)
            if now - moved > STOPPED_S or now - since > (DRAIN_S if drains else STALL_S):
                return False
            await trio.sleep(LOOK_S / 2 if where is Where.AWAY else PASS_S)
        return False

    def _tell(self, vgpu: Vgpu, place: SwapState, kind: EventType, bytes_: int, ns: int) -> None:
        """``ns``: also of waiting for what was under way."""
        place.move_ns = min(ns, max((slot.moved_ns for slot in present(vgpu.alive)), default=0))
        programs = counted(len(vgpu.alive), "program")
        pinned_s = max((slot.pinned_ns for slot in present(vgpu.alive)), default=0) / 1e9
        text = f"{vgpu.record.vgpu_id}: {format_bytes(bytes_)} of {programs} in {ns / 1e9:.2f} s"
        if pinned_s >= 0.01:
            text += f", {pinned_s:.2f} s of it to pin host memory"
        clean = min(bytes_, sum(slot.clean_blocks for slot in present(vgpu.alive)) * STORE_BLOCK_BYTES)
        fields = {"seconds": ns / 1e9, "pinning_seconds": pinned_s}
        if kind is EventType.SWAPPED_OUT:
            fields["clean_bytes"] = clean
            text += f", {format_bytes(clean)} of it without a copy" if clean else ""
        self._state.record_event(kind, vgpu, text, memory_bytes=bytes_, **fields)


def present(slots: Iterable[SlotReading]) -> Iterable[SlotReading]:
    """Of processes those that have mapped their page."""
    return (slot for slot in slots if slot.state is SlotState.ACTIVE)


def astray(vgpu: Vgpu, where: Where) -> list[SlotReading]:
    """Its programs that are not there yet. One that is no more will not get anywhere, even if its broker has yet to
    notice."""
    return [slot for slot in present(vgpu.alive) if slot.where != where and is_running(process_of(slot))]


def stands(slot: SlotReading) -> bool:
    """Stopped, or read at a moment when a tracer had stopped it."""
    return is_stopped(process_of(slot))


def process_of(slot: SlotReading) -> Process:
    return Process(slot.pid, slot.start_time)
