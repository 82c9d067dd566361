"""``vgpuctl ray-worker``: this process becomes a worker of Ray, in a vGPU that ends with it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from client_hook import interpreter
from client_hook.launcher import replace_process
from vgpu.api import programs
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import late
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
    changed = os.environ | late.hooked()
    replace_process(command, {name: value for name, value in changed.items() if value is not None})


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
    return [*command[:at], *interpreter.running_first("vgpu.ray.worker", json.dumps(told), list(command[at:]))]
