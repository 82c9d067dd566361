"""What follows from a recording: when the GPU worked for which vGPU, passed to another one, or was idle. Pure.

Under exclusive leases the GPU does one process's work after another's. But a process reports its work from the time of
its submission. So if two processes claim the same time, the GPU was still at work for the first one. Under shared
leases the GPU's time slicing runs several side by side, and it is not known which of them had a slice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from vgpu.protocol.trace import LeaseRecord
from vgpu.trace.recording import Recording

TOUCH_NS: Final = 1_000
"""Intervals closer than that are one."""
IDLE_LEAST_NS: Final = 20_000
"""Shorter gaps are the host's time between two launches, and a recording does not contain all of them."""


@dataclass(frozen=True, slots=True)
class Span:
    """The GPU had work of ``vgpus``: one, or in spatial mode and under shared leases several at the same time."""

    vgpus: tuple[str, ...]
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """``taker`` had waited for the GPU, and followed ``giver``. It lasts from ``begin_ns``, the end of the giver's
    work, to ``end_ns``, the beginning of the taker's, as far as the two know these. ``epoch``: of the taker's lease,
    with GO at ``go_ns``; the giver's drained at ``drained_ns``."""

    giver: str
    taker: str
    begin_ns: int
    end_ns: int
    drained_ns: int
    go_ns: int
    epoch: int

    @property
    def gap_ns(self) -> int:
        return self.end_ns - self.begin_ns


def merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Their union, in order."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + TOUCH_NS:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def busy_of(recording: Recording) -> dict[str, list[tuple[int, int]]]:
    """By vGPU, when any of its processes had work on the GPU."""
    said: dict[str, list[tuple[int, int]]] = {}
    for record in recording.busy:
        said.setdefault(record.vgpu_id, []).append((record.begin_ns, record.end_ns))
    return {vgpu_id: merged(intervals) for vgpu_id, intervals in said.items()}


def activity(recording: Recording) -> list[Span]:
    """When the GPU worked, and for which vGPUs: in order, without overlaps."""
    busy = busy_of(recording)
    if recording.gpu.mode == "spatial" or any(lease.shared for lease in recording.leases):
        return _side_by_side(busy)
    spans: list[Span] = []
    free_ns = 0
    for begin, end, vgpu_id in sorted((begin, end, v) for v, intervals in busy.items() for begin, end in intervals):
        if end > free_ns:
            spans.append(Span((vgpu_id,), max(begin, free_ns), end))
            free_ns = end
    return spans


def _side_by_side(busy: dict[str, list[tuple[int, int]]]) -> list[Span]:
    turns = sorted(
        (at_ns, starts, vgpu_id)
        for vgpu_id, intervals in busy.items()
        for begin, end in intervals
        for at_ns, starts in ((begin, True), (end, False))
    )
    spans: list[Span] = []
    working: set[str] = set()
    since_ns = 0
    for at_ns, starts, vgpu_id in turns:
        if working and at_ns > since_ns:
            spans.append(Span(tuple(sorted(working)), since_ns, at_ns))
        since_ns = at_ns
        if starts:
            working.add(vgpu_id)
        else:
            working.discard(vgpu_id)
    return spans


def hand_overs(recording: Recording) -> list[HandOver]:
    """Every time that the GPU passed from one vGPU to another that was waiting for it, in order. Temporal mode only;
    shared leases pass nothing on."""
    if recording.gpu.mode == "spatial":
        return []
    busy = busy_of(recording)
    waited = {(wait.vgpu_id, wait.end_ns): wait.begin_ns for wait in recording.waits if wait.ended == "lease"}
    leases = sorted((lease for lease in recording.leases if not lease.shared), key=lambda lease: lease.go_ns)
    found = []
    for i, taken in enumerate(leases[1:], 1):
        given = leases[i - 1]
        since_ns = waited.get((taken.vgpu_id, taken.go_ns))
        if given.vgpu_id == taken.vgpu_id or given.drained_ns is None or since_ns is None:
            continue
        if since_ns < given.drained_ns:
            made = _hand_over(given, taken, given.drained_ns, busy)
            found += [made] if made is not None and recording.begin_ns <= made.begin_ns else []
    return found


def _hand_over(
    given: LeaseRecord, taken: LeaseRecord, drained_ns: int, busy: dict[str, list[tuple[int, int]]]
) -> HandOver | None:
    """None: the taker has done nothing in its lease."""
    begin_ns, end_ns = drained_ns, taken.go_ns
    givers, takers = busy.get(given.vgpu_id, []), busy.get(taken.vgpu_id, [])
    before = bisect_right(givers, (drained_ns, drained_ns)) - 1
    if before >= 0 and givers[before][1] > given.go_ns:
        begin_ns = min(givers[before][1], drained_ns)
    if takers:
        after = bisect_right(takers, taken.go_ns, key=lambda interval: interval[1])
        over_ns = taken.drained_ns
        if after == len(takers) or (over_ns is not None and takers[after][0] >= over_ns):
            return None
        end_ns = max(takers[after][0], taken.go_ns)
    return HandOver(given.vgpu_id, taken.vgpu_id, begin_ns, max(begin_ns, end_ns), drained_ns, taken.go_ns, taken.epoch)


def idle_in(recording: Recording, vgpu_id: str) -> list[tuple[int, int]]:
    """When ``vgpu_id`` held a lease and had nothing on the GPU, by the reports of its processes. Gaps of less than
    20 µs are left out. Empty if none of them reported anything."""
    busy = busy_of(recording).get(vgpu_id)
    if busy is None:
        return []
    held = merged(
        (max(lease.go_ns, recording.begin_ns), recording.end_ns if lease.drained_ns is None else lease.drained_ns)
        for lease in recording.leases
        if lease.vgpu_id == vgpu_id
    )
    found = []
    for begin, end in held:
        free_ns = begin
        first = bisect_right(busy, begin, key=lambda interval: interval[1])
        for since, until in busy[first:]:
            if since >= end:
                break
            if since - free_ns >= IDLE_LEAST_NS:
                found.append((free_ns, since))
            free_ns = max(free_ns, until)
        if end - free_ns >= IDLE_LEAST_NS:
            found.append((free_ns, end))
    return found
