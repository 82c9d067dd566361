"""A holder that ends in mid-lease, beside a neighbour that also wants the GPU: the effects on the neighbour."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from vgpu.errors import ErrorCode, VgpuError
from vgpu.harness.program import Workload, WorkloadReport, environment_of
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import VgpuStatus
from vgpu.protocol.trace import LeaseRecord
from vgpu.trace.collect import Collector
from vgpu.trace.recording import Recording
from vgpu.verify.ground import Ground, eventually
from vgpu.verify.measured import Ending

HOLDER_PERCENT: Final = 90.0
"""Whenever it is ended, it most likely holds a lease."""
NEIGHBOUR_PERCENT: Final = 10.0
"""Beyond this it may take what is idle. Otherwise it might wait for its own limit, and not for the lease."""
HELD_BYTES: Final = 256 << 20
"""What the holder has allocated besides its context."""
_LONGEST_NS: Final = 120 * 10**9
_IN_VAIN: Final = 3
"""So many more may be ended, in place of those that held no lease."""
_POLL_S: Final = 0.01
_SETTLED_S: Final = 0.3
"""Before the end: both have had several leases, and their contexts are charged."""
_RECORDED_S: Final = 5.0
"""A recording has each event within a second."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """An end as it was seen from outside. The recording shows later what happened to the lease."""

    at_ns: int
    held_bytes: int
    kept_bytes: int
    gone_ns: int | None
    neighbour_bytes: tuple[int, int]
    neighbour_work: float


async def endings(
    ground: Ground, count: int, number: signal.Signals, patience_s: float, *, limited: bool
) -> list[Ending]:
    """``count`` holders, one after the other, ended by signal ``number``. A holder without a lease at that moment does
    not count. Within ``patience_s`` the lease and the memory have to be back.

    ``VgpuError``: hardly any held one, or a program failed.
    """
    async with ground.vgpus(HOLDER_PERCENT, NEIGHBOUR_PERCENT, bursting=NEIGHBOUR_PERCENT) as vgpus:
        link = await trio.to_thread.run_sync(ControlLink, ground.control_socket)
        collector = Collector(link, str(ground.gpu.index), _LONGEST_NS, work=False)
        try:
            return await _ended(ground, vgpus, collector, count, number, patience_s, limited=limited)
        finally:
            with trio.CancelScope(shield=True):  # it ends at once
                await trio.to_thread.run_sync(collector.stop)
            link.close()


async def _ended(
    ground: Ground,
    vgpus: Sequence[VgpuStatus],
    collector: Collector,
    count: int,
    number: signal.Signals,
    patience_s: float,
    *,
    limited: bool,
) -> list[Ending]:
    holder, neighbour = (environment_of(vgpu, limited=limited) for vgpu in vgpus)
    found: list[Ending] = []
    async with trio.open_nursery() as nursery:
        [(report, beside)] = await ground.start(
            nursery, [Workload(_LONGEST_NS / 1e9, report_every_s=0.05)], [neighbour]
        )
        for _ in range(count + _IN_VAIN):
            workload = Workload(_LONGEST_NS / 1e9, hold_bytes=HELD_BYTES)
            [(_, process)] = await ground.start(nursery, [workload], [holder])
            await trio.sleep(_SETTLED_S)
            seen = await _end(ground, vgpus, process, report, number, patience_s)
            leases = await _leases_after(collector, seen.at_ns, vgpus[1].vgpu_id, patience_s)
            ending = _ending(seen, leases, *(vgpu.vgpu_id for vgpu in vgpus))
            process.kill()  # one that is only stopped
            await process.wait()
            found += [ending] if ending is not None else []
            if len(found) == count:
                break
        beside.kill()
    if not found:
        raise VgpuError(ErrorCode.INTERNAL, "no holder was ended while it held a lease", "try it once more")
    return found


async def _end(
    ground: Ground,
    vgpus: Sequence[VgpuStatus],
    process: trio.Process,
    report: WorkloadReport,
    number: signal.Signals,
    patience_s: float,
) -> _Seen:
    with trio.move_on_after(patience_s):
        while True:
            before = await ground.readings(vgpus)
            if before[0].holds and before[1].wants:
                break
            await trio.sleep(_POLL_S)
    at_ns = time.monotonic_ns()
    process.send_signal(number)
    gone_ns = None
    with trio.move_on_after(patience_s):
        while True:
            after = await ground.readings(vgpus)
            if after[0].memory_used_bytes == 0:
                gone_ns = time.monotonic_ns() - at_ns
                break
            await trio.sleep(_POLL_S)
    worked = _work_after(report, at_ns)
    await eventually(lambda: _work_after(report, at_ns) > worked, patience_s)
    return _Seen(
        at_ns=at_ns,
        held_bytes=before[0].memory_used_bytes,
        kept_bytes=after[0].memory_used_bytes,
        gone_ns=gone_ns,
        neighbour_bytes=(before[1].memory_used_bytes, after[1].memory_used_bytes),
        neighbour_work=_work_after(report, at_ns),
    )


def _work_after(report: WorkloadReport, at_ns: int) -> float:
    """The work that the program has finished since its first report after ``at_ns``."""
    since = [sample.work for sample in report.series.samples if sample.at_ns > at_ns]
    return since[-1] - since[0] if since else 0.0


async def _leases_after(collector: Collector, at_ns: int, neighbour: str, patience_s: float) -> Sequence[LeaseRecord]:
    """All recorded leases. The recording goes on until ``neighbour`` had a lease that began after ``at_ns``, at most
    ``patience_s``."""

    def recorded() -> bool:
        recording = collector.recording
        recorded_s = -1.0 if recording is None else (recording.end_ns - at_ns) / 1e9
        if recording is None or recorded_s < _SETTLED_S:
            return False
        began = (lease.vgpu_id == neighbour and lease.go_ns > at_ns for lease in _leases(recording))
        return any(began) or recorded_s >= patience_s

    await eventually(recorded, patience_s + _RECORDED_S)
    if collector.recording is None:
        raise collector.error or VgpuError(ErrorCode.INTERNAL, "the GPU Server recorded nothing")
    return _leases(collector.recording)


def _leases(recording: Recording) -> list[LeaseRecord]:
    return [*recording.leases, *(one for one in recording.under_way if isinstance(one, LeaseRecord))]


def _ending(seen: _Seen, leases: Sequence[LeaseRecord], holder: str, neighbour: str) -> Ending | None:
    """None: ``holder`` held no lease then."""
    held = any(
        lease.vgpu_id == holder and lease.go_ns <= seen.at_ns < (lease.drained_ns or seen.at_ns + 1) for lease in leases
    )
    if not held:
        return None
    after = [lease.go_ns for lease in leases if lease.vgpu_id == neighbour and lease.go_ns > seen.at_ns]
    return Ending(
        lease_back_ns=min(after) - seen.at_ns if after else None,
        held_bytes=seen.held_bytes,
        kept_bytes=seen.kept_bytes,
        gone_ns=seen.gone_ns,
        neighbour_bytes=seen.neighbour_bytes,
        neighbour_work=seen.neighbour_work,
    )
