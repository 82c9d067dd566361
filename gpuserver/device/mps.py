"""The MPS daemon of one GPU: start, environment for processes, stop.

Every GPU gets a daemon of its own with private directories, in the default compute mode; a daemon that somebody else
runs is left alone. A fatal fault of one process takes every process of that daemon's server with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from vgpu.errors import ErrorCode, VgpuError

CONTROL: Final = "nvidia-cuda-mps-control"
_COMMAND_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class MpsDirectories:
    """Where processes find the daemon: CUDA_MPS_PIPE_DIRECTORY and CUDA_MPS_LOG_DIRECTORY."""

    pipe: Path
    log: Path


class MpsDaemon(Protocol):
    """What spatial mode needs. Calls block; ``VgpuError`` (mode) says why it does not start."""

    directories: MpsDirectories

    def start(self) -> None: ...
    def stop(self) -> None: ...


class NvidiaMpsDaemon:
    """``nvidia-cuda-mps-control -d`` for the GPU with ``uuid``.

    It outlives the GPU Server on purpose: processes attached to it would die with it. ``start`` finds one that still
    runs in ``directories`` and keeps it.
    """

    def __init__(self, uuid: str, directories: MpsDirectories, *, multi_user: bool) -> None:
        self.directories = directories
        self._uuid = uuid
        self._multi_user = multi_user

    def start(self) -> None:
        if shutil.which(CONTROL) is None:
            raise VgpuError(
                ErrorCode.MODE, f"spatial mode needs MPS, and {CONTROL} is not on the PATH", "see: vgpuctl doctor"
            )
        if self._answers():
            return
        for directory in (self.directories.pipe, self.directories.log):
            directory.mkdir(parents=True, exist_ok=True)
            # Processes of the vGPUs' owners have to reach the pipes; MPS itself checks who they are.
            directory.chmod(0o755)
        # -M (one server for processes of all users) exists from driver 580 on, for root only.
        for options in (["-M"], []) if self._multi_user else ([],):
            started = self._run([CONTROL, "-d", *options])
            if started.returncode == 0 and self._answers():
                return
        raise VgpuError(
            ErrorCode.MODE,
            f"{CONTROL} did not start: {(started.stderr or started.stdout or 'it gave no reason').strip()}",
            f"see {self.directories.log / 'control.log'}, or use --mode temporal",
        )

    def stop(self) -> None:
        """Idempotent. Only for a GPU without attached processes."""
        if shutil.which(CONTROL) is not None and self._answers():
            self._run([CONTROL], text="quit\n")

    def _answers(self) -> bool:
        return self._run([CONTROL], text="get_server_list\n").returncode == 0

    def _run(self, argv: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": self._uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.directories.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.directories.log),
        }
        try:
            return subprocess.run(
                argv, input=text, env=environment, capture_output=True, text=True, timeout=_COMMAND_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(argv, 1, "", str(error))


class SimulatedMpsDaemon:
    """The simulated driver runs contexts side by side when it finds this marker in their pipe directory."""

    MARKER: Final = "simulated-mps"

    def __init__(self, directories: MpsDirectories) -> None:
        self.directories = directories

    def start(self) -> None:
        self.directories.pipe.mkdir(parents=True, exist_ok=True)
        self.directories.log.mkdir(parents=True, exist_ok=True)
        (self.directories.pipe / self.MARKER).touch()

    def stop(self) -> None:
        (self.directories.pipe / self.MARKER).unlink(missing_ok=True)
