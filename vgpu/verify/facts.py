"""The origin of the figures: facts that a reader has to know."""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from client_hook.doctor import probe_driver
from vgpu.ctl.node import software_version
from vgpu.protocol.messages import GpuStatus
from vgpu.units import format_bytes


def facts(gpu: GpuStatus, arguments: Sequence[str]) -> dict[str, str]:
    """The facts as text, by name. ``arguments``: of the command line."""
    kind = "simulated: no figure says anything about a real one" if gpu.simulated else gpu.uuid
    driver = "none: the simulated GPU has its own" if gpu.simulated else probe_driver().version or "not known"
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "GPU": f"{gpu.name}, {gpu.sm_count} SMs, {format_bytes(gpu.total_memory_bytes)} ({kind})",
        "driver": driver,
        "machine": f"{platform.node()}, {_cpu()}, {format_bytes(memory_bytes)}",
        "load": f"{os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, over the last minute",
        "system": f"Linux {platform.release()}, Python {platform.python_version()}",
        "st-vgpu": software_version(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": shlex.join(["vgpuctl", *arguments]),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
