"""The node starts, finds and restarts its GPU Servers. Each has a session of its own and outlives the node.

A node that begins finds the running servers by their sockets, and watches them like its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio
from pydantic import ValidationError

from client_hook import interpreter
from vgpu.config import UnmanagedName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.loggers import get_logger
from vgpu.node.logfiles import trim
from vgpu.node.loglines import last_words
from vgpu.protocol.hello import Hello
from vgpu.protocol.messages import Snapshot
from vgpu.protocol.service import open_link
from vgpu.protocol.stream import MessageStream

log = get_logger(__name__)

READY_S: Final = 30.0  # NVML on a machine with many GPUs and no persistence takes seconds
LONGEST_PAUSE_S: Final = 5.0
SETTLED_S: Final = 10.0
STOP_S: Final = 8.0
_LAST_BYTES: Final = 1 << 14
_WITHOUT: Final = "without one: vgpuctl serve --detach --simulate 1"


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a GPU is shared when its server starts. ``period_ns`` (one round of leases), ``window_ns``: None means the
    last one set (``vgpuctl gpu set``), else the policy's own."""

    mode: str = "temporal"
    period_ns: int | None = None
    window_ns: int | None = None


@dataclass(slots=True, eq=False)
class ServerProcess:
    """One GPU's server. ``pid`` 0: none at this moment. ``settled``: set at its first answer, or its first failure.
    ``up``: set while the server serves. Each server has another event, so wait for the current one. ``last``: the last
    snapshot of the server."""

    index: int
    socket: Path
    log_path: Path
    pid: int = 0
    reason: str = "starting"
    restarts: int = 0
    last: Snapshot | None = None
    up: trio.Event = field(default_factory=trio.Event)
    settled: trio.Event = field(default_factory=trio.Event)
    stopped: trio.Event = field(default_factory=trio.Event)

    @property
    def serving(self) -> bool:
        return self.up.is_set()


class Servers:
    """``keep`` runs for each server until the node stops; ``stop`` ends them."""

    def __init__(
        self,
        sharing: Sharing,
        others: Mapping[int, Sharing] | None = None,
        *,
        simulated: bool,
        environment: Mapping[str, str],
        host_memory_bytes: int = 0,
        limits: Limits = DEFAULT_LIMITS,
        take: bool = False,
        unmanaged: UnmanagedName = "report",
    ) -> None:
        """``take``: end another user's server of a GPU. ``others``: GPUs that are shared in another way, by index.
        ``host_memory_bytes``: of each GPU, for what is swapped out. ``unmanaged``: what happens to programs that use a
        GPU past the hook."""
        self._sharing = sharing
        self._others = dict(others or {})
        self._host_memory_bytes = host_memory_bytes
        self._unmanaged = unmanaged
        self._simulated = simulated
        self._take = take
        self._environment = dict(environment)
        self._limits = limits
        self._stopping = False

    async def keep(
        self,
        server: ServerProcess,
        follow: Callable[[MessageStream], Awaitable[None]],
        ended: Callable[[ServerProcess, int], object] = lambda server, pid: None,
    ) -> None:
        """Keep a server running until the node stops. ``follow`` uses the link to the server, and returns when the link
        ends. ``ended`` is called for each server that is replaced, with its pid."""
        pause = 0.0
        while not self._stopping:
            started = trio.current_time()
            await self._live(server, follow)
            pid, server.pid = server.pid, 0
            if server.serving:
                server.up = trio.Event()
            server.settled.set()
            if self._stopping:
                server.stopped.set()
                return
            server.restarts += 1
            ended(server, pid)
            pause = 0.0 if trio.current_time() - started > SETTLED_S else min(LONGEST_PAUSE_S, 2 * pause + 0.1)
            log.warning("GPU Server ended, another starts", gpu=server.index, pause_s=pause, log=str(server.log_path))
            await trio.sleep(pause)

    async def _live(self, server: ServerProcess, follow: Callable[[MessageStream], Awaitable[None]]) -> None:
        """One server, from its start (or discovery) to its end."""
        try:
            link, pid = await self._greet(server.socket)
            log.info("GPU Server found running", gpu=server.index, pid=pid)
        except VgpuError:
            try:
                link, pid = None, await trio.to_thread.run_sync(self._spawn, server)
            except OSError as error:  # no descriptors, no processes: of this machine, and for a while
                server.reason = f"its server cannot be started: {error.strerror}"
                return
        server.pid = pid
        pidfd = await _watched(pid)
        if pidfd is None:
            return
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow, server, link, follow)
                await trio.lowlevel.wait_readable(pidfd)
                nursery.cancel_scope.cancel()
        finally:
            os.close(pidfd)
            with suppress(ChildProcessError):  # a server that was found is no child of this process
                os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - it has ended: the pidfd said so
        said = await trio.to_thread.run_sync(_last_words, server.log_path)
        server.reason = f"its server ended, see {server.log_path}{said and f': {said}'}"

    async def _greet(self, path: Path) -> tuple[MessageStream, int]:
        link, welcome = await open_link(path, Hello())
        return link, welcome.pid

    async def _follow(
        self, server: ServerProcess, link: MessageStream | None, follow: Callable[[MessageStream], Awaitable[None]]
    ) -> None:
        """Wait until the server answers, then call ``follow``. A link that ends is opened again."""
        deadline = trio.current_time() + READY_S
        while True:
            try:
                if link is None:
                    link, _ = await self._greet(server.socket)
                server.reason = ""
                server.up.set()
                server.settled.set()
                async with link:
                    await follow(link)
            except (VgpuError, ValidationError, OSError, trio.ClosedResourceError, trio.BrokenResourceError):
                if not server.serving and trio.current_time() > deadline:
                    server.reason = f"it does not answer; see {server.log_path}"
                    server.settled.set()
            link = None
            await trio.sleep(0.01)

    def _spawn(self, server: ServerProcess) -> int:
        sharing = self._others.get(server.index, self._sharing)
        argv = interpreter.command("gpuserver", "--index", str(server.index), "--mode", sharing.mode)
        argv += ["--host-memory", str(self._host_memory_bytes), "--unmanaged", self._unmanaged]
        for option, value_ns in (("--period", sharing.period_ns), ("--window", sharing.window_ns)):
            argv += [] if value_ns is None else [option, str(value_ns)]
        if self._limits != DEFAULT_LIMITS:
            argv += ["--limits", self._limits.as_option()]
        if self._simulated:
            argv.append("--simulated")
        if self._take:
            argv.append("--take")
        server.log_path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            trim(server.log_path)
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return os.posix_spawn(
            argv[0],
            argv,
            self._environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(server.log_path), append, 0o640),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE],
        )

    async def stop(self, servers: Collection[ServerProcess]) -> None:
        """SIGTERM to each; SIGKILL to what is still there after ``STOP_S``."""
        self._stopping = True
        for number, limit in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, 1.0)):
            for server in servers:
                if server.pid:
                    with suppress(ProcessLookupError):
                        os.kill(server.pid, number)
            with trio.move_on_after(limit):
                for server in servers:
                    if server.pid:
                        await server.stopped.wait()
                return


async def _watched(pid: int) -> int | None:
    """A pidfd, as soon as this process can have one; None: the process has ended."""
    while True:
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        except OSError as error:
            log.error("a GPU Server cannot be watched", pid=pid, reason=str(error))
        await trio.sleep(LONGEST_PAUSE_S)


def _last_words(log_path: Path) -> str:
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            return last_words(file.read().decode(errors="replace").splitlines())
    except OSError:
        return ""


def gpu_count() -> int:
    """GPUs of this machine; ``VgpuError`` (unavailable) if NVML finds none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise VgpuError(
            ErrorCode.UNAVAILABLE,
            f"no NVIDIA GPU answers here: {error}",
            "without one: vgpuctl serve --detach --simulate 1",
        ) from error
    if count == 0:
        raise VgpuError(ErrorCode.UNAVAILABLE, "NVML finds no GPU", _WITHOUT)
    return count
