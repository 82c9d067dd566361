"""A process of a vGPU that needs no CUDA: attaches as the hook does, then takes its turns.

As a program (``python -m tests.integration.process DOOR use|sit``) it is the process; ``Child`` is its handle. It says
one JSON object per line: the broker's reply, and, while it uses tokens, the epoch of every lease that it works under.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack

from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.testing.fake_peer import Process

ROOT = Path(__file__).parents[2]


def knock(door: Path, message: Any = None, *, raw: bytes | None = None) -> tuple[dict[str, Any], list[int]]:
    """Say one thing to a broker, as bytes or as a message; its reply and the descriptors that came with it.
    ``EOFError`` if it closed the link without one."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(door))  # waits where the broker has no room; with a time-out it would fail at once
        link.settimeout(30)
        body = msgpack.packb(message) if raw is None else b""
        link.sendall(raw if raw is not None else struct.pack("<I", len(body)) + body)
        received, descriptors = b"", array.array("i")
        while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "little"):
            data, ancillary, _, _ = link.recvmsg(1 << 16, socket.CMSG_SPACE(4 * descriptors.itemsize))
            if not data:
                raise EOFError("the broker closed the link")
            received += data
            for _, _, payload in ancillary:
                descriptors.frombytes(payload)
    return msgpack.unpackb(received[4:]), list(descriptors)


def attach_request(**changes: Any) -> dict[str, Any]:
    request = {
        "op": "attach",
        "version": 1,
        "role": "process",
        "command": "test",
        "now_ns": time.monotonic_ns(),
        "slot": -1,
        "counts": True,
    }
    return request | changes


class Attached:
    """This process in a vGPU. Re-attaches when its server was restarted, as a hook does."""

    def __init__(self, door: Path, say: Callable[..., None]) -> None:
        self._door = door
        self._say = say
        self.slot = -1
        self.attach()

    def attach(self) -> None:
        reply, descriptors = knock(self._door, attach_request(slot=self.slot))
        assert reply["ok"], reply
        grants, activity = GrantsPage.map_readonly(descriptors[0]), ActivityPage.map(descriptors[1])
        for descriptor in descriptors:
            os.close(descriptor)
        fresh = reply["slot"] != self.slot
        self.slot = reply["slot"]
        self.grants, self.activity = grants, activity
        self.process = Process(activity, grants, self.slot)
        if fresh:
            self.process.activate()
        self._say(reply=reply)

    @property
    def stale(self) -> bool:
        return self.grants.generation != self.activity.generation

    def take_turn(self) -> None:
        """Work for as long as the next lease lasts. Back without one after 100 ms, and then, as a gate does at every
        look, says again what it wants: who slept through a lease is taken to want no more."""
        if self.stale:
            self.attach()
            self.process.want()
        epoch, _ = self.process.wait_lease(100_000_000)
        if not epoch:
            self.process.want()
            return
        self._say(epoch=epoch)
        self.process.submit(epoch)
        while self.process.usable() == epoch and not self.stale:
            started = time.monotonic_ns()
            if self.process.affords():
                self.process.work(200_000)
                self.process.count(time.monotonic_ns() - started)
            else:
                time.sleep(0.001)
        self.process.drain(epoch)


class Child:
    """The handle of such a process."""

    def __init__(self, door: Path, environment: Mapping[str, str], *, use: bool) -> None:
        argv = [sys.executable, "-m", "tests.integration.process", str(door), "use" if use else "sit"]
        self.popen = subprocess.Popen(
            argv, env=dict(environment), cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )
        self.epochs: list[int] = []
        self.replies: list[dict[str, Any]] = []
        self._attached = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def await_attached(self) -> None:
        assert self._attached.wait(60), "the process did not attach"

    @property
    def pid(self) -> int:
        return self.popen.pid

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            said = json.loads(line)
            if "reply" in said:
                self.replies.append(said["reply"])
            else:
                self.epochs.append(said["epoch"])
            self._attached.set()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._listener.join()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


def main(door: Path, *, use: bool) -> None:
    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    attached = Attached(door, say)
    if not use:
        sys.stdin.read()
        return
    attached.process.want()
    while True:
        attached.take_turn()


if __name__ == "__main__":
    main(Path(sys.argv[1]), use=sys.argv[2] == "use")
