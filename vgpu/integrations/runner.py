"""Runs a container in a vGPU of its own, by the command line of a container engine.

A person or a script waits for the container. So this module and what it imports load no pydantic, trio or typer, unless
a node has to start first.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from client_hook.launcher import Supervision
from vgpu.api.link import open_link_for_vgpu
from vgpu.integrations import engines, keeper

STARTED_NONE: Final = range(125, 128)
"""Exit codes of an engine that could not start the container."""


def run(spec: Mapping[str, Any], gpu: str, engine: str, words: Sequence[str], *, detach: bool) -> int:
    """The exit code of ``ENGINE run WORDS``. ``spec``: fields of a ``VgpuSpec``. The container gets the vGPU's name.

    ``VgpuError``: no engine, or no vGPU. ``CannotStart``: the engine's command does not start.
    """
    found = engines.find(engine)
    name = spec.get("name")
    given = [*(["--detach"] if detach else []), *([f"--name={name}"] if name else []), *words]
    pid, pipe = keeper.fork(found)
    try:
        with open_link_for_vgpu() as link:
            vgpu, volumes = keeper.make(link, spec, gpu, found, pid, pipe)
        vgpu_id, uuid = vgpu["vgpu_id"], "" if vgpu["simulated"] else vgpu["gpu_uuid"]
        with Supervision() as supervision:
            code = supervision.run(found.run_command(given, vgpu_id, volumes, uuid), dict(os.environ))
        containers = found.containers(vgpu_id)
        if containers == [] or (containers is None and code in STARTED_NONE):
            os.kill(pid, signal.SIGKILL)
            keeper.remove(vgpu_id)
    finally:
        os.close(pipe)
    if containers and not detach and not found.containers(vgpu_id, running=True):
        print(
            f"vgpuctl: the container has ended and still exists, with {vgpu_id}\n  → {found.name} rm frees both",
            file=sys.stderr,
        )
    return code
