"""A node that begins with the first ``create`` or ``run``, where no node answers, and ends after its last vGPU."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from client_hook import driver
from vgpu import paths as places
from vgpu.config import load
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node import starting
from vgpu.paths import NodePaths, unusable
from vgpu.protocol.blocking import BlockingLink, listens
from vgpu.trust import replaceable_part

AnyLink = TypeVar("AnyLink", bound=BlockingLink)

SETTING: Final = "VGPU_ON_DEMAND"
"""``off``, or after how many seconds without a vGPU such a node ends."""
IDLE_S: Final = 60.0
ATTEMPTS: Final = 20
"""Of one client: each may meet a node at the moment of its end."""
LOOK_S: Final = 0.05
_CONTAINER: Final = (".dockerenv", "run/.containerenv")
_CONTAINER_GROUPS: Final = ("docker", "kubepods", "containerd", "libpod", "lxc")
_SYSTEM: Final = (
    "etc/systemd/system/vgpu.service",
    "usr/lib/systemd/system/vgpu.service",
    "lib/systemd/system/vgpu.service",
    "etc/vgpu/config.toml",
)


def idle_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """How long a node on demand stays without a vGPU, in seconds; None: no node is to start by itself. ``VgpuError``
    (invalid): the setting is neither ``off`` nor a number."""
    setting = environment.get(SETTING, "").strip().lower()
    if setting == "off":
        return None
    try:
        seconds = float(setting or IDLE_S)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise VgpuError(ErrorCode.INVALID, f"{SETTING}={setting!r} is neither off nor a number of seconds")
    return seconds


def in_container(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> bool:
    """Whether this process is in a container. A node there would see neither the other containers nor the host."""
    if "KUBERNETES_SERVICE_HOST" in environment or any((root / mark).exists() for mark in _CONTAINER):
        return True
    try:
        groups = (root / "proc/1/cgroup").read_text(errors="replace")
    except OSError:
        return False
    return any(word in groups for word in _CONTAINER_GROUPS)


def may_start(
    paths: NodePaths,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    contained: Callable[[], bool] = in_container,
) -> bool:
    """Whether a node at ``paths`` may start by itself.

    Not where the machine has a node of its own, in a container, or without a driver. ``VGPU_ON_DEMAND`` with a number
    allows it in a container, and where ``VGPU_RUNTIME_DIR`` places the node.
    """
    if idle_s(environment) is None or replaceable_part(paths.runtime) is not None:
        return False
    placed = bool(environment.get("VGPU_RUNTIME_DIR"))
    if not environment.get(SETTING) and (placed or contained()):
        return False
    system = places.SYSTEM_RUNTIME
    if not placed or paths.runtime == system:
        if any((root / place).exists() for place in _SYSTEM):
            return False
        if os.geteuid() != 0 and (paths.runtime == system or system.exists()):
            return False
    return bool(load().config.serve.simulate) or driver.is_here(root)


def ensure_node(paths: NodePaths | None = None) -> bool:
    """Start a node at ``paths`` (by default the environment's) if none answers and one may start by itself. Whether
    this call has started it. Many callers at once start one node.

    It ends ``VGPU_ON_DEMAND`` seconds (60) after its last vGPU is removed. ``VgpuError``: it did not start, or serves
    no GPU.
    """
    paths = paths or NodePaths.from_environment()
    if listens(paths.control_socket) or not may_start(paths):
        return False
    with _alone(paths):
        deadline = time.monotonic() + starting.START_UP_S
        while not listens(paths.control_socket):
            if _is_free(paths.node_lock):
                return _start(paths)
            if time.monotonic() > deadline:
                text = f"a node in {paths.runtime} neither answers nor ends"
                raise VgpuError(ErrorCode.TIMEOUT, text, f"less {paths.node_log}")
            time.sleep(LOOK_S)
    return False


def link(opened: Callable[[], AnyLink], started: Callable[[str], object]) -> AnyLink:
    """The link that ``opened`` makes to the environment's node. Where no node answers, one starts first, if it may;
    ``started`` gets a sentence then. The errors of ``opened`` and ``ensure_node``."""
    for _ in range(ATTEMPTS):
        try:
            return opened()
        except VgpuError as error:
            if error.code is not ErrorCode.UNREACHABLE or not may_start(NodePaths.from_environment()):
                raise
        if ensure_node():
            started(f"no node answered; started one, which ends {idle_s():g} s after its last vGPU")
    return opened()


def _start(paths: NodePaths) -> bool:
    seconds = idle_s()
    assert seconds is not None
    command = [*starting.configured_command(load().config), "--on-demand", str(int(seconds * 1e9))]
    process = starting.start(command, paths)
    status = starting.wait_until_serving(process, paths.node_log, paths.control_socket)
    if starting.all_failed(status):
        why = "; ".join(f"GPU {gpu.index}: {gpu.reason}" for gpu in status.gpus)
        raise VgpuError(ErrorCode.UNAVAILABLE, f"the node that was started serves no GPU: {why}", "vgpuctl doctor")
    return True


@contextmanager
def _alone(paths: NodePaths) -> Iterator[None]:
    """Hold the lock of those that would start this node."""
    folder = paths.node_lock.parent
    try:
        for made in (paths.runtime, folder):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = _opened(folder / "start.lock")
    except OSError as error:
        raise unusable(folder, error, "VGPU_RUNTIME_DIR") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_free(lock: Path) -> bool:
    """Whether no node holds its lock. One that ends holds it until its servers have ended."""
    descriptor = _opened(lock)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _opened(lock: Path) -> int:
    return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
