"""What this machine lacks to share a GPU, and what to type about it.

``probe`` reads the machine. It starts one child process, so that neither a broken driver nor a preloaded hook can hurt
the caller. ``diagnose`` judges what ``probe`` found, and is pure.
"""

from __future__ import annotations

import ctypes.util
import fcntl
import json
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from client_hook import interpreter
from client_hook.environment import (
    SYSTEM_PRELOAD,
    hook_library,
    preload_file_entries,
    simulation_libraries,
)
from client_hook.errors import HookError
from client_hook.install import UserInstallation, preflight
from client_hook.path_rules import is_hook
from client_hook.reach import ELSEWHERE, closed_to_others

OLDEST_GLIBC: Final = (2, 28)
LONGEST_SOCKET_PATH: Final = 107  # sun_path without its closing zero
_SOCKET_BELOW_RUNTIME: Final = "/vgpus/vgpu-01234567/broker.sock"
_SMALLEST_MEMLOCK_BYTES: Final = 64 << 10  # one activity page registered with the driver
_ANSWER_S: Final = 3.0
_F_SEAL_FUTURE_WRITE: Final = 0x10  # fcntl.h; the fcntl module does not name it


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"  # works, but something to know
    MISSING = "missing"  # has to be put right first


@dataclass(frozen=True, slots=True)
class Finding:
    """``found``: what is there, in words. ``fix``: what to type, or to do ("" where there is nothing to do)."""

    check: str
    verdict: Verdict
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """What the CUDA driver and NVML of this machine report; ``*_error`` is "" if they work."""

    version: str = ""
    cuda_error: str = "libcuda.so.1 was not checked"
    cuda_devices: int = 0
    cuda_path: str = ""
    nvml_error: str = "libnvidia-ml.so.1 was not checked"
    gpus: tuple[str, ...] = ()
    exclusive_gpus: tuple[int, ...] = ()
    """Indices of GPUs with a compute mode that admits a single process, or none."""
    mig_gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """A machine as far as sharing a GPU is concerned."""

    machine: str
    kernel: str
    glibc: tuple[int, int]
    seals_future_writes: bool
    opens_pidfds: bool
    memlock_bytes: int  # -1: unlimited
    uid: int
    runtime_dir: Path
    runtime_error: str
    state_dir: Path
    state_error: str
    hook_error: str
    hook_hint: str
    simulation_built: bool
    user_hook: str
    """"" not installed, "current", or "stale": other bytes than this installation's hook."""
    system_hook: bool
    mps_control: str
    """Path of nvidia-cuda-mps-control, "" if there is none."""
    foreign_mps: str
    """Pipe directory of an MPS daemon that is not ours, "" if there is none."""
    driver: DriverFacts = field(default_factory=DriverFacts)
    node_uid: int | None = None
    """The uid of the node that listens in the runtime directory; None: there is none."""
    closed: str = ""
    """A directory that keeps other users from running this installation, "" if there is none."""


def diagnose(facts: Facts) -> Iterator[Finding]:
    """Every check in the order in which a person would put things right."""
    yield from _platform(facts)
    yield from _driver(facts)
    yield from _mps(facts)
    yield from _hook(facts)
    yield from _directories(facts)
    if facts.uid == 0:
        yield _others(facts)


def _judged(check: str, good: bool, found: str, fix: str, otherwise: Verdict = Verdict.MISSING) -> Finding:
    return Finding(check, Verdict.OK, found) if good else Finding(check, otherwise, found, fix)


def _platform(facts: Facts) -> Iterator[Finding]:
    yield _judged(
        "machine", facts.machine in {"x86_64", "aarch64"}, facts.machine, "st-vgpu runs on x86-64 and aarch64 only"
    )
    yield _judged(
        "kernel",
        facts.seals_future_writes,
        f"Linux {facts.kernel}" + ("" if facts.seals_future_writes else ", cannot seal a memfd against future writes"),
        "upgrade to Linux 5.1 or newer",
    )
    if not facts.opens_pidfds:
        yield Finding("pidfd", Verdict.MISSING, "pidfd_open is refused", "Linux 5.3 or newer, or allow it in seccomp")
    glibc = ".".join(map(str, facts.glibc))
    yield _judged("glibc", facts.glibc >= OLDEST_GLIBC, glibc, "glibc 2.28 or newer")
    enough = facts.memlock_bytes < 0 or facts.memlock_bytes >= _SMALLEST_MEMLOCK_BYTES
    shown = "unlimited" if facts.memlock_bytes < 0 else f"{facts.memlock_bytes >> 10} KiB"
    yield _judged("locked memory", enough, shown, "ulimit -l 1024, or raise memlock in /etc/security/limits.conf")


def _driver(facts: Facts) -> Iterator[Finding]:
    driver = facts.driver
    without = "install the NVIDIA driver; without a GPU: vgpuctl serve --detach --simulate 1"
    if not driver.version and driver.cuda_error and driver.nvml_error:
        yield Finding("NVIDIA driver", Verdict.NOTE, "none: only simulated GPUs here", without)
        yield _judged(
            "simulated GPU", facts.simulation_built, "built" if facts.simulation_built else "not built", "make build"
        )
        return
    yield _judged("NVIDIA driver", bool(driver.version), driver.version or "not loaded", without)
    yield _judged(
        "libcuda",
        not driver.cuda_error and driver.cuda_devices > 0,
        driver.cuda_error or f"{driver.cuda_path}, {driver.cuda_devices} device(s)",
        "nvidia-smi; in a container: docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    )
    yield _judged(
        "NVML",
        not driver.nvml_error,
        driver.nvml_error or ", ".join(driver.gpus),
        "install the driver's libnvidia-ml.so.1; in a container: -e NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    )
    for index in driver.exclusive_gpus:
        fix = f"sudo nvidia-smi -i {index} -c DEFAULT"
        yield Finding("compute mode", Verdict.MISSING, f"GPU {index} admits one process only", fix)
    for index in driver.mig_gpus:
        found = f"GPU {index} is cut into MIG instances; st-vgpu shares whole GPUs"
        yield Finding("MIG", Verdict.NOTE, found, f"sudo nvidia-smi -i {index} -mig 0, if whole-GPU sharing is wanted")


def _mps(facts: Facts) -> Iterator[Finding]:
    if not facts.driver.gpus:
        return
    yield _judged(
        "MPS",
        bool(facts.mps_control),
        facts.mps_control or "nvidia-cuda-mps-control is not on the PATH: temporal mode only",
        "install the driver's MPS tools (Debian: nvidia-cuda-mps) for spatial mode",
        Verdict.NOTE,
    )
    if facts.foreign_mps:
        found = f"a daemon that is not ours listens in {facts.foreign_mps}; vGPU processes are kept away from it"
        yield Finding("other MPS daemon", Verdict.NOTE, found)


def _hook(facts: Facts) -> Iterator[Finding]:
    yield _judged("hook", not facts.hook_error, facts.hook_error or "loads into a process", facts.hook_hint)
    if facts.user_hook == "stale":
        found = "of another version than this vgpuctl"
        yield Finding("installed hook", Verdict.NOTE, found, "vgpuctl hook install")
    elif facts.user_hook or facts.system_hook:
        yield Finding("installed hook", Verdict.OK, "for this user" if facts.user_hook else "for the whole system")
    else:
        found = "no: only vgpuctl exec, run and -o env make vGPU processes"
        yield Finding("installed hook", Verdict.NOTE, found, "vgpuctl hook install, then export VGPU_ID=... is enough")


def _directories(facts: Facts) -> Iterator[Finding]:
    if facts.node_uid not in {None, facts.uid}:  # a user of another user's node creates nothing there
        yield Finding(
            "runtime directory", Verdict.OK, f"{facts.runtime_dir}, where a node of uid {facts.node_uid} runs"
        )
        return
    longest = len(os.fsencode(facts.runtime_dir)) + len(_SOCKET_BELOW_RUNTIME)
    error = facts.runtime_error
    if not error and longest > LONGEST_SOCKET_PATH:
        error = f"{facts.runtime_dir} is too long for a socket path by {longest - LONGEST_SOCKET_PATH} characters"
    yield _judged("runtime directory", not error, error or str(facts.runtime_dir), "export VGPU_RUNTIME_DIR=/tmp/vgpu")
    error = facts.state_error
    yield _judged(
        "state directory", not error, error or str(facts.state_dir), "export VGPU_STATE_DIR=$HOME/.local/state/vgpu"
    )


def _others(facts: Facts) -> Finding:
    """Root's node is for all users, and each runs this installation's ``vgpuctl`` and preloads its hook."""
    if not facts.closed:
        return Finding("other users", Verdict.OK, "can run this vgpuctl")
    return Finding("other users", Verdict.NOTE, f"cannot run this vgpuctl: {facts.closed} is closed to them", ELSEWHERE)


# --- probing --------------------------------------------------------------------------------------------------------


def probe(runtime_dir: Path, state_dir: Path, user: UserInstallation) -> Facts:
    """Reads the facts of this machine, for a node in these directories."""
    hook_error, hook_hint = _hook_state()
    return Facts(
        machine=platform.machine(),
        kernel=platform.release(),
        glibc=_glibc(),
        seals_future_writes=_seals_future_writes(),
        opens_pidfds=_opens_pidfds(),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        uid=os.getuid(),
        runtime_dir=runtime_dir,
        runtime_error=_unwritable(runtime_dir),
        state_dir=state_dir,
        state_error=_unwritable(state_dir),
        hook_error=hook_error,
        hook_hint=hook_hint,
        simulation_built=(simulation_libraries() / "libcuda.so.1").exists(),
        user_hook=_user_hook(user),
        system_hook=_system_hook(),
        mps_control=shutil.which("nvidia-cuda-mps-control") or "",
        foreign_mps=_foreign_mps(runtime_dir),
        driver=probe_driver(),
        node_uid=node_uid(runtime_dir / "control.sock"),
        closed=str(closed_to_others() or ""),
    )


def probe_driver(environment: Mapping[str, str] = os.environ) -> DriverFacts:
    """Asks driver and NVML in a child process that no hook and no stand-in driver reaches. At most 20 seconds."""
    dropped = {"LD_PRELOAD", "VGPU_ID", "VGPU_SIM_DIR", "CUDA_VISIBLE_DEVICES"}
    inherited = interpreter.environment(environment)
    clean = {name: value for name, value in inherited.items() if name not in dropped}
    simulated = str(simulation_libraries())
    clean["LD_LIBRARY_PATH"] = ":".join(p for p in clean.get("LD_LIBRARY_PATH", "").split(":") if p and p != simulated)
    command = interpreter.command("client_hook.doctor")
    try:
        answer = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=20, check=False)
        found: dict[str, Any] = json.loads(answer.stdout)
    except subprocess.TimeoutExpired:
        found = {"cuda_error": "the driver did not answer within 20 seconds", "nvml_error": "not asked"}
    except ValueError:
        found = {"cuda_error": f"asking the driver ended with exit code {answer.returncode}", "nvml_error": "not asked"}
    lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    return DriverFacts(**({"version": _kernel_module_version()} | found | lists))


def _ask_driver() -> dict[str, Any]:
    return _ask_cuda() | _ask_nvml()


def _ask_cuda() -> dict[str, Any]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"cuda_error": str(error)}
    if code := cuda.cuInit(0):
        return {"cuda_error": f"cuInit returns {code}"}
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcuda.so" in line)
    return {"cuda_error": "", "cuda_devices": count.value, "cuda_path": next(mapped, "libcuda.so.1")}


def _ask_nvml() -> dict[str, Any]:
    import pynvml

    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        modes = [pynvml.nvmlDeviceGetComputeMode(handle) for handle in handles]
    except pynvml.NVMLError as error:
        return {"nvml_error": str(error)}
    exclusive = [i for i, mode in enumerate(modes) if mode != pynvml.NVML_COMPUTEMODE_DEFAULT]
    return {
        "version": version,
        "nvml_error": "",
        "gpus": gpus,
        "exclusive_gpus": exclusive,
        "mig_gpus": [i for i, handle in enumerate(handles) if _in_mig_mode(handle)],
    }


def _in_mig_mode(handle: object) -> bool:
    import pynvml

    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # cards without MIG say "not supported"
        return False
    return bool(current)


def _kernel_module_version() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""


def _glibc() -> tuple[int, int]:
    name, version = platform.libc_ver()
    if name != "glibc":
        return (0, 0)
    major, minor, *_ = (*version.split("."), "0")
    return int(major), int(minor)


def _seals_future_writes() -> bool:
    try:
        descriptor = os.memfd_create("vgpu-doctor", os.MFD_ALLOW_SEALING)
    except OSError:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _opens_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _unwritable(directory: Path) -> str:
    """Why nothing can be created in ``directory``, by the nearest part of it that exists; "" if it can."""
    nearest = next(part for part in (directory, *directory.parents) if part.exists())
    if not nearest.is_dir():
        return f"{nearest} is not a directory"
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} is not writable for uid {os.getuid()}"


def node_uid(control_socket: Path) -> int | None:
    """The uid of the process that listens there; None: no process does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(_ANSWER_S)
        try:
            link.connect(str(control_socket))
        except OSError:
            return None
        _, uid, _ = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def _hook_state() -> tuple[str, str]:
    try:
        preflight(hook_library())
    except HookError as error:
        return error.message, error.hint
    return "", ""


def _user_hook(user: UserInstallation) -> str:
    try:
        installed = user.library.read_bytes()
        return "current" if installed == hook_library().read_bytes() else "stale"
    except (OSError, HookError):
        return ""


def _system_hook() -> bool:
    try:
        return any(map(is_hook, preload_file_entries(SYSTEM_PRELOAD.read_text())))
    except OSError:
        return False


def _foreign_mps(runtime_dir: Path, environment: Mapping[str, str] = os.environ) -> str:
    pipes = Path(environment.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return str(pipes) if (pipes / "control").exists() and runtime_dir not in pipes.parents else ""


if __name__ == "__main__":
    print(json.dumps(_ask_driver()))
