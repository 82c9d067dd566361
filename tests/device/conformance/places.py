"""The devices and partitioners that are held against the Protocols, each with the hands that move it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cython_ext.simengine import KERNEL, Engine, create_gpus
from gpuserver.device.base import Activity, Capabilities, Device, GpuFacts, MemoryUse, MpsDirectories, Partitioner
from gpuserver.device.nvidia.mps import CONTROL, PID_FILE, NvidiaMpsDaemon
from gpuserver.device.simulated.card import SimulatedGpu
from gpuserver.device.simulated.mps import SimulatedMpsDaemon
from gpuserver.device.simulated.profiles import PROFILES, Profile
from tests.processes import ended
from vgpu.errors import VgpuError

ROOT = Path(__file__).parents[3]
LIBRARIES = ROOT / "cython_ext" / "lib" / "sim"
MILLISECOND = 1_000_000


@dataclass
class Card:
    """A device, and the engine behind it. ``close`` ends the device alone. ``wait`` lets its time pass."""

    device: Device
    engine: Engine
    close: Callable[[], object]
    wait: Callable[[int], object]

    def process(self, pid: int, amount: int) -> int:
        """A context of process ``pid`` that owns ``amount`` bytes; its number."""
        context = self.engine.open_context(pid)
        assert context is not None
        assert self.engine.take_memory(context, amount)
        return context

    def work(self, context: int, ns: int) -> None:
        """A kernel of ``ns``, which has begun."""
        stream = self.engine.open_stream(context)
        assert stream is not None
        kernel = self.engine.submit(stream, KERNEL, ns)
        while self.engine.operation(stream, kernel)[2] == 0:
            self.wait(5 * MILLISECOND)
            self.device.memory_use()  # by NVML's reading, a simulated GPU of a node reaches the present


class NvmlProcess:
    """``Device`` by requests to ``nvml_process``."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def facts(self) -> GpuFacts:
        return self.ask("facts")

    @property
    def capabilities(self) -> Capabilities:
        return self.ask("capabilities")

    def memory_use(self) -> MemoryUse:
        return self.ask("memory_use")

    def activity(self) -> Activity:
        return self.ask("activity")

    def ask(self, request: str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        answer, refusal = pickle.load(self._process.stdout)
        if refusal is not None:
            raise VgpuError(*refusal)
        return answer


@contextmanager
def nvml(folder: Path) -> Iterator[Card]:
    """NVML through pynvml, with the simulated ``libnvidia-ml.so.1``."""
    create_gpus(folder, 1)
    environment = os.environ | {"VGPU_SIM_DIR": str(folder), "LD_LIBRARY_PATH": str(LIBRARIES)}
    argv = [sys.executable, "-m", "tests.device.conformance.nvml_process"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe) as process, ended(process):
        device = NvmlProcess(process)
        yield Card(device, Engine(folder, 0), lambda: device.ask("close"), lambda ns: time.sleep(ns / 1e9))


@contextmanager
def simulated(profile: Profile) -> Iterator[Card]:
    with SimulatedGpu(profile) as gpu:
        engine = gpu.engine
        yield Card(gpu, engine, lambda: gpu.__exit__(None, None, None), lambda ns: engine.advance(engine.time_ns + ns))


CARDS: dict[str, Callable[[Path], Any]] = {
    "nvml": nvml,
    **{profile.name: (lambda _, profile=profile: simulated(profile)) for profile in PROFILES},
}

STAND_IN = f"""#!/bin/sh
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
if [ "$1" = -d ]; then
    setsid sleep 600 > /dev/null 2>&1 < /dev/null &
    echo $! > {PID_FILE}
else
    read -r command
    kill -0 "$(cat {PID_FILE})" || exit 1
    if [ "$command" = quit ]; then kill "$(cat {PID_FILE})"; rm {PID_FILE}; fi
fi
"""
"""A daemon of MPS: a process that does nothing, and its pid file."""


def nvidia_partitioner(folder: Path) -> Partitioner:
    tool = folder / "bin" / CONTROL
    tool.parent.mkdir()
    tool.write_text(STAND_IN)
    tool.chmod(0o755)
    return NvidiaMpsDaemon("GPU-7", MpsDirectories(folder / "pipe", folder / "log"), multi_user=False)


def simulated_partitioner(folder: Path) -> Partitioner:
    return SimulatedMpsDaemon(MpsDirectories(folder / "pipe", folder / "log"))


PARTITIONERS = {"nvidia": nvidia_partitioner, "simulated": simulated_partitioner}
