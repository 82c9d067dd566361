"""What a GPU Server does regularly: looks at rates, refusals and SMs, divides what it lends, writes the journal, ends
vGPUs whose time is up."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from gpuserver.runtime.brokers import ADMIT_S
from gpuserver.runtime.readings import SAMPLE_S
from vgpu.errors import VgpuError
from vgpu.event_types import EventType
from vgpu.identity import Process
from vgpu.loggers import get_logger
from vgpu.packing.partition import SM_STEP
from vgpu.units import format_bytes

if TYPE_CHECKING:
    from gpuserver.runtime.server import GpuServer
    from gpuserver.runtime.vgpus import Vgpu

log = get_logger(__name__)


class Housekeeping:
    def __init__(self, server: GpuServer) -> None:
        self._server = server

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            nursery.start_soon(self._keep_house)
            nursery.start_soon(self._sample)

    def _compare_sms(self, vgpu: Vgpu) -> None:
        """Say so, once for each process, where MPS gave another number of SMs than was planned."""
        if vgpu.record.partition is None:
            return
        server, alive = self._server, vgpu.alive
        for slot in alive:
            process = Process(slot.pid, slot.start_time)
            if process in vgpu.compared or not slot.sm_count:
                continue
            vgpu.compared.add(process)
            if slot.sm_planned and abs(slot.sm_count - slot.sm_planned) > SM_STEP:
                text = f"process {slot.pid} has {slot.sm_count} SMs, and was to have {slot.sm_planned}"
                server.record_event(
                    EventType.GRANTED, vgpu, text, pid=slot.pid, sm_count=slot.sm_count, sm_planned=slot.sm_planned
                )
        if vgpu.published_share != vgpu.share:  # what a process has may be known only now
            server.apply_shares()
        vgpu.compared &= {Process(slot.pid, slot.start_time) for slot in alive}

    def tell_refusals(self, vgpu: Vgpu) -> None:
        """Of each once: also as a process ends, and before its vGPU is no more."""
        count, size = vgpu.new_refusals()
        if count:
            text = f"an allocation of {format_bytes(size)} was refused at its limit"
            if count > 1:
                text = f"{count} allocations were refused at its limit, the last one of {format_bytes(size)}"
            self._server.record_event(EventType.REFUSED, vgpu, text, count=count, size_bytes=size)

    async def _look(self) -> None:
        server = self._server
        while True:
            server.tokens.forget_wishes()
            served, now_ns = server.tokens.served(), time.monotonic_ns()
            server.window.add(now_ns, served)
            server.usage.note(now_ns, served)
            server.turns.note(now_ns, served, server.activity.utilization_ratio)
            for vgpu in server.vgpus.values():
                self.tell_refusals(vgpu)
                self._compare_sms(vgpu)
            server.divide_card()
            due = trio.current_time() + SAMPLE_S
            await trio.sleep_until(due)
            server.tokens.meters.loop_lag.add(int((trio.current_time() - due) * 1e9))

    async def _sample(self) -> None:
        """NVML is asked here, for all who want to know."""
        server = self._server
        while True:
            server.activity = await trio.to_thread.run_sync(server.gpu.activity)
            await trio.sleep(1.0)

    async def _keep_house(self) -> None:
        server = self._server
        while True:
            await trio.sleep(1.0)
            for record in server.registry.expired(time.time_ns()):
                vgpu = server.vgpus[record.vgpu_id]
                if not vgpu.removed.is_set() and vgpu.passage.leaving is None and not is_being_made(vgpu):
                    server.nursery.start_soon(self._expire, vgpu)
            server.swapping.stores.sweep(server.memory.readings, server.memory.latest.by_pid)
            await server.swapping.stores.give_back(server.swapping.busy)
            await server.persist()
            if not server.settings.paths.server_socket(server.facts.index).exists():
                log.warning("nobody can reach this server any more: its socket is gone")
                server.nursery.cancel_scope.cancel()

    async def _expire(self, vgpu: Vgpu) -> None:
        with suppress(VgpuError):  # somebody removes it already, or has to be asked before
            await self._server.migration.release(vgpu)
            await self._server.remove(vgpu, EventType.EXPIRED, f"{vgpu.record.vgpu_id} has reached its time to live")


def is_being_made(vgpu: Vgpu) -> bool:
    """Whoever asked for it waits for its broker: it neither leaves nor fails before that has been answered."""
    return not vgpu.admits.is_set() and time.time_ns() < vgpu.record.created_unix_ns + int(ADMIT_S * 1e9)
