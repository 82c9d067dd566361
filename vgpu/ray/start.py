"""``vgpuctl ray-worker``: this process becomes a worker of Ray, in a vGPU that ends with it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from client_hook.environment import Attachment, Simulation, hook_to_preload, simulation_libraries
from client_hook.launcher import replace_process
from vgpu.api import programs
from vgpu.api.node import Node
from vgpu.errors import ErrorCode, VgpuError
from vgpu.paths import NodePaths
from vgpu.ray import room
from vgpu.spec import VgpuSpec


def become(command: Sequence[str], spec: VgpuSpec, gpu: str, wait_s: float) -> NoReturn:
    """Run ``command`` in a new vGPU. ``VgpuError``: as ``vgpu.create``."""
    vgpu = room.create(spec, gpu, room.worker_id(command), wait_s)
    replace_process(command, programs.prepared(vgpu.reading, command))


def become_undecided(command: Sequence[str], spec: VgpuSpec, wait_s: float) -> NoReturn:
    """Run ``command`` with the hook and without a vGPU: the worker makes one once Ray has assigned a GPU to it."""
    template = spec.model_dump(mode="json", exclude_none=True)
    command = inside(command, {"template": template, "wait_s": wait_s})
    environment = _hooked().environment(os.environ)
    del environment["VGPU_ID"]
    replace_process(command, environment)


def become_refused(command: Sequence[str], reason: str) -> NoReturn:
    """Run ``command`` so that its task fails with ``reason``. Where a worker ends early, Ray starts another, again and
    again, and the task would wait for ever."""
    replace_process(inside(command, {"refusal": reason}), os.environ)


def inside(command: Sequence[str], told: dict[str, Any]) -> list[str]:
    """``python OPTIONS SCRIPT ...`` with ``vgpu.ray.worker`` before the script. ``VgpuError``: there is no script."""
    at = next((at for at, word in enumerate(command) if word.endswith(".py")), None)
    if at is None:
        raise VgpuError(
            ErrorCode.INVALID, "the command starts no worker of Ray", "give it to Ray as py_executable (vgpu.ray)"
        )
    return [*command[:at], "-m", "vgpu.ray.worker", json.dumps(told), *command[at:]]


def _hooked() -> Attachment:
    runtime = NodePaths.from_environment().runtime
    with Node().open_link() as link:
        simulated = any(gpu["simulated"] for gpu in link.ask("gpus")["gpus"])
    simulation = Simulation(runtime / "sim", simulation_libraries()) if simulated else None
    return Attachment((), runtime, hook_to_preload(), simulation)
