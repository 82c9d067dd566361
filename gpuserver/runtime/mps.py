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

from gpuserver.device.base import Partitioner, PartitionerStatus
from vgpu.errors import VgpuError
from vgpu.event_types import EventType
from vgpu.loggers import get_logger
from vgpu.units import counted

log = get_logger(__name__)

LOOK_S: Final = 1.0

Tell = Callable[[EventType, str], None]
"""What kind of event, and what happened."""


class MpsWatch:
    """``attached``: how many processes there are now. ``turn``: held by whoever starts or stops the daemon.

    ``pid`` None: there is none; ``reason`` then says why, if it was tried to start one.
    """

    def __init__(self, daemon: Partitioner, attached: Callable[[], int], tell: Tell) -> None:
        self.lifecycle_lock = trio.Lock()
        self.restarts = 0
        self.reason = ""
        self._daemon = daemon
        self._attached = attached
        self._tell = tell
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
                    await self.look()
                else:
                    self._seen, self.reason = PartitionerStatus(None), ""
            await trio.sleep(LOOK_S)

    async def stop(self) -> None:
        """For good: nobody is attached, and nobody looks after it any more."""
        async with self.lifecycle_lock:
            await trio.to_thread.run_sync(self._daemon.stop, abandon_on_cancel=True)
            self._stopped = True

    async def look(self) -> None:
        # Who was there at the last look, too: by now the end of MPS may have ended them.
        before, present = self._seen, self._attached()
        attached, self._present = max(present, self._present), present
        now = await trio.to_thread.run_sync(lambda: self._daemon.status(serving=attached > 0))
        self._seen = now
        hit = f"{counted(attached, 'process')} of this GPU may get errors from CUDA"
        if now.daemon is None:
            if before.daemon is not None:
                self._tell(EventType.MPS_LOST, f"the MPS daemon (pid {before.daemon.pid}) is gone: {hit}")
            await self._start_again()
            return
        for server in sorted(before.servers - now.servers, key=lambda process: process.pid):
            # Where nobody is attached any more it has only left, as it does when its last process has ended.
            if attached:
                text = f"the MPS server (pid {server.pid}) is gone: {hit}; the daemon starts another for new ones"
                self._tell(EventType.MPS_LOST, text)

    async def _start_again(self) -> None:
        try:
            await trio.to_thread.run_sync(self._daemon.start)
        except VgpuError as error:
            if str(error) != self.reason:
                self.reason = str(error)
                self._tell(EventType.MPS_FAILED, f"no MPS daemon: {error}")
            return
        self._seen = await trio.to_thread.run_sync(lambda: self._daemon.status(serving=False))
        self.reason = ""
        self.restarts += 1
        self._tell(EventType.MPS_RESTARTED, f"another MPS daemon runs (pid {self.pid}): new processes work")
