"""Which environment variables make a process a vGPU process, and how they join what is already set.

======================  ==============================================================================================
``VGPU_ID``             the vGPU, or several separated by commas, on different GPUs
``VGPU_RUNTIME_DIR``    where the node's sockets are
``LD_PRELOAD``          the hook, after whatever was preloaded already
``VGPU_SIM_DIR``        simulated nodes only: the files that stand for the GPUs
``LD_LIBRARY_PATH``     simulated nodes only: the directory of the stand-in ``libcuda.so.1``, before everything else
======================  ==============================================================================================

The hook goes last in ``LD_PRELOAD``: nearest to the driver, so that it counts what other preloaded libraries add. A
second copy of the hook in one process would gate every launch twice, so an older entry gives way to the new one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import cython_ext
from client_hook.errors import HookError
from client_hook.path_rules import HOOK_NAME, applied, is_hook

SYSTEM_PRELOAD: Final = Path("/etc/ld.so.preload")
_LIBRARIES: Final = Path(cython_ext.__file__).parent / "lib"
_PRELOAD_SEPARATORS: Final = re.compile(r"[\s:]+")

Changes = dict[str, str | None]
"""Variables to set, or to unset (None)."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The simulated GPUs of a node: ``directory`` holds one file per GPU, ``libraries`` the stand-in driver."""

    directory: Path
    libraries: Path


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a process needs to know to become one of a vGPU. ``hook`` is None where the system preloads it anyway."""

    vgpu_ids: tuple[str, ...]
    runtime_dir: Path
    hook: Path | None
    simulation: Simulation | None = None

    def changes(self, inherited: Mapping[str, str]) -> Changes:
        """What to set and unset, given the environment the process would have had.

        Raises :class:`HookError` if the path of the hook cannot be written into ``LD_PRELOAD``.
        """
        changes: Changes = {"VGPU_ID": ",".join(self.vgpu_ids), "VGPU_RUNTIME_DIR": str(self.runtime_dir)}
        preload = joined_preload(inherited.get("LD_PRELOAD", ""), self.hook)
        if preload or "LD_PRELOAD" in inherited:
            changes["LD_PRELOAD"] = preload or None
        changes |= self._simulation_changes(inherited)
        return changes

    def _simulation_changes(self, inherited: Mapping[str, str]) -> Changes:
        # What an earlier simulated vGPU left in this shell would lead a real one to the stand-in driver.
        kept = [p for p in inherited.get("LD_LIBRARY_PATH", "").split(":") if p and not _is_simulation(Path(p))]
        if self.simulation is not None:
            paths = [str(self.simulation.libraries), *kept]
            return {"VGPU_SIM_DIR": str(self.simulation.directory), "LD_LIBRARY_PATH": ":".join(paths)}
        if "VGPU_SIM_DIR" not in inherited:
            return {}
        return {"VGPU_SIM_DIR": None, "LD_LIBRARY_PATH": ":".join(kept) or None}

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of such a process: ``inherited`` with :meth:`changes` and rules of paths applied."""
        merged = dict(inherited)
        for name, value in self.changes(inherited).items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = value
        return applied(merged)


def joined_preload(existing: str, hook: Path | None) -> str:
    """``LD_PRELOAD`` with every other library kept in order and ``hook`` as its only copy of the hook, last.

    ld.so separates entries by spaces and colons and knows no quoting; a path with one of them cannot be preloaded.
    """
    kept = [entry for entry in _PRELOAD_SEPARATORS.split(existing) if entry and not is_hook(entry)]
    if hook is None:
        return ":".join(kept)
    if _PRELOAD_SEPARATORS.search(str(hook)):
        raise HookError(
            f"the hook's path {str(hook)!r} has a space or colon in it, which LD_PRELOAD cannot express",
            "vgpuctl hook install --system, or install st-vgpu under another path",
        )
    return ":".join([*kept, str(hook)])


def _is_simulation(directory: Path) -> bool:
    return directory == simulation_libraries() or directory.parts[-3:] == ("cython_ext", "lib", "sim")


def hook_library() -> Path:
    """The hook of this installation. Raises :class:`HookError` if it was never built."""
    path = _LIBRARIES / HOOK_NAME
    if not path.is_file():
        raise HookError(f"the hook is not built: {path} is missing", "make build, or reinstall st-vgpu")
    return path


def simulation_libraries() -> Path:
    """The directory of the stand-in ``libcuda.so.1`` and ``libnvidia-ml.so.1``."""
    return _LIBRARIES / "sim"


def hook_to_preload(system_preload: Path = SYSTEM_PRELOAD) -> Path | None:
    """The hook for ``LD_PRELOAD``: None if ``hook install --system`` already loads it into every process."""
    try:
        entries = preload_file_entries(system_preload.read_text())
    except OSError:
        entries = []
    return None if any(map(is_hook, entries)) else hook_library()


def preload_file_entries(text: str) -> list[str]:
    """The libraries an ``ld.so.preload`` of this content names; ``#`` starts a comment."""
    return [e for line in text.splitlines() for e in _PRELOAD_SEPARATORS.split(line.partition("#")[0].strip()) if e]


RUNTIME_ADDED: Final = "VGPU_RUNTIME_DIR_ADDED"
"""In a shell that had no ``VGPU_RUNTIME_DIR`` before it got a vGPU."""


def activation(attachment: Attachment, inherited: Mapping[str, str]) -> Changes:
    """What makes the programs of a shell programs of a vGPU; ``deactivation`` undoes it."""
    added: Changes = {} if inherited.get("VGPU_RUNTIME_DIR") else {RUNTIME_ADDED: "1"}
    return attachment.changes(inherited) | added


def deactivation(inherited: Mapping[str, str]) -> Changes:
    """What to set and unset in a shell that got a vGPU, so that its programs are in none. Other libraries stay."""
    gone = ["VGPU_ID", "VGPU_SIM_DIR"]
    if RUNTIME_ADDED in inherited:
        gone += ["VGPU_RUNTIME_DIR", RUNTIME_ADDED]
    changes: Changes = {name: None for name in gone if name in inherited}
    if "LD_PRELOAD" in inherited:
        changes["LD_PRELOAD"] = joined_preload(inherited["LD_PRELOAD"], None) or None
    if "LD_LIBRARY_PATH" in inherited:
        kept = [p for p in inherited["LD_LIBRARY_PATH"].split(":") if p and not _is_simulation(Path(p))]
        changes["LD_LIBRARY_PATH"] = ":".join(kept) or None
    return changes


def fish_lines(changes: Changes) -> str:
    """Lines for ``source`` or ``eval`` in fish."""
    return "\n".join(
        f"set -e {name};" if value is None else f"set -gx {name} {_fish_quoted(value)};"
        for name, value in changes.items()
    )


def _fish_quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def shell_lines(changes: Changes) -> str:
    """Lines for ``eval`` in any POSIX shell."""
    return "\n".join(
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}" for name, value in changes.items()
    )
