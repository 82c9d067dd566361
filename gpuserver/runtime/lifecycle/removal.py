"""How a vGPU leaves this GPU Server: removed for good, or handed to another GPU's server."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Final

import trio

from gpuserver.device.pidfd import send
from gpuserver.runtime.lifecycle.brokers import Brokers
from gpuserver.runtime.lifecycle.suspension import Suspension, away
from gpuserver.runtime.memory.watch import MemoryWatch
from gpuserver.runtime.names import unlink_name
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu
from vgpu.errors import ErrorCode, VgpuError
from vgpu.event_types import EventType

LEAVE_S: Final = 1.0
"""How long the broker of a removed vGPU may take to end by itself."""


class Removal:
    """``remove`` ends a vGPU; ``forget`` leaves it to another server."""

    def __init__(self, state: GpuState, suspension: Suspension, brokers: Brokers, memory: MemoryWatch) -> None:
        self._state = state
        self._suspension = suspension
        self._brokers = brokers
        self._memory = memory

    async def remove(self, vgpu: Vgpu, kind: EventType, text: str, **fields: int | float | str) -> bool:
        """Remove a vGPU, even one with processes. Its key is free once its broker can no longer write under it.
        False: the vGPU is gone, and the journal still has it."""
        state = self._state
        if vgpu.passage.leaving is not None:
            raise away(vgpu)
        if vgpu.removed.is_set():
            raise VgpuError(ErrorCode.REMOVED, f"{vgpu.record.vgpu_id} is being removed already")
        vgpu.take_away()
        async with vgpu.lifecycle_lock:
            if vgpu.quiesced:
                await self._suspension.release(vgpu)
        state.refresh_gangs()
        vgpu.closed = state.tokens.remove(vgpu.record.key)
        self._memory.forget(vgpu)
        await self._brokers.dismiss(vgpu, removed=True)
        with trio.move_on_after(LEAVE_S):
            await vgpu.left.wait()
        send(vgpu.broker, signal.SIGKILL)
        await vgpu.left.wait()
        state.record_refusals(vgpu)
        state.strike_off(vgpu)
        self._close_door(vgpu)
        written = await state.persist()
        state.record_event(kind, vgpu, text, **fields)
        return written

    def forget(self, vgpu: Vgpu) -> None:
        """Another server has the vGPU, with its broker and its sockets."""
        state = self._state
        vgpu.closed = state.tokens.remove(vgpu.record.key)
        self._memory.forget(vgpu)
        state.strike_off(vgpu)
        state.refresh_gangs()

    def _close_door(self, vgpu: Vgpu) -> None:
        """Delete the sockets of the vGPU, their directories, what containers use, and the link of its name."""
        paths, record = self._state.settings.paths, vgpu.record
        door = paths.broker_socket(record.vgpu_id)
        with suppress(OSError):
            private = paths.broker_dir(record.vgpu_id)
            for path in (*private.iterdir(), *door.parent.glob("*.sock")):
                path.unlink(missing_ok=True)
            private.rmdir()
            door.parent.rmdir()
        self._brokers.containers.withdraw(vgpu)
        unlink_name(paths, record.owner.uid, record.spec.name, record.vgpu_id)
