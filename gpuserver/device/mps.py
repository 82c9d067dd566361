"""The MPS daemon of one GPU: start, stop, and whether it still lives (who restarts it: runtime/mps.py).

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

from client_hook import interpreter
from gpuserver.device import simulated_mps
from vgpu.choices import PriorityName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Process
from vgpu.protocol.peer import is_alive, start_time

CONTROL: Final = "nvidia-cuda-mps-control"
PID_FILE: Final = f"{CONTROL}.pid"
_COMMAND_S: Final = 10.0
MOST_PROCESSES: Final = 48
"""Of one MPS server. NVIDIA documents 48 for Volta and later, and 60 since; with 48 no driver refuses in our stead."""


def client_priority(priority: PriorityName) -> str:
    """CUDA_MPS_CLIENT_PRIORITY. MPS knows two levels, 0 and 1 (below normal), and where processes share SMs blocks of
    the upper one go first."""
    return "1" if priority is PriorityName.LOW else "0"


@dataclass(frozen=True, slots=True)
class MpsDirectories:
    """Where processes find the daemon: CUDA_MPS_PIPE_DIRECTORY and CUDA_MPS_LOG_DIRECTORY."""

    pipe: Path
    log: Path

    def make(self) -> None:
        """Processes of the vGPUs' owners reach the pipes, whatever our umask is. MPS itself checks who they are."""
        for directory in (self.pipe, self.log):
            missing = [place for place in directory.parents if not place.exists()]
            directory.mkdir(parents=True, exist_ok=True)
            for place in missing:
                place.chmod(0o711)
            directory.chmod(0o755)


@dataclass(frozen=True, slots=True)
class MpsLook:
    """Who is there of MPS. ``daemon`` None: nobody. ``servers``: as far as the daemon has told of them."""

    daemon: Process | None
    servers: frozenset[Process] = frozenset()


class MpsDaemon(Protocol):
    """What spatial mode needs. Calls block; ``VgpuError`` (mode) says why it does not start. ``start`` is idempotent,
    and starts another where the last one died.

    ``look``: who runs now. ``serving``: there are processes, so there is a server to be asked for.
    ``most_processes``: of one server, all vGPUs together.
    """

    directories: MpsDirectories

    @property
    def most_processes(self) -> int: ...

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def look(self, *, serving: bool) -> MpsLook: ...


class NvidiaMpsDaemon:
    """``nvidia-cuda-mps-control -d`` for the GPU with ``uuid``.

    It outlives the GPU Server on purpose: processes attached to it would die with it. ``start`` finds one that still
    runs in ``directories`` and keeps it.
    """

    most_processes: Final = MOST_PROCESSES

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
        if started.returncode and self.look(serving=False).daemon is None:
            # What a killed daemon left behind may keep the next one out; the directory is ours alone.
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
        """The last attempt; ``returncode`` 0 only if the daemon answers, too."""
        # -M (one server for processes of all users) exists from driver 580 on, for root only.
        for options in (["-M"], []) if self._multi_user else ([],):
            started = self._run([CONTROL, "-d", *options])
            if started.returncode == 0:
                if self._answers():
                    break
                started.returncode = 1
        return started

    def stop(self) -> None:
        """Idempotent. Only for a GPU without attached processes."""
        if shutil.which(CONTROL) is not None and self._answers():
            self._run([CONTROL], text="quit\n")

    def look(self, *, serving: bool) -> MpsLook:
        """The daemon by its pid file, so that a look costs no command; its servers are asked for when they change."""
        try:
            daemon = _process((self.directories.pipe / PID_FILE).read_text().strip("\0 \n"))
        except OSError:
            daemon = None
        if daemon is None:
            self._servers = frozenset()
            return MpsLook(None)
        running = frozenset(server for server in self._servers if _runs(server))
        if running != self._servers or (serving and not running):
            running = self._list_servers()
        self._servers = running
        return MpsLook(daemon, running)

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
                argv, input=text, env=environment, capture_output=True, text=True, timeout=_COMMAND_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(argv, 1, "", str(error))


class SimulatedMpsDaemon:
    """A process that stands for daemon and server (simulated_mps.py); a marker in the pipe directory names it."""

    most_processes: Final = MOST_PROCESSES

    def __init__(self, directories: MpsDirectories) -> None:
        self.directories = directories

    def start(self) -> None:
        self.directories.make()
        if self.look(serving=False).daemon is not None:
            return
        argv = interpreter.command(simulated_mps.__name__, str(self.directories.pipe))
        try:
            started = subprocess.run(
                argv,
                env=interpreter.environment(os.environ),
                stdin=subprocess.DEVNULL,
                timeout=_COMMAND_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise VgpuError(ErrorCode.MODE, f"the simulated MPS daemon did not start: {error}") from error
        if started.returncode or self.look(serving=False).daemon is None:
            raise VgpuError(ErrorCode.MODE, "the simulated MPS daemon did not start", "see the GPU Server's log")

    def stop(self) -> None:
        """Without its marker it leaves."""
        self._marker.unlink(missing_ok=True)

    def look(self, *, serving: bool) -> MpsLook:
        try:
            pid, started, *_ = self._marker.read_text().split()
        except (OSError, ValueError):
            return MpsLook(None)
        process = Process(int(pid), int(started))
        return MpsLook(process if _runs(process) else None)

    @property
    def _marker(self) -> Path:
        return self.directories.pipe / simulated_mps.MARKER


def _runs(process: Process) -> bool:
    """Whether it is there, and more than a zombie."""
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
    return process if _runs(process) else None
