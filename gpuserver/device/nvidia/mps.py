"""The MPS daemon of one GPU, as a ``Partitioner``. ``gpuserver/runtime/mps.py`` restarts it if it dies.

Each GPU has a daemon of its own with private directories, in the default compute mode. Other daemons are left alone. A
fatal fault of one process ends every process of that daemon's server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from gpuserver.device.base import MpsDirectories, PartitionerStatus
from vgpu.enums import PriorityName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Process
from vgpu.protocol.peer import is_alive, start_time

CONTROL: Final = "nvidia-cuda-mps-control"
PID_FILE: Final = f"{CONTROL}.pid"
COMMAND_S: Final = 10.0
MOST_PROCESSES: Final = 48
"""The most of one MPS server. NVIDIA documents 48 from Volta on, and 60 for later drivers. With 48, our refusal comes
before the driver's."""


def client_priority(priority: PriorityName) -> str:
    """The value of CUDA_MPS_CLIENT_PRIORITY. MPS has two levels: 0, and 1 for below normal. Where processes share SMs,
    blocks of level 0 go first."""
    return "1" if priority is PriorityName.LOW else "0"


class NvidiaMpsDaemon:
    """``nvidia-cuda-mps-control -d`` for the GPU with ``uuid``.

    The daemon outlives the GPU Server, because the processes attached to it would die with it. ``start`` keeps a daemon
    that runs in ``directories``.
    """

    most_processes: Final = MOST_PROCESSES

    client_priority = staticmethod(client_priority)

    def __init__(self, uuid: str, directories: MpsDirectories, *, multi_user: bool) -> None:
        self.directories = directories
        self._servers: frozenset[Process] = frozenset()
        self._uuid = uuid
        self._multi_user = multi_user

    def start(self) -> None:
        if shutil.which(CONTROL) is None:
            raise VgpuError(
                ErrorCode.MODE, f"spatial mode needs MPS, and {CONTROL} is not on the PATH", "see: vgpuctl doctor"
            )
        if self._answers():
            return
        self.directories.make()
        started = self._launch()
        if started.returncode and self.status(serving=False).daemon is None:
            # Files of a killed daemon may prevent the start of the next one; the directory is ours alone.
            for name in (PID_FILE, "control", "control_lock", "control_privileged"):
                (self.directories.pipe / name).unlink(missing_ok=True)
            started = self._launch()
        if started.returncode == 0:
            return
        raise VgpuError(
            ErrorCode.MODE,
            f"{CONTROL} did not start: {(started.stderr or started.stdout or 'it gave no reason').strip()}",
            f"see {self.directories.log / 'control.log'}, or use --mode temporal",
        )

    def _launch(self) -> subprocess.CompletedProcess[str]:
        """The last attempt. Its ``returncode`` is 0 only if the daemon also answers."""
        # -M (one server for processes of all users) exists from driver 580 on, for root only.
        for options in (["-M"], []) if self._multi_user else ([],):
            started = self._run([CONTROL, "-d", *options])
            if started.returncode == 0:
                if self._answers():
                    break
                started.returncode = 1
        return started

    def stop(self) -> None:
        """As ``Partitioner.stop``."""
        if shutil.which(CONTROL) is not None and self._answers():
            self._run([CONTROL], text="quit\n")

    def status(self, *, serving: bool) -> PartitionerStatus:
        """The pid file names the daemon, so this runs no command. The daemon lists its servers if they changed."""
        try:
            daemon = _process((self.directories.pipe / PID_FILE).read_text().strip("\0 \n"))
        except OSError:
            daemon = None
        if daemon is None:
            self._servers = frozenset()
            return PartitionerStatus(None)
        running = frozenset(server for server in self._servers if runs(server))
        if running != self._servers or (serving and not running):
            running = self._list_servers()
        self._servers = running
        return PartitionerStatus(daemon, running)

    def _list_servers(self) -> frozenset[Process]:
        listed = self._run([CONTROL], text="get_server_list\n")
        found = (_process(word) for word in listed.stdout.split()) if listed.returncode == 0 else ()
        return frozenset(server for server in found if server is not None)

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
                argv, input=text, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(argv, 1, "", str(error))


def runs(process: Process) -> bool:
    """Whether the process lives and is no zombie."""
    try:
        text = Path(f"/proc/{process.pid}/stat").read_bytes()
    except OSError:
        return False
    return is_alive(process) and text[text.rindex(b")") + 2 :][:1] not in b"ZX"


def _process(pid: str) -> Process | None:
    """The running process with that pid; None if there is none."""
    try:
        process = Process(int(pid), start_time(int(pid)))
    except (ValueError, ProcessLookupError):
        return None
    return process if runs(process) else None
