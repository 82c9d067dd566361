"""The environment that makes a program one of a vGPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from client_hook.environment import Attachment, Changes, Simulation, hook_to_preload, simulation_libraries
from client_hook.errors import HookError
from client_hook.preloadable import check_preloadable
from client_hook.sanitizers import with_sanitizers_first
from vgpu.api.link import Reading
from vgpu.errors import ErrorCode, VgpuError


def attachment(reading: Reading) -> Attachment:
    """What makes a process one of this vGPU."""
    given = reading["environment"]
    simulation = Simulation(Path(given["VGPU_SIM_DIR"]), simulation_libraries()) if reading["simulated"] else None
    runtime = Path(given["VGPU_RUNTIME_DIR"])
    return Attachment((reading["vgpu_id"],), runtime, hook_to_preload(), simulation)


def changes(reading: Reading) -> Changes:
    """The variables to set in this process, and to unset (None), for children in the vGPU. ``VgpuError``
    (unavailable): this installation has no hook that can be preloaded."""
    try:
        return attachment(reading).changes(os.environ)
    except HookError as error:
        raise VgpuError(ErrorCode.UNAVAILABLE, error.message, error.hint) from error


def environment(reading: Reading, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """``inherited`` (by default this process's environment) for a program in the vGPU. Errors: as ``changes``."""
    try:
        return attachment(reading).environment(os.environ if inherited is None else inherited)
    except HookError as error:
        raise VgpuError(ErrorCode.UNAVAILABLE, error.message, error.hint) from error


def prepared(
    reading: Reading, command: str | Sequence[str], inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """``environment`` for ``command``. ``VgpuError`` (invalid): it would not load the hook, and so would have no
    limits."""
    given = environment(reading, inherited)
    if isinstance(command, str) or not command:
        return given
    argv = [os.fsdecode(part) for part in command]
    try:
        check_preloadable(argv, given, system_hook=hook_to_preload() is None, command="vgpuctl exec")
    except HookError as error:
        raise VgpuError(ErrorCode.INVALID, error.message, error.hint) from error
    return with_sanitizers_first(argv[0], given)
