"""Which sockets the processes of a vGPU have, read in a thread that may wait long.

A process that holds its memory's lock makes the readers of its environment wait. So a survey has a bound, after which
its thread goes on. Until that thread ends it is the vGPU's only one, and no other vGPU waits for it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import trio

from gpuserver.runtime.lifecycle.ports import SocketOwners, Tables, read_tables, survey
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu
from vgpu.errors import ErrorCode, VgpuError

READ_S: Final = 5.0


class Surveys:
    """Of all vGPUs."""

    def __init__(self, state: GpuState) -> None:
        self._state = state
        self._threads: dict[Vgpu, trio.CapacityLimiter] = {}

    def keep(self, vgpus: Collection[Vgpu]) -> None:
        """Forget the other vGPUs."""
        self._threads = {vgpu: thread for vgpu, thread in self._threads.items() if vgpu in vgpus}

    async def of(self, vgpu: Vgpu) -> tuple[SocketOwners, Tables]:
        """The sockets first, then the tables. ``VgpuError`` (unavailable): it takes longer than ``READ_S``."""
        record, paths, programs = vgpu.record, self._state.settings.paths, vgpu.programs

        def read() -> tuple[SocketOwners, Tables]:
            found = survey(record.vgpu_id, programs, paths, record.owner)
            return found, read_tables(found.spaces)

        thread = self._threads.setdefault(vgpu, trio.CapacityLimiter(1))
        with trio.move_on_after(READ_S):
            return await trio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=thread)
        raise VgpuError(
            ErrorCode.UNAVAILABLE,
            f"the sockets of {record.vgpu_id} are not known: /proc gave no answer within {READ_S:g} s",
            f"wait for programs that have just started, or: vgpuctl suspend {record.vgpu_id} --resume-on call",
        )
