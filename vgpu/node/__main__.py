"""``python -m vgpu.node``: what ``vgpuctl serve`` becomes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import trio

from client_hook import interpreter, namespaces
from client_hook.environment import simulation_libraries
from vgpu.config import UnmanagedName
from vgpu.ctl.exit_codes import report
from vgpu.enums import PlacementName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.files import exclusive
from vgpu.harness.signals import cause_of
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.loggers import get_logger
from vgpu.logs import to_stderr
from vgpu.node.servers import Servers, Sharing, gpu_count
from vgpu.node.supervisor import Node, check_paths, prepare
from vgpu.openfiles import raise_limit
from vgpu.paths import UMASK, NodePaths
from vgpu.protocol.peer import listener_at
from vgpu.queueing.rules import DEFAULT_RULES, QueueRules
from vgpu.quotas.quota import NO_QUOTAS, Quotas

log = get_logger(__name__)

MOST_SIMULATED: Final = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vgpu.node", description="Supervisor of the GPU Servers of this machine"
    )
    parser.add_argument("--mode", choices=["auto", "temporal", "spatial"], default="temporal")
    parser.add_argument("--simulate", type=int, default=0, metavar="N", help="serve N simulated GPUs")
    parser.add_argument("--gpu", type=int, action="append", default=[], metavar="INDEX", help="serve this GPU alone")
    parser.add_argument(
        "--host-memory", type=int, metavar="BYTES", help="the most that all GPUs' swapped memory may have of the host's"
    )
    parser.add_argument("--unmanaged", choices=["report", "suspend", "kill"], default="report")
    parser.add_argument("--placement", type=PlacementName, choices=list(PlacementName), default=PlacementName.SPREAD)
    period = parser.add_argument("--period", "--quantum", type=int, metavar="NS")  # an older node says --quantum
    period.help = "one round of turns; else as it was set last"
    parser.add_argument("--window", type=int, metavar="NS", help="most in flight; else as it was set last")
    parser.add_argument(
        "--others",
        type=read_others,
        default={},
        metavar="JSON",
        help='GPUs that are shared in another way: {"0": {"mode": "spatial", "period_ns": 40000000}}',
    )
    parser.add_argument("--limits", default="{}", metavar="JSON", help="of what one user can take (vgpu/limits.py)")
    parser.add_argument("--quotas", default="{}", metavar="JSON", help="of users (vgpu/quotas/quota.py)")
    parser.add_argument("--queue", default="{}", metavar="JSON", help="its rules (vgpu/queueing/rules.py)")
    parser.add_argument("--on-demand", type=int, metavar="NS", help="end after this time without a vGPU")
    parser.add_argument("--take", action="store_true", help="end another user's servers of these GPUs")
    arguments = parser.parse_args()
    paths = NodePaths.from_environment()
    try:
        to_stderr("node")
        raise_limit()
        limits = Limits.from_option(arguments.limits)
        sharing = Sharing(arguments.mode, arguments.period, arguments.window)
        run(
            paths,
            sharing,
            arguments.others,
            arguments.simulate,
            arguments.gpu,
            arguments.host_memory,
            limits,
            arguments.unmanaged,
            take=arguments.take,
            idle_ns=arguments.on_demand,
            placement=arguments.placement,
            quotas=Quotas.from_option(arguments.quotas),
            queue=QueueRules.from_option(arguments.queue),
        )
    except (VgpuError, BaseExceptionGroup) as raised:
        error = cause_of(raised)
        if not isinstance(error, VgpuError):
            raise
        sys.exit(report(error))


def read_others(text: str) -> dict[int, Sharing]:
    """``--others``, as ``vgpuctl serve`` wrote it."""
    return {int(index): Sharing(**fields) for index, fields in json.loads(text).items()}


def run(
    paths: NodePaths,
    sharing: Sharing,
    others: Mapping[int, Sharing],
    simulate: int,
    gpus: Sequence[int] = (),
    host_memory_bytes: int | None = None,
    limits: Limits = DEFAULT_LIMITS,
    unmanaged: UnmanagedName = "report",
    *,
    take: bool = False,
    idle_ns: int | None = None,
    placement: PlacementName = PlacementName.SPREAD,
    quotas: Quotas = NO_QUOTAS,
    queue: QueueRules = DEFAULT_RULES,
) -> None:
    """Serve until a signal stops it. ``others``: GPUs that are shared in another way; ``gpus``: only these indices;
    ``host_memory_bytes``: None means half of the host's; ``idle_ns``: end after so long without a vGPU. ``VgpuError``:
    why it cannot serve."""
    os.umask(UMASK)
    check_namespace()
    prepare(paths)
    with only_node(paths):
        count = simulated_gpus(paths.runtime / "sim", simulate) if simulate else gpu_count()
        served = chosen(gpus, count)
        chosen(tuple(others), count)
        check_paths(paths)
        if host_memory_bytes is None:
            host_memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        servers = Servers(
            sharing,
            others,
            simulated=bool(simulate),
            take=take,
            environment=server_environment(paths, simulate=bool(simulate)),
            host_memory_bytes=host_memory_bytes // max(1, len(served)),
            limits=limits,
            unmanaged=unmanaged,
        )
        node = Node(
            paths,
            servers,
            served,
            simulated=bool(simulate),
            limits=limits,
            idle_ns=idle_ns,
            placement=placement,
            quotas=quotas,
            queue=queue,
        )
        trio.run(node.run)


def check_namespace() -> None:
    """``VgpuError`` (mode): in a PID namespace of its own the node would admit no program from outside."""
    if namespaces.is_foreign_pid_namespace() and not namespaces.is_allowed(os.environ):
        raise VgpuError(
            ErrorCode.MODE,
            "this node would run in a PID namespace of its own, and could not identify programs outside it",
            namespaces.REMEDY,
        )


def chosen(gpus: Sequence[int], count: int) -> list[int]:
    """Each of ``gpus`` once, or all ``count`` if none is named. ``VgpuError`` (not found): one that is not here."""
    missing = [index for index in gpus if not 0 <= index < count]
    if missing:
        here = "GPU 0 alone" if count == 1 else f"GPUs 0 to {count - 1}"
        raise VgpuError(ErrorCode.NOT_FOUND, f"there is no GPU {missing[0]}", f"this machine has {here}")
    return sorted(set(gpus)) or list(range(count))


def only_node(paths: NodePaths) -> IO[bytes]:
    """The node's lock, held while the file is open. ``VgpuError`` (exists) where a node runs already."""
    refusal = VgpuError(
        ErrorCode.EXISTS,
        f"a node runs already in {paths.runtime}",
        "stop it: vgpuctl stop; or set VGPU_RUNTIME_DIR and VGPU_STATE_DIR for another one beside it",
    )
    file = exclusive(paths.node_lock, refusal)
    if listener_at(paths.control_socket) is not None:  # a node of an older release, which locked another file
        file.close()
        raise refusal
    return file


def simulated_gpus(folder: Path, count: int) -> int:
    """Make ``count`` simulated GPUs, if they do not exist. Those of an earlier node are kept, with what runs on them,
    unless another version of the simulated driver made them."""
    from cython_ext.simengine import Engine, create_gpus

    if not 1 <= count <= MOST_SIMULATED:
        raise VgpuError(ErrorCode.INVALID, f"{count} simulated GPUs: ask for 1 to {MOST_SIMULATED}")
    try:
        kept = len(list(folder.glob("gpu*"))) == count and all(Engine(folder, index) for index in range(count))
    except FileNotFoundError:
        kept = False
    if not kept:
        create_gpus(folder, count)
    folder.chmod(0o755 if os.geteuid() == 0 else 0o700)  # the vGPUs' owners use what is in it, whatever our umask is
    return count


def server_environment(paths: NodePaths, *, simulate: bool) -> dict[str, str]:
    """What GPU Servers and brokers are started with: this node's places, and no vGPU of their own."""
    environment = interpreter.environment(os.environ)
    for name in ("VGPU_ID", "VGPU_SIM_DIR", "NOTIFY_SOCKET"):
        environment.pop(name, None)
    libraries = [part for part in environment.pop("LD_LIBRARY_PATH", "").split(":") if part]
    libraries = [part for part in libraries if part != str(simulation_libraries())]
    if simulate:
        environment["VGPU_SIM_DIR"] = str(paths.runtime / "sim")
        libraries.insert(0, str(simulation_libraries()))
    if libraries:
        environment["LD_LIBRARY_PATH"] = ":".join(libraries)
    # pydantic would search every installed distribution for plugins, in each of our processes.
    environment.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    environment["VGPU_LOG"] = "json"  # their stderr is a file, whatever ours is
    environment["VGPU_RUNTIME_DIR"] = str(paths.runtime)
    environment["VGPU_STATE_DIR"] = str(paths.state)
    return environment


if __name__ == "__main__":
    main()
