"""Runs a container in a vGPU of its own, by the command line of a container engine.

A person or a script waits for the container. So this module and what it imports load no pydantic, trio or typer, unless
a node has to start first.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from client_hook.launcher import Supervision
from vgpu.api.link import Reading, open_link_for_vgpu
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import engines
from vgpu.integrations.engines import Engine
from vgpu.integrations.keeper import labels_of, remove
from vgpu.integrations.keeper import start as start_keeper


def run(spec: Mapping[str, Any], gpu: str, engine: str, words: Sequence[str], *, detach: bool) -> int:
    """The exit code of ``ENGINE run WORDS``. ``spec``: fields of a ``VgpuSpec``. The container gets the vGPU's name.

    ``VgpuError``: no engine, or no vGPU. ``CannotStart``: the engine's command does not start.
    """
    found = engines.find(engine)
    name = spec.get("name")
    given = [*(["--detach"] if detach else []), *([f"--name={name}"] if name else []), *words]
    keeper, pipe = start_keeper(found)
    try:
        vgpu, volumes = _make(spec, gpu, found, keeper, pipe)
        vgpu_id, uuid = vgpu["vgpu_id"], "" if vgpu["simulated"] else vgpu["gpu_uuid"]
        with Supervision() as supervision:
            code = supervision.run(found.run_command(given, vgpu_id, volumes, uuid), dict(os.environ))
        containers = found.containers(vgpu_id)
        if containers == [] or (containers is None and code):
            os.kill(keeper, signal.SIGKILL)
            remove(vgpu_id)
    finally:
        os.close(pipe)
    if containers and not detach:
        print(
            f"vgpuctl: the container has ended and still exists, with {vgpu_id}\n  → {found.name} rm frees both",
            file=sys.stderr,
        )
    return code


def _make(spec: Mapping[str, Any], gpu: str, engine: Engine, keeper: int, pipe: int) -> tuple[Reading, Sequence[str]]:
    """The vGPU and its mounts. The keeper has it before the node keeps it."""
    request = uuid4().hex
    claim = {"kind": "container", "uid": spec.get("name") or uuid4().hex, "labels": labels_of(engine, keeper)}
    wanted = {"spec": dict(spec), "gpu": gpu, "attach": "mount", "claim": claim}
    with open_link_for_vgpu() as link:
        vgpu = link.change("create", **wanted, request_id=request, lifetime="kept")
        volumes = link.ask("inspect", vgpu=vgpu["vgpu_id"])["mounts"]
        if not volumes:
            reason = "the node could not copy the hook for containers"
            raise VgpuError(ErrorCode.UNAVAILABLE, reason, "vgpuctl logs says why")
        os.write(pipe, vgpu["vgpu_id"].encode())
        link.change("confirm", request_id=request)
    return vgpu, volumes
