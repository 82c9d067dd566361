"""Host-bound programs beside each other: how many requests they answer."""

from __future__ import annotations

import time
from typing import Final

import trio

from vgpu.enums import LeaseChoice
from vgpu.harness.program import Workload, WorkloadReport, begin, environment_of
from vgpu.verify.ground import Ground
from vgpu.verify.plan import Lengths

PERCENTS: Final = (30.0, 31.0, 32.0)
"""Each needs the GPU for a third of its time, so under exclusive leases two of three would wait."""
HOST_MS: Final = 1.0
_HEAD_START_NS: Final = 30_000_000
_REPORT_EVERY_S: Final = 0.05


async def requests_per_s(ground: Ground, lengths: Lengths, *, lease: LeaseChoice | None) -> float:
    """A program in each of three vGPUs: of one kernel, and a pause of its host, again and again; the requests of all.
    ``lease`` None: in no vGPU. ``VgpuError`` if one fails, or ends before the window does."""
    async with ground.vgpus(*PERCENTS, lease=lease or LeaseChoice.AUTO) as vgpus, trio.open_nursery() as programs:
        seconds = (lengths.warm_up_ns + lengths.control_ns) / 1e9 + 2 * _REPORT_EVERY_S
        workload = Workload(seconds, waits=True, report_every_s=_REPORT_EVERY_S, host_ms=HOST_MS)
        environments = [environment_of(vgpu, limited=lease is not None) for vgpu in vgpus]
        started = await ground.start(programs, [workload] * len(vgpus), environments)
        begin_ns = time.monotonic_ns() + _HEAD_START_NS
        for _, process in started:
            await begin(process, begin_ns)
    start_ns = begin_ns + lengths.warm_up_ns
    return sum(_rate(report, start_ns, start_ns + lengths.control_ns) for report, _ in started)


def _rate(report: WorkloadReport, start_ns: int, end_ns: int) -> float:
    """Kernels a second. Each program has calibrated its kernel by itself, so their work differs a little."""
    worth = float(report.result["work"]) / max(1, int(report.result["kernels"]))
    return report.series.rate(start_ns, end_ns) / worth
