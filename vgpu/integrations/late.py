"""Programs that get their vGPU after their start, in their own process: workers of Ray and of Dask.

The hook reads ``VGPU_ID`` at ``cuInit``. So such a program is started with the hook (``hooked``), and makes its vGPU
before its first call of CUDA. The node removes the vGPU with the process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from client_hook.environment import Attachment, Changes, Simulation, hook_to_preload, simulation_libraries
from client_hook.errors import HookError
from client_hook.path_rules import is_hook
from vgpu.api.handle import Vgpu
from vgpu.api.link import open_link
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.blocking import client_socket

LOOK_S: Final = 0.5
WAIT_S: Final = 40.0
"""Ray ends a worker that has not registered after 60 s (worker_register_timeout_seconds), and its start takes time."""


def hooked() -> Changes:
    """The variables that load the hook into children, which then have no vGPU yet. ``VgpuError`` (unreachable): no node
    answers; (unavailable): the hook cannot be preloaded."""
    with open_link() as link:
        simulated = any(gpu["simulated"] for gpu in link.ask("gpus")["gpus"])
    runtime = client_socket().parent
    simulation = Simulation(runtime / "sim", simulation_libraries()) if simulated else None
    try:
        return Attachment((), runtime, hook_to_preload(), simulation).changes(os.environ) | {"VGPU_ID": None}
    except HookError as error:
        raise VgpuError(ErrorCode.UNAVAILABLE, error.message, error.hint) from error


def is_hooked() -> bool:
    """Whether this process has loaded the hook."""
    maps = Path("/proc/self/maps").read_text(errors="replace")
    return any(is_hook(line.split()[-1]) for line in maps.splitlines() if line)


def patiently(make: Callable[[], Vgpu], wait_s: float, meanwhile: Callable[[float], None] = lambda now: None) -> Vgpu:
    """What ``make`` gives, once there is room. ``meanwhile`` gets the time by the monotonic clock, at each look."""
    begun = time.monotonic()
    parent = os.getppid()
    while True:
        try:
            return make()
        except VgpuError as error:
            waited = time.monotonic() - begun
            if error.code is not ErrorCode.NO_ROOM or os.getppid() != parent:
                raise
            if waited >= wait_s:
                after = f" (waited {wait_s:g} s)" if wait_s else ""
                raise VgpuError(error.code, f"{error.message}{after}", error.hint) from None
        meanwhile(time.monotonic())
        time.sleep(LOOK_S)
