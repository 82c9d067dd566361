"""Sockets for processes that run as another user than when they were admitted.

A process that has given up its privileges may not open its vGPU's socket any more, but it needs the pages of a new GPU
Server. So the broker polls its processes until each of them has the current pages. If the user of a process may not
attach, the broker makes a socket that this user alone may open. The broker checks a peer there as at the vGPU's socket:
the kernel confirms that it is the very process. The broker removes the socket once the process has used it.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import trio

from vgpu.errors import VgpuError
from vgpu.identity import Peer, Process
from vgpu.protocol.peer import is_alive, peer_now
from vgpu.protocol.stream import listen, serve_links

LOOK_S: Final = (0.5, 4.0)  # first pause; longest, for processes that never ask
MOST_VISITORS: Final = 4

Serve = Callable[[trio.socket.SocketType], Awaitable[None]]


class OwnSockets:
    """``waiting``: slots and processes that have not asked for the current pages. ``may_attach``: by the vGPU's own
    socket. ``say``: what could not be done, and why."""

    def __init__(
        self,
        door: Path,
        waiting: Callable[[], Iterable[tuple[int, Process]]],
        may_attach: Callable[[Peer], bool],
        serve: Serve,
        say: Callable[[str, Exception], None],
    ) -> None:
        self._door = door
        self._waiting = waiting
        self._may_attach = may_attach
        self._serve = serve
        self._say = say
        self._open: dict[int, trio.CancelScope] = {}

    async def run(self) -> None:
        """Runs for as long as the broker lives. Only root's broker can give a socket to another user."""
        if os.geteuid() != 0:
            return
        pause = LOOK_S[0]
        async with trio.open_nursery() as nursery:
            while True:
                waiting = list(self._waiting())
                for slot, process in waiting:
                    self._make(nursery, slot, process)
                pause = min(2 * pause, LOOK_S[1]) if waiting else LOOK_S[0]
                await trio.sleep(pause)

    def close(self, slot: int) -> None:
        """The process of ``slot`` has used its socket."""
        if slot in self._open:
            self._open[slot].cancel()

    def _make(self, nursery: trio.Nursery, slot: int, process: Process) -> None:
        peer = peer_now(process)
        if slot in self._open or peer is None or self._may_attach(peer):
            return
        path = own_socket(self._door, slot)
        try:
            listener = listen(path, mode=0o600, uid=peer.uid)
        except (OSError, VgpuError) as error:
            self._say(f"process {process.pid} runs as uid {peer.uid} now, and gets no socket of its own", error)
            return
        self._open[slot] = trio.CancelScope()
        nursery.start_soon(self._keep, slot, process, path, listener)

    async def _keep(self, slot: int, process: Process, path: Path, listener: trio.socket.SocketType) -> None:
        try:
            with self._open[slot]:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(serve_links, listener, self._serve, self._refused, most=MOST_VISITORS))
                    # The broker learns of the process's end elsewhere; this poll is for the socket alone.
                    while is_alive(process):  # noqa: ASYNC110
                        await trio.sleep(LOOK_S[1])
                    nursery.cancel_scope.cancel()
        finally:
            del self._open[slot]
            with suppress(OSError):
                path.unlink(missing_ok=True)  # noqa: ASYNC240 - one system call

    def _refused(self, error: OSError) -> None:
        self._say("cannot accept a process", error)


def own_socket(door: Path, slot: int) -> Path:
    """The socket where only the process in ``slot`` may attach (cython_ext/hook/attach/broker_rpc.pyx::own_socket)."""
    return door.with_name(f"{door.stem}.{slot}{door.suffix}")
