"""``python -m vgpu.broker.template --link FD``: a GPU Server's template, from which its brokers are forked.

The template has imported everything that a broker needs, and has one thread. A broker that is forked from it begins at
once, and shares with it the memory that neither writes. The template answers only its server. Their link is a pair of
sockets that the server made, with no name in the file system. The template ends with that link. Brokers run in sessions
of their own, and outlive both.

An order is a JSON object ``{"vgpu", "server", "door", "alive", "limits"}``, as the options of ``vgpu.broker``. The
answer is ``{"pid", "start_time"}``, with one descriptor: the broker waits until a byte arrives there. So the server
knows the broker's pid before the broker does anything. A broker ends if its server died in between.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import trio

from vgpu.broker.runtime import Broker
from vgpu.limits import Limits
from vgpu.openfiles import raise_limit
from vgpu.paths import UMASK
from vgpu.process_tuning import go_first, keep_all
from vgpu.protocol.peer import start_time

MOST_ORDER_BYTES: Final = 1 << 12
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46  # of /proc/PID/stat, counted from its third field


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vgpu.broker.template", description="Template of the brokers of a GPU Server (started by it)"
    )
    parser.add_argument("--link", required=True, type=int, metavar="FD", help="the socket to the GPU Server")
    parser.add_argument("--title", default="", help="room for the command line that a broker shows")
    arguments = parser.parse_args()
    link = socket.socket(fileno=arguments.link)
    link.set_inheritable(False)
    os.umask(UMASK)
    raise_limit()
    keep_all()
    gc.disable()  # a collection would write into pages that the brokers share
    Template(link).run()


class Template:
    """Forks a broker for each order. ``run`` returns when the link to the server has ended."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waker = waker
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def run(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._link, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is self._link:
                        order = self._link.recv(MOST_ORDER_BYTES)
                        if not order:
                            return
                        self._fork(json.loads(order), ready)
                    else:
                        self._bury()

    def _bury(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._woken, 1 << 12)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _fork(self, order: dict[str, str], ready: selectors.BaseSelector) -> None:
        waits, goes = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            os.close(goes)
            ready.close()
            self._become_broker(order, waits)
        os.close(waits)
        try:
            # It is a child of this process, and not reaped yet: the pid is still its own.
            answer = json.dumps({"pid": pid, "start_time": start_time(pid)}).encode()
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [goes]))]
            self._link.sendmsg([answer], passed)
        finally:
            os.close(goes)

    def _become_broker(self, order: dict[str, str], waits: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._link.close()
            os.close(self._woken)
            os.close(self._waker)
            os.setsid()
            show_title(f"vgpu.broker --vgpu {order['vgpu']}")
            go = os.read(waits, 1)
            os.close(waits)
            if go:
                go_first()
                gc.enable()
                server, door, alive = (Path(order[name]) for name in ("server", "door", "alive"))
                trio.run(Broker(order["vgpu"], server, door, alive, Limits.from_option(order["limits"])).run)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)


def show_title(title: str) -> None:
    """Show ``title`` as this process's command line, in the place of its arguments."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    room = end - begin
    if begin and room > 1:
        text = title.replace(" ", "\0").encode()[: room - 1]
        ctypes.memmove(begin, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    main()
