"""Programs that load the GPU as much as they may, alone or beside each other: what they finish, and GPU time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import trio

from vgpu.errors import ErrorCode, VgpuError
from vgpu.harness.measure import Sample, Series
from vgpu.harness.program import Workload, WorkloadReport, begin, environment_of
from vgpu.protocol.messages import VgpuStatus
from vgpu.verify.ground import Ground
from vgpu.verify.measured import Interval, ProgramRun, ShareRun, series_of, stamped_ratio
from vgpu.verify.plan import Lengths

_HEAD_START_NS: Final = 30_000_000
"""All programs learn within this time when to begin."""
_READ_EVERY_S: Final = 0.1
_REPORT_EVERY_S: Final = 0.1
PICTURE_NS: Final = 300_000_000
"""So much of the window is kept kernel by kernel."""


async def share_run(
    ground: Ground, percents: Sequence[float], window_ns: int, lengths: Lengths, *, limited: bool
) -> ShareRun:
    """One program for each of ``percents``, in a vGPU of that share; ``limited`` False: in none.

    ``VgpuError`` if one fails, or ends before the window does.
    """
    async with ground.vgpus(*percents) as vgpus, trio.open_nursery() as reading:
        books = [Series() for _ in vgpus]
        async with trio.open_nursery() as programs:
            seconds = (lengths.warm_up_ns + window_ns + lengths.tail_ns) / 1e9
            workload = Workload(seconds, waits=True, stamped=True, report_every_s=_REPORT_EVERY_S)
            environments = [environment_of(vgpu, limited=limited) for vgpu in vgpus]
            started = await ground.start(programs, [workload] * len(vgpus), environments)
            begin_ns = time.monotonic_ns() + _HEAD_START_NS
            for _, process in started:
                await begin(process, begin_ns)
            if limited:
                reading.start_soon(_read_books, ground, vgpus, books)
        reading.cancel_scope.cancel()
    start_ns = begin_ns + lengths.warm_up_ns
    reports = [one for one, _ in started]
    return _run(percents, reports, books if limited else None, start_ns, start_ns + window_ns, lengths.warm_up_ns)


async def _read_books(ground: Ground, vgpus: Sequence[VgpuStatus], books: Sequence[Series]) -> None:
    while True:
        before_ns = time.monotonic_ns()
        readings = await ground.readings(vgpus)
        at_ns = (before_ns + time.monotonic_ns()) // 2
        for series, vgpu in zip(books, readings, strict=True):
            series.add(Sample(at_ns, vgpu.busy_ns))
        await trio.sleep(_READ_EVERY_S)


def _run(
    percents: Sequence[float],
    reports: Sequence[WorkloadReport],
    books: Sequence[Series] | None,
    start_ns: int,
    end_ns: int,
    warm_up_ns: int,
) -> ShareRun:
    stamps = [[(first, last) for first, last in one.result.get("intervals_ns", ())] for one in reports]
    if not all(stamps):
        raise _too_short()
    # The GPU's clock is not the host's. On the GPU's clock, the window begins ``warm_up_ns`` after the first kernel.
    on_gpu_ns = max(kernels[0][0] for kernels in stamps) + warm_up_ns
    until_ns = on_gpu_ns + end_ns - start_ns
    if min(kernels[-1][1] for kernels in stamps) < until_ns:
        raise _too_short()
    try:
        work_per_s = [one.series.rate(start_ns, end_ns) for one in reports]
        busy = [None] * len(reports) if books is None else [series.rate(start_ns, end_ns) / 1e9 for series in books]
    except ValueError as error:
        raise _too_short() from error
    return ShareRun(
        tuple(
            ProgramRun(
                percent=percent,
                device_ratio=stamped_ratio(kernels, on_gpu_ns, until_ns),
                books_ratio=books_ratio,
                work_per_s=rate,
                work_series=tuple(_worth(one.result) * n for n in series_of(kernels, on_gpu_ns, until_ns)),
                kernels=_picture(kernels, on_gpu_ns),
            )
            for percent, kernels, one, rate, books_ratio in zip(
                percents, stamps, reports, work_per_s, busy, strict=True
            )
        )
    )


def _worth(result: dict[str, Any]) -> float:
    """Work in one kernel."""
    return float(result["work"]) / max(1, int(result["kernels"]))


def _picture(kernels: Sequence[Interval], begin_ns: int) -> tuple[Interval, ...]:
    end_ns = begin_ns + PICTURE_NS
    return tuple((a - begin_ns, b - begin_ns) for a, b in kernels if a >= begin_ns and b <= end_ns)


def _too_short() -> VgpuError:
    return VgpuError(ErrorCode.INTERNAL, "a program ended too early to be measured", "try it once more")
