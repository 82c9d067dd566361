"""``python -m gpuserver``: the GPU Server of one GPU, started by the node."""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from pathlib import Path
from typing import IO

import structlog
import trio

from gpuserver.core.unmanaged import Response
from gpuserver.device.mps import MpsDaemon, MpsDirectories, NvidiaMpsDaemon, SimulatedMpsDaemon
from gpuserver.device.nvml import NvmlGpu
from gpuserver.runtime.control import Control
from gpuserver.runtime.journal import Journal
from gpuserver.runtime.server import GpuServer, Settings
from vgpu.errors import ErrorCode, VgpuError
from vgpu.logs import to_stderr
from vgpu.paths import NodePaths
from vgpu.precedence import go_first, keep_all
from vgpu.protocol.stream import listen

log = structlog.get_logger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gpuserver", description="GPU Server of one GPU (started by the node)"
    )
    parser.add_argument("--index", required=True, type=int, help="NVML index of the GPU")
    parser.add_argument("--mode", choices=["auto", "temporal", "spatial"], default="temporal")
    parser.add_argument("--simulated", action="store_true", help="the GPU is one of $VGPU_SIM_DIR")
    parser.add_argument("--host-memory", required=True, type=int, metavar="BYTES", help="most for what is swapped out")
    parser.add_argument("--quantum", type=int, metavar="NS", help="one round of turns; else as it was set last")
    parser.add_argument("--window", type=int, metavar="NS", help="most in flight; else as it was set last")
    parser.add_argument("--unmanaged", choices=list(Response), type=Response, default=Response.REPORT)
    arguments = parser.parse_args()
    go_first()
    settings = Settings(
        arguments.index,
        arguments.mode,
        arguments.simulated,
        NodePaths.from_environment(),
        arguments.host_memory,
        arguments.quantum,
        arguments.window,
        arguments.unmanaged,
    )
    try:
        to_stderr("server", gpu=settings.index)
        run(settings)
    except VgpuError as error:
        log.error("cannot serve", gpu=settings.index, code=error.code.value, reason=str(error))
        sys.exit(1)


def run(settings: Settings) -> None:
    """Serve until told to stop. ``VgpuError``: why it cannot."""
    directory = settings.paths.gpu_dir(settings.index)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock(directory / "lock", f"GPU {settings.index} is served already"), NvmlGpu(settings.index) as gpu:
        journal = Journal(settings.paths.journal(gpu.facts.uuid))
        try:
            server = GpuServer(settings, gpu, mps_daemon(settings, gpu.facts.uuid), journal)
            trio.run(serve, server, settings)
        finally:
            journal.close()


async def serve(server: GpuServer, settings: Settings) -> None:
    listener = listen(settings.paths.server_socket(settings.index), mode=0o600)
    keep_all()
    with listener:
        await server.run(listener, Control(server).serve)


def mps_daemon(settings: Settings, uuid: str) -> MpsDaemon:
    """This GPU's own MPS daemon, not started yet."""
    base = settings.paths.gpu_dir(settings.index)
    if settings.simulated:
        return SimulatedMpsDaemon(MpsDirectories(base / "mps", base / "mps-log"))
    # Processes of the vGPUs' owners go there, so it cannot lie below the server's private directory.
    public = settings.paths.runtime / "mps" / str(settings.index)
    return NvidiaMpsDaemon(uuid, MpsDirectories(public / "pipe", public / "log"), multi_user=os.geteuid() == 0)


def lock(path: Path, refusal: str) -> IO[str]:
    """The file, locked for as long as it is open. ``VgpuError`` (exists) if another process holds it."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise VgpuError(ErrorCode.EXISTS, refusal, f"its lock is {path}") from None
    return file


if __name__ == "__main__":
    main()
