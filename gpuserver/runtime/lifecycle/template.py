"""The server's end of the template from which brokers are forked (``vgpu.broker.template``).

A server owns its template: brokers are started while the node is away, so the template cannot be the node's. It is a
child of the server, it ends with the server, and a template that died is started again.
"""

from __future__ import annotations

import array
import errno
import json
import os
import signal
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, NoReturn

import trio

from client_hook import interpreter
from vgpu.identity import Process
from vgpu.loggers import get_logger
from vgpu.protocol.peer import start_time

log = get_logger(__name__)

ANSWER_S: Final = 20.0
"""A template imports for a second, on a busy machine for several."""
PAUSE_S: Final = 1.0
_TITLE: Final = "." * 120
_ANSWER_BYTES: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class Order:
    """What a broker is started with. Paths of sockets: ``server`` of the GPU Server, ``door`` for the vGPU's processes,
    ``alive`` by which the next GPU Server finds the broker. ``limits`` as ``Limits.as_option`` writes them."""

    vgpu: str
    server: str
    door: str
    alive: str
    limits: str

    def options(self) -> list[str]:
        """The same as options of ``vgpu.broker``."""
        return [text for name, value in asdict(self).items() for text in (f"--{name}", value)]


class NoTemplateError(Exception):
    """The template did not answer."""


class BrokerTemplate:
    """``fork`` gives a broker. Orders are carried out one after the other."""

    def __init__(self) -> None:
        self._pid = 0
        self._link: trio.socket.SocketType | None = None
        self._turn = trio.Lock()

    @property
    def pid(self) -> int:
        """0: none runs."""
        return self._pid

    async def keep(self) -> NoReturn:
        """See to it that a template runs, so that the first broker need not wait for one."""
        while True:
            try:
                await self._keep_one()
            except OSError as error:  # no descriptors, no processes: of this machine, and for a while
                log.error("the broker template cannot be started or watched", reason=str(error))
            await trio.sleep(PAUSE_S)

    async def _keep_one(self) -> None:
        async with self._turn:
            self.warm()
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self._pid)
            try:
                await trio.lowlevel.wait_readable(pidfd)
            finally:
                os.close(pidfd)
        async with self._turn:
            if self._pid and _has_ended(self._pid):
                log.warning("broker template ended, another starts", pid=self._pid)
                self.end()

    def warm(self) -> None:
        """Start a template if none runs. It imports while the server goes on."""
        if self._link is not None:
            return
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            its.set_inheritable(True)
            argv = interpreter.command("vgpu.broker.template", "--link", str(its.fileno()), "--title", _TITLE)
            try:
                self._pid = spawn(argv)
            except OSError:
                mine.close()
                raise
        mine.setblocking(False)
        self._link = trio.socket.from_stdlib_socket(mine)

    async def fork(self, order: Order) -> tuple[Process, int]:
        """The broker's name, and the descriptor that lets it go: the caller writes a byte, and closes it. The broker
        ends if it is closed without one. ``NoTemplateError``: two templates died, or did not answer."""
        text = json.dumps(asdict(order)).encode()
        async with self._turn:
            for _ in range(2):
                # An order without its answer would give the next order a stranger's name.
                with trio.move_on_after(ANSWER_S, shield=True):
                    try:
                        self.warm()
                        return await self._ask(text)
                    except OSError as error:
                        log.warning("broker template ended, another starts", pid=self._pid, reason=str(error))
                self.end()
        raise NoTemplateError

    async def _ask(self, text: bytes) -> tuple[Process, int]:
        assert self._link is not None
        await self._link.send(text)
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        answer, ancillary, _, _ = await self._link.recvmsg(_ANSWER_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        if not answer:
            raise ConnectionResetError("it closed its link")
        if not ancillary:  # the broker's descriptor is closed, so the broker ends
            raise OSError(errno.EMFILE, "no descriptor is left for the broker's start")
        goes = array.array("i", ancillary[0][2])[0]
        return Process(**json.loads(answer)), goes

    def end(self) -> None:
        """Without a template ``fork`` starts one. Brokers that were forked go on."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it stays to be reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def spawn(argv: list[str]) -> int:
    """A process in a session of its own: a Ctrl-C meant for the node, or the node's end, does not reach it."""
    return os.posix_spawn(
        argv[0],
        argv,
        interpreter.environment(os.environ),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        ],
        setsid=True,
        setsigdef=[signal.SIGPIPE],
    )


async def start_broker(template: BrokerTemplate, order: Order) -> tuple[Process, int]:
    """A broker, by the template; without one, by a Python of its own, which needs no descriptor to go (−1)."""
    try:
        return await template.fork(order)
    except NoTemplateError:
        log.error("no broker template, brokers start slowly", vgpu=order.vgpu)
        pid = spawn(interpreter.command("vgpu.broker", *order.options()))
        return Process(pid, start_time(pid)), -1
