"""Swapped vGPUs of groups: their state goes to the other GPU Servers, and what follows from the others' comes back.

``gpuserver/core/states/together.py`` has the rules. ``gpuserver/runtime/leases/gangs.py`` has the links.
"""

from __future__ import annotations

import time

from gpuserver.core.scheduler.leases import VgpuIndex
from gpuserver.core.states.together import NOT_SEEN, GangResidence, MemberResidence, unite
from gpuserver.runtime.memory.places import SwapState
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu


class SwappedGroups:
    """The members on this GPU. ``judge`` each of them once, then ``tell`` the others."""

    def __init__(self, state: GpuState) -> None:
        self._state = state
        self._judged: dict[VgpuIndex, MemberResidence] = {}

    def judge(self, vgpu: Vgpu, place: SwapState) -> GangResidence | None:
        """None: it is swapped by itself, because it is in no group or alone in it."""
        if vgpu.record.spec.group is None or not place.settled:
            return None
        key, now_ns = vgpu.record.key, time.monotonic_ns()
        own = self._judged[key] = self._residence(vgpu, place, now_ns)
        others = self._state.gangs.residents(key)
        if not others:
            place.seen, vgpu.group_wants, vgpu.group_awaits = NOT_SEEN, False, ""
            vgpu.expected = vgpu.expected and not own.there
            return None
        found, place.seen = unite(self._state.facts.index, own, others, place.seen, place.came_ns, now_ns)
        if found.complete:
            vgpu.expected = False
        vgpu.group_wants, vgpu.group_awaits = found.wants, found.awaits
        return found

    def tell(self) -> None:
        """The others get what ``judge`` has found since the last call."""
        self._state.gangs.tell(self._judged)
        self._judged = {}

    def _residence(self, vgpu: Vgpu, place: SwapState, now_ns: int) -> MemberResidence:
        there = not vgpu.swapped_out
        tries_to_leave = place.leaves and not vgpu.away_bytes  # it may not be able to, and the others stay until then
        return MemberResidence(
            granted=there or tries_to_leave or (place.comes > 0 and place.answer.is_yes),
            there=there,
            wants=self._state.tokens.wants(vgpu.record.key) or vgpu.expected or vgpu.room_bytes > 0,
            suspended=vgpu.quiesced and not vgpu.idle_suspended,
            ready=place.ready,
            able=not place.hopeless and place.not_before_ns <= now_ns,
            move_ns=place.move_ns,
        )
