"""The simulated MPS daemon, as a ``Partitioner``. The simulated driver keeps the limits (cython_ext/sim/mps.pxd)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

from client_hook import interpreter
from gpuserver.device.base import MpsDirectories, PartitionerStatus
from gpuserver.device.nvidia.mps import COMMAND_S, MOST_PROCESSES, client_priority, runs
from gpuserver.device.simulated import mps_process
from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Process


class SimulatedMpsDaemon:
    """A process that stands for daemon and server (``mps_process``); a marker in the pipe directory names it."""

    most_processes: Final = MOST_PROCESSES

    client_priority = staticmethod(client_priority)

    def __init__(self, directories: MpsDirectories) -> None:
        self.directories = directories

    def start(self) -> None:
        self.directories.make()
        if self.status(serving=False).daemon is not None:
            return
        argv = interpreter.command(mps_process.__name__, str(self.directories.pipe))
        try:
            started = subprocess.run(
                argv,
                env=interpreter.environment(os.environ),
                stdin=subprocess.DEVNULL,
                timeout=COMMAND_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise VgpuError(ErrorCode.MODE, f"the simulated MPS daemon did not start: {error}") from error
        if started.returncode or self.status(serving=False).daemon is None:
            raise VgpuError(ErrorCode.MODE, "the simulated MPS daemon did not start", "see the GPU Server's log")

    def stop(self) -> None:
        """Remove the marker. The process ends when it finds no marker."""
        self._marker.unlink(missing_ok=True)

    def status(self, *, serving: bool) -> PartitionerStatus:
        try:
            pid, started, *_ = self._marker.read_text().split()
        except (OSError, ValueError):
            return PartitionerStatus(None)
        process = Process(int(pid), int(started))
        return PartitionerStatus(process if runs(process) else None)

    @property
    def _marker(self) -> Path:
        return self.directories.pipe / mps_process.MARKER
