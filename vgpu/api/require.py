"""``require``: the current program runs in a vGPU of its own."""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path
from typing import Unpack

from client_hook import interpreter
from client_hook.errors import CannotStart
from client_hook.launcher import replace_process
from vgpu.api import programs
from vgpu.api.handle import discard
from vgpu.api.node import Node
from vgpu.api.options import Options, Percent, Size
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.container import HERE


def require(
    *,
    sm: Percent | None = None,
    mem: Size | None = None,
    name: str | None = None,
    gpu: int | str = "auto",
    **options: Unpack[Options],
) -> None:
    """Start this program again, in a new vGPU. If it runs in a vGPU already (``VGPU_ID``, or its container's), do
    nothing.

    Call it first: what the program has done so far, it does twice. The process keeps its pid, and the node removes the
    vGPU once the process has ended. Options: as ``create``. ``VgpuError``: as ``create``; ``invalid``: an interactive
    interpreter, or a program from standard input, cannot start again.
    """
    if os.environ.get("VGPU_ID") or any(Path(HERE).glob("vgpu-*")):
        return
    _check_repeatable()
    vgpu = Node().create(sm=sm, mem=mem, name=name, gpu=gpu, **options)
    try:
        command = interpreter.same_command()
        replace_process(command, programs.prepared(vgpu.reading, command))
    except CannotStart as error:
        raise VgpuError(ErrorCode.UNAVAILABLE, error.message, error.hint) from error
    finally:  # only reached where the program was not replaced
        discard(vgpu.id, None)


def _check_repeatable() -> None:
    if hasattr(builtins, "__IPYTHON__"):
        raise VgpuError(
            ErrorCode.INVALID, "a notebook's kernel cannot start again in a vGPU", "vgpuctl jupyter install --sm 30"
        )
    if sys.argv[0] in {"", "-"} or hasattr(sys, "ps1"):
        raise VgpuError(
            ErrorCode.INVALID, "a program from standard input cannot start again in a vGPU", "vgpu.create(), or a file"
        )
