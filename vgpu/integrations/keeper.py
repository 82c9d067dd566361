"""``python -m vgpu.integrations.keeper ENGINE``: keeps a vGPU for as long as the engine has its container.

A program that makes a container (``vgpuctl container run``, the dashboard) starts the keeper with ``start``. ``make``
makes the vGPU and writes its id to the keeper's stdin. The program closes that once the engine has the container.
From then on the keeper compares levels, every few seconds: does the engine have a container with this vGPU? No single
message can be lost. After the keeper's own death ``vgpuctl container ls`` does the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.engines import Engine, at

if TYPE_CHECKING:
    from vgpu.integrations.claims import Claim
    from vgpu.node.link import ControlLink
    from vgpu.protocol.messages import VgpuStatus
    from vgpu.spec import VgpuSpec

LOOK_S: Final = 3.0
ENGINE: Final = "engine"
KEEPER: Final = "keeper"
"""Labels of the claim: the engine's command, and the keeper as ``PID:START``."""


def start(engine: Engine) -> subprocess.Popen[str]:
    """A process that outlives this one, and a signal to its process group."""
    from client_hook import interpreter

    command = interpreter.command("vgpu.integrations.keeper", engine.path)
    environment = interpreter.environment(os.environ)
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True, text=True)


def make(
    node: ControlLink, spec: VgpuSpec, gpu: str, engine: Engine, keeper: subprocess.Popen[str]
) -> tuple[VgpuStatus, tuple[str, ...]]:
    """A vGPU that ``keeper`` keeps, and the volumes that bring it into a container."""
    from uuid import uuid4

    assert keeper.stdin is not None
    claim = claim_of(spec.name or uuid4().hex, engine, keeper.pid)
    vgpu = node.create(spec, gpu, claim=claim, attach="mount", confirm=False)
    volumes = node.inspect(vgpu.vgpu_id).mounts
    if not volumes:
        raise VgpuError(
            ErrorCode.UNAVAILABLE, "the node could not copy the hook for containers", "vgpuctl logs says why"
        )
    keeper.stdin.write(f"{vgpu.vgpu_id}\n")
    keeper.stdin.flush()
    node.confirm(vgpu)
    return vgpu, volumes


def claim_of(uid: str, engine: Engine, keeper_pid: int) -> Claim:
    from vgpu.integrations.claims import Claim
    from vgpu.protocol.peer import start_time

    labels = {ENGINE: engine.path, KEEPER: f"{keeper_pid}:{start_time(keeper_pid)}"}
    return Claim("container", uid, labels=labels)


def engine_of(vgpu: VgpuStatus) -> Engine | None:
    """The engine whose container has this vGPU; None: it is no vGPU of a container."""
    if vgpu.claim is None or vgpu.claim.kind != "container" or ENGINE not in vgpu.claim.labels:
        return None
    return at(vgpu.claim.labels[ENGINE])


def is_kept(vgpu: VgpuStatus) -> bool:
    """Whether the keeper of this vGPU's container lives."""
    from vgpu.identity import Process
    from vgpu.protocol.peer import is_running

    pid, _, started = (vgpu.claim.labels.get(KEEPER, "") if vgpu.claim else "").partition(":")
    return pid.isdecimal() and started.isdecimal() and is_running(Process(int(pid), int(started)))


def remove(vgpu_id: str) -> None:
    """Remove the vGPU. The node may be down for a while, so ask until it answers."""
    from vgpu.node.link import PATIENT_S, ControlLink

    while True:
        try:
            with ControlLink(timeout_s=PATIENT_S) as node:
                node.remove(vgpu_id, force=True)
                return
        except VgpuError as error:
            if error.code in {ErrorCode.NOT_FOUND, ErrorCode.REMOVED, ErrorCode.NOT_YOURS}:
                return
        time.sleep(LOOK_S)


def main() -> None:
    engine, vgpu_id = at(sys.argv[1]), sys.stdin.readline().strip()
    sys.stdin.read()  # until the engine's command has ended
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    while vgpu_id and engine.containers(vgpu_id) != []:
        time.sleep(LOOK_S)
    if vgpu_id:
        remove(vgpu_id)


if __name__ == "__main__":
    main()
