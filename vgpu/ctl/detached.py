"""`vgpuctl run --detach`: the command goes on in a process of its own, and the caller gets the vGPU's id."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vgpu.paths import NodePaths, unusable


@dataclass(frozen=True, slots=True)
class Detached:
    """The process that goes on. It keeps the caller's stderr until ``made``, so the caller sees why it failed."""

    announced: int

    def made(self, vgpu_id: str) -> None:
        """The vGPU is there: from now on output goes to its file. ``VgpuError``: the file cannot be written."""
        path = log_of(vgpu_id)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unusable(path.parent, error, "VGPU_STATE_DIR") from error
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.write(self.announced, vgpu_id.encode())
        os.close(self.announced)


def log_of(vgpu_id: str) -> Path:
    return NodePaths.from_environment().state / "runs" / f"{vgpu_id}.log"


def detach() -> Detached | tuple[str, int]:
    """Fork. The child gets ``Detached``. The caller waits until the child has a vGPU or has failed, and gets the vGPU's
    id ("": it failed) and the child's exit code."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.setsid()
        return Detached(writing)
    os.close(writing)
    with os.fdopen(reading) as announced:
        vgpu_id = announced.read()
    return vgpu_id, 0 if vgpu_id else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
