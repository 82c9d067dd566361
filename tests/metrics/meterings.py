"""Meterings for tests: any that a node could send, by Hypothesis; and one of a busy node."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from tests.ctl.fake_node import gpu_reading, process_reading, vgpu_reading
from vgpu.errors import ErrorCode, VgpuError
from vgpu.metrics.kinds import Seen
from vgpu.protocol.messages import GpuStatus, MetricsSnapshot, ProcessReading, Snapshot, VgpuStatus
from vgpu.protocol.meters import GpuMeters, Histogram, VgpuMeters
from vgpu.spec import VgpuSpec

BOUNDS_NS = tuple(round(10_000 * 10 ** (step / 3)) for step in range(18))  # 10 µs to 5 s
COUNTS = st.integers(0, 2**53)
RATIOS = st.floats(0, 64, allow_nan=False)
AMOUNTS = st.integers(0, 2**60)
STATES = get_args(VgpuStatus.model_fields["state"].annotation)
GPU_STATES = get_args(GpuStatus.model_fields["state"].annotation)


def seen(metering: MetricsSnapshot | None) -> Seen:
    error = None if metering else VgpuError(ErrorCode.UNAVAILABLE, "nobody answers")
    return Seen(metering, error, "9.9.9" if metering else "", "0.1.0", lambda: 0.25)


def histogram(counts: tuple[int, ...] = (1,) * (len(BOUNDS_NS) + 1)) -> Histogram:
    return Histogram(bounds_ns=BOUNDS_NS, counts=counts, sum_ns=sum(counts) * 1_000_000)


@st.composite
def histograms(draw: st.DrawFn) -> Histogram:
    bounds = sorted(draw(st.sets(st.integers(1, 10**11), max_size=3)))
    counts = draw(st.lists(st.integers(0, 2**40), min_size=len(bounds) + 1, max_size=len(bounds) + 1))
    return Histogram(bounds_ns=tuple(bounds), counts=tuple(counts), sum_ns=draw(st.integers(0, 2**60)))


@st.composite
def gpus(draw: st.DrawFn, index: int) -> GpuStatus:
    mode = draw(st.sampled_from(["temporal", "spatial"]))
    maybe = st.none() | RATIOS
    return gpu_reading(
        index=index,
        name=draw(st.text(max_size=12)),
        state=draw(st.sampled_from(GPU_STATES)),
        mode=mode,
        mps_pid=draw(st.none() | st.integers(1, 2**22)),
        restarts=draw(COUNTS),
        held_ratio=draw(RATIOS),
        used_memory_bytes=draw(AMOUNTS),
        utilization_ratio=draw(maybe),
        power_w=draw(maybe),
        temperature_c=draw(maybe),
        sm_clock_mhz=draw(maybe),
    )


@st.composite
def vgpus(draw: st.DrawFn) -> VgpuStatus:
    return vgpu_reading(
        vgpu_id=f"vgpu-{draw(st.integers(0, 3)):08x}",
        gpu_index=draw(st.integers(0, 2)),
        name=draw(st.none() | st.text(min_size=1, max_size=12)),
        state=draw(st.sampled_from(STATES)),
        owner_uid=draw(st.integers(0, 2**32 - 1)),
        tokens=draw(COUNTS),
        held_ns=draw(AMOUNTS),
        lag_ns=draw(st.integers(-(2**60), 2**60)),
        throttled=draw(st.booleans()),
        memory_used_bytes=draw(AMOUNTS),
        busy_ratio=draw(RATIOS),
    )


@st.composite
def processes(draw: st.DrawFn) -> ProcessReading:
    fields = process_reading(
        vgpu_id=f"vgpu-{draw(st.integers(0, 3)):08x}",
        gpu_index=draw(st.integers(0, 2)),
        slot=draw(st.integers(0, 63)),
        pid=draw(st.integers(1, 4)),
        command=draw(st.text(max_size=12)),
        alive=draw(st.booleans()),
        launches=draw(COUNTS),
    )
    return ProcessReading.model_validate(fields)


@st.composite
def meterings(draw: st.DrawFn) -> MetricsSnapshot:
    """Of up to three GPUs. Also such as no node should send: vGPUs of no GPU, processes of no vGPU, some twice."""
    served = draw(st.sets(st.integers(0, 2)))
    snapshot = Snapshot(
        at_unix_s=1.0,
        gpus=tuple(draw(gpus(index)) for index in served),
        vgpus=tuple(draw(st.lists(vgpus(), max_size=3))),
    )
    metered = draw(st.sets(st.integers(0, 2)))
    return MetricsSnapshot(
        snapshot=snapshot,
        processes=tuple(draw(st.lists(processes(), max_size=4))),
        gpus=tuple(
            GpuMeters(gpu_index=index, handovers=draw(histograms()), loop_lag=draw(histograms())) for index in metered
        ),
        vgpus=tuple(
            VgpuMeters(vgpu_id=vgpu.vgpu_id, gpu_index=vgpu.gpu_index, waits=draw(histograms()))
            for vgpu in snapshot.vgpus
            if draw(st.booleans())
        ),
    )


def busy(count: int = 64, processes_each: int = 1) -> MetricsSnapshot:
    """A GPU with ``count`` vGPUs at work, as a server that has counted for a while tells of it."""
    ids = [f"vgpu-{number:08x}" for number in range(count)]
    return MetricsSnapshot(
        snapshot=Snapshot(
            at_unix_s=1_700_000_000.0,
            gpus=(gpu_reading(utilization_ratio=0.97, power_w=512.5, temperature_c=61.0, sm_clock_mhz=1980.0),),
            vgpus=tuple(
                vgpu_reading(
                    vgpu_id=vgpu_id,
                    name=f"job-{number}",
                    spec=VgpuSpec(sm_percent=1, name=f"job-{number}"),
                    tokens=1_234_567 + number,
                    held_ns=123_456_789_123 * (number + 1),
                    busy_ns=120_456_789_123 * (number + 1),
                    overuse_ns=456_789_123,
                    lag_ns=-12_345_678 + 1_000_000 * number,
                    launches=98_765_432 + number,
                )
                for number, vgpu_id in enumerate(ids)
            ),
        ),
        processes=tuple(
            ProcessReading.model_validate(
                process_reading(vgpu_id=vgpu_id, slot=slot, pid=1000 + 64 * number + slot, launches=7_654_321)
            )
            for number, vgpu_id in enumerate(ids)
            for slot in range(processes_each)
        ),
        gpus=(GpuMeters(gpu_index=0, handovers=histogram(), loop_lag=histogram()),),
        vgpus=tuple(VgpuMeters(vgpu_id=vgpu_id, gpu_index=0, waits=histogram()) for vgpu_id in ids),
    )
