"""The regular work of a GPU Server. It samples rates, records refusals, compares SMs and divides the memory it lends.
It also writes the journal, and removes vGPUs whose time is up."""

from __future__ import annotations

import time
from contextlib import suppress

import trio

from gpuserver.device.base import Device
from gpuserver.runtime.lifecycle.brokers import ADMIT_S
from gpuserver.runtime.lifecycle.migration import Migration
from gpuserver.runtime.lifecycle.removal import Removal
from gpuserver.runtime.memory.swapping import Swapping
from gpuserver.runtime.memory.watch import MemoryWatch
from gpuserver.runtime.rates import SAMPLE_S
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu
from vgpu.errors import VgpuError
from vgpu.event_types import EventType
from vgpu.identity import Process
from vgpu.loggers import get_logger
from vgpu.packing.partition import SM_STEP

log = get_logger(__name__)


class Housekeeping:
    """Three endless tasks, each with its own interval."""

    def __init__(
        self,
        state: GpuState,
        gpu: Device,
        swapping: Swapping,
        memory: MemoryWatch,
        migration: Migration,
        removal: Removal,
    ) -> None:
        self._state = state
        self._gpu = gpu
        self._swapping = swapping
        self._memory = memory
        self._migration = migration
        self._removal = removal

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            nursery.start_soon(self._keep_house)
            nursery.start_soon(self._sample)

    def _compare_sms(self, vgpu: Vgpu) -> None:
        """Record, once for each process, that MPS gave another number of SMs than was planned."""
        if vgpu.record.partition is None:
            return
        state, alive = self._state, vgpu.alive
        for slot in alive:
            process = Process(slot.pid, slot.start_time)
            if process in vgpu.compared or not slot.sm_count:
                continue
            vgpu.compared.add(process)
            if slot.sm_planned and abs(slot.sm_count - slot.sm_planned) > SM_STEP:
                text = f"process {slot.pid} has {slot.sm_count} SMs, and was to have {slot.sm_planned}"
                state.record_event(
                    EventType.GRANTED, vgpu, text, pid=slot.pid, sm_count=slot.sm_count, sm_planned=slot.sm_planned
                )
        if vgpu.published_share != vgpu.share:  # what a process has may be known only now
            state.apply_shares()
        vgpu.compared &= {Process(slot.pid, slot.start_time) for slot in alive}

    async def _look(self) -> None:
        state = self._state
        while True:
            state.tokens.forget_wishes()
            served, now_ns = state.tokens.served(), time.monotonic_ns()
            state.rate_window.add(now_ns, served, state.tokens.at_limit())
            state.usage.note(now_ns, served)
            state.turn_use.note(now_ns, served, state.activity.utilization_ratio)
            for vgpu in state.vgpus.values():
                state.record_refusals(vgpu)
                self._compare_sms(vgpu)
            state.divide_card()
            due = trio.current_time() + SAMPLE_S
            await trio.sleep_until(due)
            state.tokens.meters.loop_lag.add(int((trio.current_time() - due) * 1e9))

    async def _sample(self) -> None:
        """Read from NVML what requests and records show of the whole card."""
        state = self._state
        while True:
            state.activity = await trio.to_thread.run_sync(self._gpu.activity)
            await trio.sleep(1.0)

    async def _keep_house(self) -> None:
        state = self._state
        while True:
            await trio.sleep(1.0)
            for record in state.registry.expired(time.time_ns()):
                vgpu = state.vgpus[record.vgpu_id]
                if not vgpu.removed.is_set() and vgpu.passage.leaving is None and not is_being_made(vgpu):
                    state.nursery.start_soon(self._expire, vgpu)
            self._swapping.stores.sweep(self._memory.readings, self._memory.latest.by_pid)
            await self._swapping.stores.give_back(self._swapping.busy)
            await state.persist()
            if not state.settings.paths.server_socket(state.facts.index).exists():
                log.warning("no client can reach this server any more: its socket is gone")
                state.nursery.cancel_scope.cancel()

    async def _expire(self, vgpu: Vgpu) -> None:
        with suppress(VgpuError):  # it is being removed already, or its source GPU has to answer first
            await self._migration.release(vgpu)
            await self._removal.remove(vgpu, EventType.EXPIRED, f"{vgpu.record.vgpu_id} has reached its time to live")


def is_being_made(vgpu: Vgpu) -> bool:
    """Its client still waits for the broker: until that is answered, the vGPU does not expire."""
    return not vgpu.admits.is_set() and time.time_ns() < vgpu.record.created_unix_ns + int(ADMIT_S * 1e9)
