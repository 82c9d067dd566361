"""What in a shell and its machine affects vGPU programs and a node, beyond driver and hook: stale variables, limits of
the user, a container, a time namespace, the disk.

``probe`` reads the machine. ``diagnose`` judges what ``probe`` found, and is pure. ``client_hook.doctor`` has the other
checks, in the same two parts.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from client_hook import namespaces
from client_hook.doctor import Finding, Verdict
from client_hook.environment import hook_library, simulation_libraries
from client_hook.errors import HookError
from client_hook.install import SystemInstallation
from client_hook.path_rules import is_hook

OPEN_FILES: Final = 1024
"""A node has 1024 links at most, and 64 vGPUs on one GPU take as many descriptors of its server."""
LITTLE_DISK_BYTES: Final = 256 << 20
"""Journal, events and logs of a node with eight GPUs, each as large as it becomes."""
NO_DISK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Preloaded:
    """A copy of the hook in ``LD_PRELOAD``. ``state``: current, stale (other bytes than this installation's), gone."""

    path: str
    state: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    open_files: int = OPEN_FILES  # -1: unlimited
    open_files_hard: int = -1
    clock_offset_s: float = 0.0
    foreign_pid_namespace: bool = False  # another one than the host's
    pid_namespace_allowed: bool = False  # a node may run there nevertheless
    container: str = ""  # docker, podman, kubernetes…; "": none that is noticed
    preloaded: tuple[Preloaded, ...] = ()
    system_hook: str = ""
    """Of the whole machine: "" not installed, current, stale, or gone: ld.so.preload names it, and it is not there."""
    simulation: str = ""
    """``VGPU_SIM_DIR``, or "": programs of this shell find simulated GPUs."""
    simulation_there: bool = True
    vgpu_id: str = ""
    log_level: str = ""
    state_dir: Path = Path("/var/lib/vgpu")
    free_bytes: int | None = None  # None: unknown


def diagnose(found: Surroundings) -> Iterator[Finding]:
    yield from _limits(found)
    yield from _shell(found)
    if found.container:
        yield Finding(
            "container",
            Verdict.NOTE,
            f"this is one ({found.container}): a node that runs outside is reached through what is mounted here alone",
            "mount its vGPU's directory, runtime directory/vgpus/VGPU_ID, at the same path, and give it the GPU",
        )
    if found.foreign_pid_namespace:
        yield Finding(
            "PID namespace",
            Verdict.NOTE if found.pid_namespace_allowed else Verdict.MISSING,
            "this is not the host's: a node here cannot identify programs outside it, and admits none of them",
            namespaces.REMEDY,
        )
    if found.clock_offset_s:
        yield Finding(
            "clock",
            Verdict.NOTE if abs(found.clock_offset_s) < 1 else Verdict.MISSING,
            f"a time namespace: CLOCK_MONOTONIC is {found.clock_offset_s:+.3g} s off the host's, and a node refuses"
            " programs whose clock is not its own",
            "start programs without unshare --time, or the node in the same namespace",
        )
    yield from _disk(found)


def _limits(found: Surroundings) -> Iterator[Finding]:
    shown = "unlimited" if found.open_files < 0 else str(found.open_files)
    if found.open_files < 0 or found.open_files >= OPEN_FILES:
        yield Finding("open files", Verdict.OK, shown)
        return
    enough = found.open_files_hard < 0 or found.open_files_hard >= OPEN_FILES
    fix = f"ulimit -n {OPEN_FILES}" if enough else "raise nofile in /etc/security/limits.conf, and log in again"
    yield Finding("open files", Verdict.NOTE, f"{shown}: a node with many vGPUs and links may need more", fix)


def _shell(found: Surroundings) -> Iterator[Finding]:
    for hook in found.preloaded:
        if hook.state == "gone":
            text = f"LD_PRELOAD names {hook.path}, which is not there: ld.so complains at every command"
            yield Finding("preloaded hook", Verdict.NOTE, text, "unset LD_PRELOAD, or vgpuctl hook install")
        elif hook.state == "stale":
            text = f"{hook.path}, which this shell preloads, is of another version than this vgpuctl"
            yield Finding("preloaded hook", Verdict.NOTE, text, "vgpuctl hook install, then a new shell")
    if found.preloaded and found.system_hook in {"current", "stale"}:
        text = "LD_PRELOAD and /etc/ld.so.preload both name a hook; one is enough"
        yield Finding("preloaded hook", Verdict.NOTE, text, "vgpuctl hook uninstall, and unset LD_PRELOAD")
    if found.system_hook == "gone":
        text = "/etc/ld.so.preload names a hook that is not there: ld.so complains at every command"
        yield Finding("system hook", Verdict.MISSING, text, "sudo vgpuctl hook uninstall --system")
    elif found.system_hook == "stale":
        text = "of another version than this vgpuctl"
        yield Finding("system hook", Verdict.NOTE, text, "sudo vgpuctl hook install --system")
    if found.simulation and not found.simulation_there:
        text = f"VGPU_SIM_DIR is {found.simulation}, which is not there: left over from a node that is gone"
        yield Finding("simulated GPUs", Verdict.NOTE, text, "unset VGPU_SIM_DIR LD_LIBRARY_PATH, or open a new shell")
    elif found.simulation and not found.vgpu_id:
        text = f"programs of this shell find those in {found.simulation}, whole, since VGPU_ID is not set"
        yield Finding("simulated GPUs", Verdict.NOTE, text, "unset VGPU_SIM_DIR LD_LIBRARY_PATH, or open a new shell")
    if found.log_level.lower() not in {"", "info"}:
        text = f"VGPU_LOG_LEVEL is {found.log_level}: a node that is started here logs "
        text += "much, and its logs turn over soon" if found.log_level.lower() == "debug" else "less than is usual"
        yield Finding("log level", Verdict.NOTE, text, "unset VGPU_LOG_LEVEL")


def _disk(found: Surroundings) -> Iterator[Finding]:
    if found.free_bytes is None:
        return
    shown = f"{found.free_bytes >> 20} MiB free for {found.state_dir}"
    if found.free_bytes >= LITTLE_DISK_BYTES:
        yield Finding("disk", Verdict.OK, shown)
        return
    full = found.free_bytes < NO_DISK_BYTES
    lost = "vGPUs are not remembered over a restart, events and logs are lost" if full else "events and logs need it"
    fix = f"df -h {found.state_dir}, and make room; or set VGPU_STATE_DIR to another disk"
    yield Finding("disk", Verdict.MISSING if full else Verdict.NOTE, f"{shown}: {lost}", fix)


# --- probing --------------------------------------------------------------------------------------------------------


def probe(state_dir: Path, environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Surroundings:
    """Reads this shell's environment, and the machine below ``root``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    simulation = environment.get("VGPU_SIM_DIR", "")
    return Surroundings(
        open_files=soft,
        open_files_hard=hard,
        clock_offset_s=_clock_offset_s(root),
        foreign_pid_namespace=namespaces.is_foreign_pid_namespace(root),
        pid_namespace_allowed=namespaces.is_allowed(environment),
        container=_container(environment, root),
        preloaded=tuple(
            Preloaded(entry, _state(Path(entry)))
            for entry in re.split(r"[\s:]+", environment.get("LD_PRELOAD", ""))
            if entry and is_hook(entry)
        ),
        system_hook=_system_hook(SystemInstallation(root)),
        simulation=simulation,
        simulation_there=Path(simulation).is_dir() and simulation_libraries().is_dir(),
        vgpu_id=environment.get("VGPU_ID", ""),
        log_level=environment.get("VGPU_LOG_LEVEL", ""),
        state_dir=state_dir,
        free_bytes=_free_bytes(state_dir),
    )


def _state(copy: Path) -> str:
    try:
        return "current" if copy.read_bytes() == hook_library().read_bytes() else "stale"
    except FileNotFoundError:
        return "gone"
    except (OSError, HookError):
        return "current"  # the comparison is impossible, so there is no finding


def _system_hook(installation: SystemInstallation) -> str:
    from client_hook.environment import preload_file_entries

    try:
        named = [e for e in preload_file_entries(installation.preload_file.read_text()) if is_hook(e)]
    except OSError:
        return ""
    return _state(Path(named[0])) if named else ""


def _clock_offset_s(root: Path) -> float:
    """How far CLOCK_MONOTONIC is off the host's here; 0 where there are no time namespaces."""
    try:
        lines = (root / "proc/self/timens_offsets").read_text().splitlines()
    except OSError:
        return 0.0
    for line in lines:
        clock, *numbers = line.split()
        if clock in {"monotonic", "1"} and len(numbers) == 2:
            return int(numbers[0]) + int(numbers[1]) / 1e9
    return 0.0


def _container(environment: Mapping[str, str], root: Path) -> str:
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    return environment.get("container", "")  # systemd's convention: nspawn, lxc and others set it


def _free_bytes(directory: Path) -> int | None:
    nearest = next(part for part in (directory, *directory.parents) if part.exists())
    try:
        return shutil.disk_usage(nearest).free
    except OSError:
        return None
