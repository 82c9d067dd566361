"""Watches over the MPS daemon of a GPU in spatial mode, and starts another when it dies.

A daemon or server that dies ends the processes of all the GPU's vGPUs: CUDA answers them with errors, for good. For
processes that start afterwards the watch starts a daemon in the same directories, within two looks. Meanwhile
``cuInit`` refuses (cython_ext/hook/attach/partition.pyx), because without a daemon a process would run on the whole
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from gpuserver.device.base import Capabilities, GpuFacts, Partitioner, PartitionerStatus
from vgpu.errors import ErrorCode, VgpuError
from vgpu.event_types import EventType
from vgpu.loggers import get_logger
from vgpu.protocol.messages import ModeChoice
from vgpu.share import Mode
from vgpu.units import counted

log = get_logger(__name__)

LOOK_S: Final = 1.0

Tell = Callable[[EventType, str], None]
"""What kind of event, and what happened."""


def enter_mode(
    partitioner: Partitioner, facts: GpuFacts, capabilities: Capabilities, choice: ModeChoice
) -> tuple[Mode, str]:
    """Start or stop the MPS daemon for ``choice``; the mode that the GPU is in then, and why. ``VgpuError`` (mode):
    ``choice`` is spatial, and MPS does not start."""
    if choice == "temporal":
        partitioner.stop()
        return Mode.TEMPORAL, "asked for"
    try:
        if facts.sm_count <= 0:
            raise VgpuError(ErrorCode.MODE, "this driver does not tell how many SMs the GPU has")
        if not capabilities.partitions:
            raise VgpuError(ErrorCode.MODE, "MPS limits no process on this GPU to a part of the SMs")
        partitioner.start()
    except VgpuError as error:
        if choice == "spatial":
            raise
        return Mode.TEMPORAL, f"auto: {error.message}"
    return Mode.SPATIAL, "asked for" if choice == "spatial" else "auto: the MPS daemon runs"


class MpsWatch:
    """``attached``: how many processes there are now. The task that starts or stops the daemon holds
    ``lifecycle_lock``.

    ``pid`` None: no daemon runs. ``reason``: why the last start failed.
    """

    def __init__(self, partitioner: Partitioner, attached: Callable[[], int], tell: Tell) -> None:
        self.lifecycle_lock = trio.Lock()
        self.restarts = 0
        self.reason = ""
        self._partitioner = partitioner
        self._attached = attached
        self._record = tell
        self._seen = PartitionerStatus(None)
        self._stopped = False
        self._present = 0

    @property
    def pid(self) -> int | None:
        return None if self._seen.daemon is None else self._seen.daemon.pid

    async def run(self, wanted: Callable[[], bool]) -> None:
        """Look once a second while the daemon is ``wanted``."""
        while True:
            async with self.lifecycle_lock:
                if wanted() and not self._stopped:
                    await self.check()
                else:
                    self._seen, self.reason = PartitionerStatus(None), ""
            await trio.sleep(LOOK_S)

    async def stop(self) -> None:
        """Stop the daemon for good. No process is attached, and the watch ends."""
        async with self.lifecycle_lock:
            await trio.to_thread.run_sync(self._partitioner.stop, abandon_on_cancel=True)
            self._stopped = True

    async def check(self) -> None:
        # The processes of the last check count, too: the end of MPS may have ended them.
        before, present = self._seen, self._attached()
        attached, self._present = max(present, self._present), present
        now = await trio.to_thread.run_sync(lambda: self._partitioner.status(serving=attached > 0))
        self._seen = now
        hit = f"{counted(attached, 'process')} of this GPU may get errors from CUDA"
        if now.daemon is None:
            if before.daemon is not None:
                self._record(EventType.MPS_LOST, f"the MPS daemon (pid {before.daemon.pid}) is gone: {hit}")
            await self._start_again()
            return
        for server in sorted(before.servers - now.servers, key=lambda process: process.pid):
            # Without an attached process the MPS server has only ended with its last process.
            if attached:
                text = f"the MPS server (pid {server.pid}) is gone: {hit}; the daemon starts another for new ones"
                self._record(EventType.MPS_LOST, text)

    async def _start_again(self) -> None:
        try:
            await trio.to_thread.run_sync(self._partitioner.start)
        except VgpuError as error:
            if str(error) != self.reason:
                self.reason = str(error)
                self._record(EventType.MPS_FAILED, f"no MPS daemon: {error}")
            return
        self._seen = await trio.to_thread.run_sync(lambda: self._partitioner.status(serving=False))
        self.reason = ""
        self.restarts += 1
        self._record(EventType.MPS_RESTARTED, f"another MPS daemon runs (pid {self.pid}): new processes work")
