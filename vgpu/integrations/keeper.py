"""Keeps a vGPU for as long as the engine has its container.

A program that makes a container starts the keeper: by ``fork``, or by ``spawn`` if it has threads, as the dashboard.
``make`` makes the vGPU and writes its id to the keeper's pipe. The program closes the pipe once the engine has the
container. From then on the keeper compares levels, every few seconds: does the engine have a container with this vGPU?
No single message can be lost. After the keeper's own death ``vgpuctl container ls`` does the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from client_hook import interpreter
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.engines import Engine, at

if TYPE_CHECKING:
    from vgpu.api.link import Link, Reading
    from vgpu.protocol.messages import VgpuStatus

LOOK_S: Final = 3.0
ENGINE: Final = "engine"
KEEPER: Final = "keeper"
"""Labels of the claim: the engine's command, and the keeper as ``PID:START``."""


def make(
    link: Link, spec: Mapping[str, Any], gpu: str, engine: Engine, keeper: int, pipe: int
) -> tuple[Reading, list[str]]:
    """A vGPU and its volumes for a container, with fields of a ``VgpuSpec``. ``keeper``, ``pipe``: the keeper's pid and
    pipe. It has the id before the node keeps the vGPU."""
    request, uid = uuid4().hex, spec.get("name") or uuid4().hex
    claim = {"kind": "container", "uid": uid, "labels": labels_of(engine, keeper)}
    wanted = {"spec": dict(spec), "gpu": gpu, "attach": "mount", "claim": claim, "lifetime": "kept"}
    vgpu = link.change("create", **wanted, request_id=request)
    volumes = link.ask("inspect", vgpu=vgpu["vgpu_id"])["mounts"]
    if not volumes:
        reason = "the node could not copy the hook for containers"
        raise VgpuError(ErrorCode.UNAVAILABLE, reason, "vgpuctl logs says why")
    os.write(pipe, vgpu["vgpu_id"].encode())
    link.change("confirm", request_id=request)
    return vgpu, list(volumes)


def labels_of(engine: Engine, keeper_pid: int) -> dict[str, str]:
    """Of the claim of a container whose keeper has this pid."""
    from vgpu.protocol.peer import start_time

    return {ENGINE: engine.path, KEEPER: f"{keeper_pid}:{start_time(keeper_pid)}"}


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
    from vgpu.api.link import open_link

    while True:
        try:
            with open_link() as node:
                node.change("remove", vgpu=vgpu_id, force=True)
                return
        except VgpuError as error:
            if error.code in {ErrorCode.NOT_FOUND, ErrorCode.REMOVED, ErrorCode.NOT_YOURS}:
                return
        time.sleep(LOOK_S)


def spawn(engine: Engine) -> subprocess.Popen[bytes]:
    """A keeper in an interpreter of its own; its stdin is the pipe."""
    environment = interpreter.environment(os.environ)
    return subprocess.Popen(
        _command(engine.path), env=environment, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
    )


def resume(engine: Engine, vgpu_id: str) -> subprocess.Popen[bytes]:
    """A keeper for the vGPU of a container whose keeper has died, as with the machine."""
    argv, nothing = _command(engine.path, vgpu_id), subprocess.DEVNULL
    given = interpreter.environment(os.environ)
    return subprocess.Popen(argv, env=given, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def _command(*words: str) -> list[str]:
    return interpreter.command("vgpu.integrations.keeper", *words)


def fork(engine: Engine) -> tuple[int, int]:
    """A keeper that outlives this process, and a signal to its process group: its pid, and the end of its pipe where
    this process writes the vGPU's id. This process has one thread, so the keeper needs no interpreter of its own."""
    theirs, ours = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    try:
        os.setsid()
        os.close(ours)
        _stand_by(engine, theirs)
    finally:
        os._exit(0)


def _stand_by(engine: Engine, pipe: int) -> None:
    said = b""
    while part := os.read(pipe, 4096):  # until the engine's command has ended
        said += part
    if not said:
        return
    vgpu_id = said.decode().strip()
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if engine.containers(vgpu_id) == []:
        remove(vgpu_id)
        return
    argv = _command(engine.path, vgpu_id)
    os.execve(argv[0], argv, interpreter.environment(os.environ))


def main() -> None:
    """With the vGPU as second argument it keeps that; without, it stands by at its stdin first."""
    engine = at(sys.argv[1])
    if len(sys.argv) == 2:
        _stand_by(engine, 0)
        return
    vgpu_id = sys.argv[2]
    while (containers := engine.containers(vgpu_id)) != []:
        if containers is None and not is_needed(engine, vgpu_id):
            return
        time.sleep(LOOK_S)
    remove(vgpu_id)


def is_needed(engine: Engine, vgpu_id: str) -> bool:
    """Whether a keeper whose engine does not answer waits on: not for a vGPU that is gone, nor where both the node and
    the engine's command are gone."""
    from vgpu.api.link import open_link

    try:
        with open_link() as node:
            node.ask("inspect", vgpu=vgpu_id)
    except VgpuError as error:
        if error.code is ErrorCode.UNREACHABLE:
            return Path(engine.path.removeprefix("unix://")).exists()
        return error.code not in {ErrorCode.NOT_FOUND, ErrorCode.REMOVED}
    return True


if __name__ == "__main__":
    main()
