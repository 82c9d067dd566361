"""What a test does as another user, in a fork: that user may not even reach the interpreter. Needs root."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration import process

STRANGER = 65534


def as_user(act: Callable[[], Any], uid: int = STRANGER, groups: Sequence[int] = ()) -> Any:
    """What ``act`` returns as ``uid``, through JSON; the text of what it raised, if it did."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become(uid, groups)
            said = act()
        except BaseException as error:
            said = repr(error)
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        said = json.load(pipe)
    os.waitpid(child, 0)
    return said


def become(uid: int, groups: Sequence[int] = ()) -> None:
    if uid == os.getuid():
        return
    os.setgroups(list(groups))
    os.setgid(uid)
    os.setuid(uid)


class Crowd:
    """Processes that knock once at a vGPU's socket and stay, as programs do that sit in it. Context manager."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def knock(self, door: Path, uid: int | None = None, **changes: Any) -> dict[str, Any]:
        """One more process; what the broker answered it."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                become(os.getuid() if uid is None else uid)
                said, _ = process.knock(door, process.attach_request(**changes))
            except BaseException as error:
                said = {"ok": False, "code": "", "error": repr(error)}
            os.write(writing, json.dumps(said).encode())
            while True:
                time.sleep(3600)
        os.close(writing)
        self.pids.append(child)
        with os.fdopen(reading, "rb") as pipe:
            return dict(json.loads(os.read(pipe.fileno(), 1 << 16)))

    def leave(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids = []


@contextmanager
def crowd() -> Iterator[Crowd]:
    found = Crowd()
    try:
        yield found
    finally:
        found.leave()
