"""``python -m gpuserver.device.checkpoint PARENT suspend|resume PID…``: the driver's checkpoint calls, in a process.

They block for as long as memory is copied, seconds for tens of GiB, and need the driver library, which a GPU Server
does not load. All processes or none: what was done to some is undone where another one refuses. Prints one JSON object;
exits with 0 if it is done. Ends with its parent, so that nobody is suspended whose server does not know. Either may be
asked again, whatever became of the process that was asked before.

Needs driver 570 or newer, the privileges of a debugger over the processes, and no MPS.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

LOCK_MS: Final = 10_000
"""What a process has queued has to be done by then; a kernel that never ends cannot be suspended."""
PR_SET_PDEATHSIG: Final = 1
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_READY, NOT_SUPPORTED = 0, 1, 2, 600, 801
REASONS: Final = {
    INVALID_VALUE: "the driver knows no CUDA process of that number, or may not touch it",
    OUT_OF_MEMORY: "the GPU has no room for its memory",
    NOT_READY: f"its work on the GPU did not end within {LOCK_MS // 1000} s",
    NOT_SUPPORTED: "the driver cannot checkpoint it (MPS, shared memory between processes, or a driver before 570)",
}


class Refused(Exception):
    """``pid``: whose; the message says why."""

    def __init__(self, pid: int, call: str, code: int) -> None:
        super().__init__(f"process {pid}: {REASONS.get(code, f'{call} failed with {code}')}")
        self.code = code


class LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = [("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7)]


class Driver:
    """The calls, by their short names; ``Refused`` if one fails."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def state(self, pid: int) -> int:
        found = ctypes.c_int()
        self._call("GetState", pid, ctypes.byref(found))
        return found.value

    def lock(self, pid: int) -> None:
        self._call("Lock", pid, ctypes.byref(LockArguments(timeout_ms=LOCK_MS)))

    def checkpoint(self, pid: int) -> None:
        self._call("Checkpoint", pid, None)

    def restore(self, pid: int) -> None:
        self._call("Restore", pid, None)

    def unlock(self, pid: int) -> None:
        self._call("Unlock", pid, None)

    def _call(self, name: str, pid: int, argument: object) -> None:
        code = int(getattr(self._library, f"cuCheckpointProcess{name}")(pid, argument))
        if code != SUCCESS:
            raise Refused(pid, f"cuCheckpointProcess{name}", code)


@dataclass(slots=True)
class Steps:
    """What was done, and how each of it is undone, last first."""

    undo: list[Callable[[], None]] = field(default_factory=list)

    def take(self, step: Callable[[int], None], back: Callable[[int], None], pid: int) -> None:
        step(pid)
        self.undo.append(lambda: back(pid))

    def take_back(self) -> None:
        while self.undo:
            self.undo.pop()()


def suspend(driver: Driver, pids: Sequence[int]) -> None:
    """Everything that ``pids`` have on the GPU goes to the host's memory. ``Refused``: nothing has changed."""
    states = {pid: driver.state(pid) for pid in pids}
    steps = Steps()
    try:
        for pid in pids:  # first all, so that none works on while another one is copied
            if states[pid] == RUNNING:
                steps.take(driver.lock, driver.unlock, pid)
        for pid in pids:
            if states[pid] != CHECKPOINTED:
                steps.take(driver.checkpoint, driver.restore, pid)
    except Refused:
        steps.take_back()
        raise


def resume(driver: Driver, pids: Sequence[int]) -> None:
    """Back again. ``Refused``: those that were out are out."""
    states = {pid: driver.state(pid) for pid in pids}
    steps = Steps()
    try:
        for pid in pids:
            if states[pid] == CHECKPOINTED:
                steps.take(driver.restore, driver.checkpoint, pid)
    except Refused:
        steps.take_back()
        raise
    for pid in pids:
        if states[pid] != RUNNING:
            driver.unlock(pid)


def end_with(parent: int) -> None:
    """Killed as soon as ``parent`` is no more (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the server that asked is no more")


def main(arguments: Sequence[str]) -> int:
    parent, action, *pids = arguments
    end_with(int(parent))
    began_ns = time.monotonic_ns()
    try:
        library = ctypes.CDLL("libcuda.so.1")
        if library.cuInit(0) != SUCCESS:
            raise OSError("the CUDA driver does not start")
        {"suspend": suspend, "resume": resume}[action](Driver(library), [int(pid) for pid in pids])
    except (Refused, OSError, AttributeError) as error:
        reason = "this driver has no checkpoints: 570 is the first" if isinstance(error, AttributeError) else str(error)
        print(json.dumps({"done": False, "reason": reason}))
        return 1
    print(json.dumps({"done": True, "seconds": (time.monotonic_ns() - began_ns) / 1e9}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
