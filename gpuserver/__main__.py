"""``python -m gpuserver``: the GPU Server of one GPU, started by the node."""

from __future__ import annotations

import argparse
import os
import sys

import trio

from gpuserver.core.observe.unmanaged import Response
from gpuserver.device.base import MpsDirectories
from gpuserver.device.claim import claim
from gpuserver.device.vendors import NVIDIA, SIMULATED, VENDORS
from gpuserver.runtime.journal import Journal
from gpuserver.runtime.server import GpuServer
from gpuserver.runtime.state import Settings
from vgpu.errors import ErrorCode, VgpuError
from vgpu.files import exclusive
from vgpu.limits import Limits
from vgpu.loggers import get_logger
from vgpu.logs import to_stderr
from vgpu.openfiles import raise_limit
from vgpu.paths import UMASK, NodePaths
from vgpu.process_tuning import go_first, keep_all
from vgpu.protocol.stream import listen

log = get_logger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gpuserver", description="GPU Server of one GPU (started by the node)"
    )
    parser.add_argument("--index", required=True, type=int, help="NVML index of the GPU")
    parser.add_argument("--mode", choices=["auto", "temporal", "spatial"], default="temporal")
    parser.add_argument("--simulated", action="store_true", help="the GPU is one of $VGPU_SIM_DIR")
    parser.add_argument("--host-memory", required=True, type=int, metavar="BYTES", help="most for what is swapped out")
    period = parser.add_argument("--period", "--quantum", type=int, metavar="NS")  # an older node says --quantum
    period.help = "one round of turns; else as it was set last"
    parser.add_argument("--window", type=int, metavar="NS", help="most in flight; else as it was set last")
    parser.add_argument("--limits", default="{}", metavar="JSON", help="of what one user can take (vgpu/limits.py)")
    parser.add_argument("--take", action="store_true", help="end another user's server of this GPU")
    parser.add_argument("--unmanaged", choices=list(Response), type=Response, default=Response.REPORT)
    arguments = parser.parse_args()
    os.umask(UMASK)
    go_first()
    raise_limit()
    try:
        to_stderr("server", gpu=arguments.index)
        settings = Settings(
            arguments.index,
            arguments.mode,
            arguments.simulated,
            NodePaths.from_environment(),
            arguments.host_memory,
            arguments.period,
            arguments.window,
            Limits.from_option(arguments.limits),
            arguments.unmanaged,
        )
        run(settings, take=arguments.take)
    except VgpuError as error:
        log.error("cannot serve", gpu=arguments.index, code=error.code.value, reason=str(error))
        sys.exit(1)


def run(settings: Settings, *, take: bool = False) -> None:
    """Serve until SIGTERM. ``VgpuError``: why it cannot."""
    directory = settings.paths.gpu_dir(settings.index)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = f"GPU {settings.index} is served already"
    refusal = VgpuError(ErrorCode.EXISTS, text, f"its lock is {directory / 'lock'}")
    vendor = VENDORS[SIMULATED if settings.simulated else NVIDIA]
    with exclusive(directory / "lock", refusal), vendor.device(settings.index) as gpu:
        claimed = claim(gpu.facts.uuid, take=take)
        journal = Journal(settings.paths.journal(gpu.facts.uuid))
        try:
            partitioner = vendor.partitioner(gpu.facts.uuid, mps_directories(settings))
            server = GpuServer(settings, gpu, partitioner, vendor.checkpointer(), journal)
            trio.run(serve, server, settings)
        finally:
            journal.close()
            claimed.close()


async def serve(server: GpuServer, settings: Settings) -> None:
    listener = listen(settings.paths.server_socket(settings.index), mode=0o600)
    keep_all()
    with listener:
        await server.run(listener)


def mps_directories(settings: Settings) -> MpsDirectories:
    """The directories of this GPU's own MPS daemon. Processes of the vGPUs' owners use them, so they cannot lie below
    the server's private directory."""
    public = settings.paths.runtime / "mps" / str(settings.index)
    return MpsDirectories(public / "pipe", public / "log")


if __name__ == "__main__":
    main()
