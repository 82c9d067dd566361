"""What brokers report of their processes: attached, died, and let go by the driver."""

from __future__ import annotations

from dataclasses import replace

from gpuserver.runtime.memory.stores import Stores
from gpuserver.runtime.memory.watch import MemoryWatch
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Planned, Vgpu
from vgpu.event_types import EventType
from vgpu.identity import Member, Process
from vgpu.protocol.broker import Attached, Died, Reaped
from vgpu.units import format_bytes


class BrokerReports:
    """Applies each report to the vGPU, and records the event."""

    def __init__(self, state: GpuState, memory: MemoryWatch, stores: Stores) -> None:
        self._state = state
        self._memory = memory
        self._stores = stores

    def attached(self, vgpu: Vgpu, message: Attached) -> None:
        """A broker that reconnects repeats the reports of all its processes, and a process may attach again. Only the
        first report is an event."""
        process = Process(message.pid, message.start_time)
        vgpu.planned[message.slot] = Planned(
            message.sm_planned, message.memory_planned_bytes, message.mps_client_priority
        )
        vgpu.members[message.slot] = Member(message.slot, process, message.uid, message.command, counts=message.counts)
        vgpu.returning = tuple(member for member in vgpu.returning if member.process != process)
        self._state.apply_shares()
        known = vgpu.last_reported.get(message.slot) == process
        if message.vgpus or not known:  # a broker that was restarted does not know the process's other vGPUs
            self._set_coattached(vgpu, message.slot, message.vgpus)
        if known:
            return
        vgpu.last_reported[message.slot] = process
        self._state.nursery.start_soon(self._state.persist)  # the process is found again if server and broker die
        self._memory.expect_growth()
        self._state.record_event(
            EventType.ATTACHED, vgpu, f"process {message.pid} ({message.command}) attached", pid=message.pid
        )

    def _set_coattached(self, vgpu: Vgpu, slot: int, vgpus: tuple[str, ...]) -> None:
        if vgpus:
            vgpu.coattached[slot] = vgpus
        else:
            vgpu.coattached.pop(slot, None)
        self._state.refresh_gangs()

    def died(self, vgpu: Vgpu, message: Died) -> None:
        """The process has ended; the driver may still hold its memory."""
        process = Process(message.pid, message.start_time)
        if vgpu.last_reported.get(message.slot) == process:
            self._set_coattached(vgpu, message.slot, ())
        member = vgpu.members.get(message.slot)
        if member is not None and member.process == process:
            vgpu.members[message.slot] = replace(member, alive=False)
        left = tuple(program for program in vgpu.passage.programs if program != process)
        vgpu.passage = replace(vgpu.passage, programs=left)
        if self._memory.died(vgpu, message.slot, process):
            self._state.record_refusals(vgpu)
            vgpu.count_past(message.slot)
            vgpu.planned.pop(message.slot, None)
            self._state.apply_shares()
            self._state.record_event(EventType.ENDED, vgpu, f"process {message.pid} ended", pid=message.pid)

    def reaped(self, vgpu: Vgpu, message: Reaped) -> None:
        """The driver has let the process go."""
        state = self._state
        member = vgpu.members.get(message.slot)
        if member is not None and member.process.pid == message.pid and not member.alive:
            del vgpu.members[message.slot]
        process = self._memory.reaped(vgpu, message.slot)
        # A program that another replaced by exec keeps its name. The store's blocks under that name may be the new
        # program's, and are given back with it.
        if process is not None and not any(process in other.programs for other in state.vgpus.values()):
            self._stores.release(process)
        released_bytes = min(message.released_bytes, state.facts.total_memory_bytes)  # the process wrote that number
        text = f"the driver let process {message.pid} go, {format_bytes(released_bytes)} free again"
        state.record_event(EventType.DETACHED, vgpu, text, pid=message.pid, released_bytes=released_bytes)
