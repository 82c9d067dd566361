"""The driver's checkpoint calls, in a process of their own, and the ``Checkpointer`` that starts that process.

``python -m gpuserver.device.nvidia.checkpoint PARENT suspend|resume|probe [OLD=NEW] PID:START:UIDS:GID…``

Reasons for a process: the calls block for as long as memory is copied, and they need the driver library, which a GPU
Server does not load. The process ends with its parent, so that no process stays suspended unknown to its server. Each
action may be repeated, whatever became of the process that did it before: the driver reports what is left to do.

The action reaches all targets or none. A target that has ended is skipped; START, in clock ticks, detects a reused pid.
A target that runs as another user than UIDS and GID allow is refused (gpuserver/device/pidfd.py). The output is one
JSON object; ``stuck`` has the processes that are left between two states. The exit code is 0 if the action was done.

OLD=NEW, UUIDs: the targets were checkpointed on one GPU and are restored on another. The driver needs a mapping of all
GPUs, and does not report where a process was. So the two GPUs change places, and NVML shows whether that was right.

Needs driver 570 or newer (580 for another GPU), the privileges of a debugger over the processes, and no MPS.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from client_hook import interpreter
from gpuserver.device.base import CheckpointAction, CheckpointOutcome, Onto
from gpuserver.device.nvidia.nvml import NvmlGpu
from gpuserver.device.pidfd import Target, opened
from vgpu.errors import VgpuError
from vgpu.identity import Process
from vgpu.protocol.peer import is_alive

LOCK_S: Final = 10.0
"""The work that the processes have queued has to end within this time. A kernel that never ends cannot be suspended."""
PR_SET_PDEATHSIG: Final = 1
_NOT_FOR_THE_DRIVER: Final = frozenset({"LD_PRELOAD", "VGPU_ID", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"})
RUNNING, LOCKED, CHECKPOINTED, FAILED = 0, 1, 2, 3
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_READY, NOT_SUPPORTED = 0, 1, 2, 600, 801
ANOTHER_GPU: Final = -1
ANOTHER_USER: Final = -2
REASONS: Final = {
    ANOTHER_GPU: "the driver does not bring it to that GPU: 580 is the first that can, between GPUs of one kind",
    ANOTHER_USER: "it runs as another user now, whom the vGPU does not belong to; end it",
    INVALID_VALUE: "the driver knows no CUDA process of that number, or may not touch it",
    OUT_OF_MEMORY: "there is no room for its memory: on the host to suspend it, on the GPU to resume it",
    NOT_READY: f"its work on the GPU did not end within {LOCK_S:g} s",
    NOT_SUPPORTED: "the driver cannot checkpoint it: MPS, managed or shared memory, or a driver before 570",
}


class Refused(Exception):
    """A call failed. The message names the process and the reason."""

    def __init__(self, pid: int, call: str, code: int) -> None:
        self.call, self.code = call, code
        super().__init__(f"process {pid}: {REASONS.get(code, f'{call} failed with {code}')}")


class LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = [("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7)]


class GpuPair(ctypes.Structure):
    """CUcheckpointGpuPair."""

    _fields_ = [("old", ctypes.c_char * 16), ("new", ctypes.c_char * 16)]


class RestoreArguments(ctypes.Structure):
    """CUcheckpointRestoreArgs."""

    _fields_ = [
        ("pairs", ctypes.POINTER(GpuPair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * 44),
        ("reserved1", ctypes.c_uint64),
    ]


class Driver:
    """The calls, by their short names; ``Refused`` if one fails."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def uuids(self) -> list[str]:
        """The UUIDs of all GPUs."""
        count, uuid = ctypes.c_int(), (ctypes.c_char * 16)()
        self._library.cuDeviceGetCount(ctypes.byref(count))
        found = []
        for ordinal in range(count.value):
            self._library.cuDeviceGetUuid_v2(uuid, ordinal)
            found.append(text_of(uuid.raw))
        return found

    def where(self, pid: int) -> str:
        """The GPU on which the process has memory; "" if that is not known."""
        for uuid in self.uuids():
            try:
                with NvmlGpu(uuid) as gpu:
                    if gpu.memory_use().by_pid.get(pid):
                        return uuid
            except VgpuError:
                pass
        return ""

    def probe(self) -> None:
        """``AttributeError``: this driver has no checkpoints."""
        self._library.cuCheckpointProcessLock  # noqa: B018  it is looked up

    def state(self, pid: int) -> int:
        found = ctypes.c_int()
        self._call("GetState", pid, ctypes.byref(found))
        return found.value

    def lock(self, pid: int, timeout_s: float) -> None:
        self._call("Lock", pid, ctypes.byref(LockArguments(timeout_ms=max(1, int(timeout_s * 1000)))))

    def checkpoint(self, pid: int) -> None:
        self._call("Checkpoint", pid, None)

    def restore(self, pid: int, onto: Onto | None) -> None:
        if onto is None:
            self._call("Restore", pid, None)
            return
        uuids = self.uuids()
        pairs = (GpuPair * len(uuids))()
        for pair, uuid in zip(pairs, uuids, strict=True):
            ctypes.memmove(ctypes.byref(pair), bytes_of(uuid) + bytes_of(onto.of(uuid)), ctypes.sizeof(GpuPair))
        try:
            self._call("Restore", pid, ctypes.byref(RestoreArguments(pairs, len(uuids))))
        except Refused as refusal:
            if refusal.code == INVALID_VALUE:
                raise Refused(pid, refusal.call, ANOTHER_GPU) from refusal
            raise

    def unlock(self, pid: int) -> None:
        self._call("Unlock", pid, None)

    def _call(self, name: str, pid: int, argument: object) -> None:
        code = int(getattr(self._library, f"cuCheckpointProcess{name}")(pid, argument))
        if code != SUCCESS:
            raise Refused(pid, f"cuCheckpointProcess{name}", code)


Step = Callable[[int], None]


def each(targets: Sequence[Target], step: Step) -> list[Refused]:
    """Do ``step`` with each target that lives; the refusals of those that still live afterwards.

    The driver takes a pid, so a pidfd holds the process during the step, and the process is checked behind that pidfd.
    """
    refusals = []
    for target in targets:
        try:
            with opened(target):
                step(target.process.pid)
        except ProcessLookupError:
            continue
        except PermissionError:
            refusals.append(Refused(target.process.pid, "", ANOTHER_USER))
        except Refused as refusal:
            if is_alive(target.process):
                refusals.append(refusal)
    return refusals


def suspend(driver: Driver, processes: Sequence[Target], onto: Onto | None = None) -> tuple[list[Refused], list[int]]:
    """Move what the processes have on the GPU to host memory: (refusals, stuck). After a refusal all run again, except
    the stuck ones."""
    until_s = time.monotonic() + LOCK_S

    def lock(pid: int) -> None:
        if driver.state(pid) == RUNNING:
            driver.lock(pid, until_s - time.monotonic())

    def checkpoint(pid: int) -> None:
        if driver.state(pid) == LOCKED:
            driver.checkpoint(pid)

    refusals = each(processes, lock) or each(processes, checkpoint)  # all are locked before the first copy
    if not refusals:
        return [], []
    each(processes, lambda pid: restore(driver, pid, onto))
    return refusals, unlock_all(driver, processes)


def resume(driver: Driver, processes: Sequence[Target], onto: Onto | None = None) -> tuple[list[Refused], list[int]]:
    """The reverse: (refusals, stuck). After a refusal all are checkpointed again, except the stuck ones."""
    refusals = each(processes, lambda pid: restore(driver, pid, onto))
    if not refusals:
        return [], unlock_all(driver, processes)

    def checkpoint(pid: int) -> None:
        if driver.state(pid) == LOCKED:
            driver.checkpoint(pid)

    each(processes, checkpoint)
    return refusals, stuck_of(driver, processes, CHECKPOINTED)


def probe(driver: Driver, processes: Sequence[Target], onto: Onto | None = None) -> tuple[list[Refused], list[int]]:
    """Only find out whether the driver has the calls."""
    driver.probe()
    return [], []


def restore(driver: Driver, pid: int, onto: Onto | None) -> None:
    """Restore the process on its GPU, whichever GPU it is on: an earlier attempt may have been killed half-way."""
    if driver.state(pid) == CHECKPOINTED:
        driver.restore(pid, onto)
    if onto is None or driver.state(pid) != LOCKED:
        return
    found = driver.where(pid)
    if found and found != onto.new:
        driver.checkpoint(pid)
        driver.restore(pid, Onto(found, onto.new))


def unlock_all(driver: Driver, processes: Sequence[Target]) -> list[int]:
    """Unlock all; the pids that do not run afterwards."""

    def unlock(pid: int) -> None:
        if driver.state(pid) == LOCKED:
            driver.unlock(pid)

    each(processes, unlock)
    return stuck_of(driver, processes, RUNNING)


def stuck_of(driver: Driver, targets: Sequence[Target], wanted: int) -> list[int]:
    """The pids of those that live in another state than ``wanted``."""
    found = []
    for target in targets:
        with suppress(ProcessLookupError, PermissionError), opened(target):
            if state_of(driver, target.process) not in {None, wanted}:
                found.append(target.process.pid)
    return found


def state_of(driver: Driver, process: Process) -> int | None:
    """None: the process has ended."""
    try:
        state = driver.state(process.pid)
    except Refused:
        state = FAILED
    return state if is_alive(process) else None


def text_of(uuid: bytes) -> str:
    digits = uuid.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def bytes_of(uuid: str) -> bytes:
    return bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))


def end_with(parent: int) -> None:
    """The kernel kills this process when ``parent`` ends (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the server that asked is no more")


class NvidiaCheckpointer:
    """The ``Checkpointer`` of this driver: one process for each action."""

    def run(
        self, action: CheckpointAction, targets: Sequence[Target] = (), onto: Onto | None = None
    ) -> CheckpointOutcome:
        if not targets and action != "probe":
            return CheckpointOutcome("", (), 0)
        moves = [f"{onto.old}={onto.new}"] if onto else []
        names = [target.text for target in targets]
        argv = interpreter.command("gpuserver.device.nvidia.checkpoint", str(os.getpid()), action, *moves, *names)
        inherited = interpreter.environment(os.environ)
        environment = {name: value for name, value in inherited.items() if name not in _NOT_FOR_THE_DRIVER}
        try:
            ran = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
            outcome = json.loads(ran.stdout)
        except OSError as error:
            return CheckpointOutcome(f"the driver's calls did not start: {error}", (), 0)
        except ValueError:
            last = ran.stderr.strip().rpartition("\n")[2]
            return CheckpointOutcome(last or f"the driver's calls ended with {ran.returncode}", (), 0)
        return CheckpointOutcome(str(outcome["reason"]), tuple(outcome["stuck"]), float(outcome["seconds"]))


def main(arguments: Sequence[str]) -> int:
    parent, action, *names = arguments
    end_with(int(parent))
    onto = Onto.parse(names.pop(0)) if names and "=" in names[0] else None
    processes = [Target.parse(name) for name in names]
    began_ns = time.monotonic_ns()
    reason, stuck = "", [target.process.pid for target in processes]
    try:
        library = ctypes.CDLL("libcuda.so.1")
        if library.cuInit(0) != SUCCESS:
            raise OSError("the CUDA driver does not start")
        act = {"suspend": suspend, "resume": resume, "probe": probe}[action]
        refusals, stuck = act(Driver(library), processes, onto)
        reason = "; ".join(map(str, refusals))
    except AttributeError:
        reason, stuck = "this driver has no checkpoints: 570 is the first", []
    except OSError as error:
        reason, stuck = str(error), []
    done = not reason
    seconds = (time.monotonic_ns() - began_ns) / 1e9
    print(json.dumps({"done": done, "reason": reason, "stuck": stuck, "seconds": seconds}))
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
