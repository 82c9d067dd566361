"""The vendors whose devices a GPU Server can serve: one entry each."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from gpuserver.device.base import Checkpointer, Device, MpsDirectories, Partitioner
from gpuserver.device.nvidia.checkpoint import NvidiaCheckpointer
from gpuserver.device.nvidia.mps import NvidiaMpsDaemon
from gpuserver.device.nvidia.nvml import NvmlGpu
from gpuserver.device.simulated.mps import SimulatedMpsDaemon


@dataclass(frozen=True, slots=True)
class Vendor:
    """How the devices of one vendor are reached. Nothing is started before a method of the result is called."""

    device: Callable[[int], AbstractContextManager[Device]]
    """Opens the GPU with an index. ``VgpuError`` (unavailable, not-found): the driver does not start, or has no such
    GPU."""
    partitioner: Callable[[str, MpsDirectories], Partitioner]
    """Of the GPU with a UUID, in directories of its own."""
    checkpointer: Callable[[], Checkpointer]


def _nvidia_partitioner(uuid: str, directories: MpsDirectories) -> Partitioner:
    return NvidiaMpsDaemon(uuid, directories, multi_user=os.geteuid() == 0)


def _simulated_partitioner(_: str, directories: MpsDirectories) -> Partitioner:
    return SimulatedMpsDaemon(directories)


NVIDIA: Final = "nvidia"
SIMULATED: Final = "simulated"
VENDORS: Final = {
    NVIDIA: Vendor(NvmlGpu, _nvidia_partitioner, NvidiaCheckpointer),
    # The simulated GPUs of a node come with a driver that has NVIDIA's interface: cython_ext/sim.
    SIMULATED: Vendor(NvmlGpu, _simulated_partitioner, NvidiaCheckpointer),
}
