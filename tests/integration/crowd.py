"""Clients of a node under many uids. Each is a process: it asks in the queue, holds its vGPU, and removes it."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from uuid import uuid4

from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.link import ControlLink
from vgpu.spec import VgpuSpec

LONG_NS: Final = 3600 * 10**9
PASSING: Final = frozenset({ErrorCode.UNREACHABLE, ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT})
"""Refusals while the node or a GPU Server restarts: the client asks again, as vgpuctl does."""
End = Literal["removes", "killed while it waits", "killed while it holds"]


@dataclass(frozen=True)
class Ask:
    """What one client does. ``after_s``: when it is killed, from its start or from its grant."""

    uid: int
    gid: int
    fields: dict[str, Any]
    hold_s: float
    end: End = "removes"
    after_s: float = 0.0


@dataclass
class Client:
    """One client's process, and what it has said so far."""

    ask: Ask
    pid: int
    pipe: int
    started_s: float
    granted_s: float | None = None
    said: list[dict[str, Any]] = field(default_factory=list)
    killed: bool = False
    _text: str = ""

    def read(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self.pipe, 1 << 16):
                self._text += data.decode()
        *lines, self._text = self._text.split("\n")
        for line in lines:
            self.said.append(json.loads(line))
            if "granted" in self.said[-1]:
                self.granted_s = time.monotonic()

    def is_due(self, now_s: float) -> bool:
        """Whether it is to be killed now."""
        if self.ask.end == "killed while it waits":
            return self.granted_s is not None or now_s - self.started_s >= self.ask.after_s
        if self.ask.end == "killed while it holds":
            return self.granted_s is not None and now_s - self.granted_s >= self.ask.after_s
        return False

    def kill(self) -> None:
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)


class Crowd:
    """All clients. One thread forks, reads and kills them."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self.clients: list[Client] = []

    def start(self, ask: Ask) -> None:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _live(self._socket, ask, writing)
        os.close(writing)
        os.set_blocking(reading, False)
        self.clients.append(Client(ask, child, reading, time.monotonic()))

    def ended(self) -> Iterator[Client]:
        """The clients that have ended since the last call. Kills those whose time has come."""
        now_s = time.monotonic()
        for client in list(self.clients):
            client.read()
            if not client.killed and client.is_due(now_s):
                client.kill()
            pid, _ = os.waitpid(client.pid, os.WNOHANG)
            if pid:
                client.read()
                os.close(client.pipe)
                self.clients.remove(client)
                yield client

    def kill(self) -> None:
        for client in self.clients:
            client.kill()
            os.waitpid(client.pid, 0)
            os.close(client.pipe)
        self.clients.clear()


def _live(socket: Path, ask: Ask, pipe: int) -> None:
    """The client's process. It never returns."""

    def say(**what: Any) -> None:
        os.write(pipe, (json.dumps(what) + "\n").encode())

    try:
        os.setgroups([])
        os.setgid(ask.gid)
        os.setuid(ask.uid)
        asked_s, request_id = time.monotonic(), uuid4().hex
        lifetime: Literal["kept", "process"] = "kept" if ask.end == "removes" else "process"
        spec = VgpuSpec.parse(**ask.fields)

        def create(link: ControlLink) -> str:
            return link.create(spec, lifetime=lifetime, request_id=request_id, queue_ns=LONG_NS).vgpu_id

        vgpu_id = _insisted(socket, create)
        say(granted=vgpu_id, waited_s=time.monotonic() - asked_s)
        time.sleep(ask.hold_s)

        def remove(link: ControlLink) -> str:
            with suppress(_Gone):
                return _removed(link, vgpu_id)
            return vgpu_id

        _insisted(socket, remove)
        say(removed=vgpu_id)
    except VgpuError as error:
        say(refused=error.code, text=error.message)
    except BaseException:
        say(failed=traceback.format_exc())
    os._exit(0)


class _Gone(Exception):
    """An earlier request has removed the vGPU, and its answer was lost."""


def _removed(link: ControlLink, vgpu_id: str) -> str:
    try:
        return link.remove(vgpu_id, force=True).vgpu_id
    except VgpuError as error:
        if error.code in {ErrorCode.NOT_FOUND, ErrorCode.REMOVED}:
            raise _Gone from error
        raise


def _insisted(socket: Path, act: Callable[[ControlLink], str]) -> str:
    while True:
        try:
            with ControlLink(socket, timeout_s=60) as link:
                return act(link)
        except VgpuError as error:
            if error.code not in PASSING:
                raise
        time.sleep(0.2)
