"""Recordings as a trace in Chrome's event format, which ui.perfetto.dev opens. Pure.

The format: Google's "Trace Event Format", of which this uses complete events (``X``: ``ts`` and ``dur`` in µs),
instants (``i``), counters (``C``) and names (``M``). A "process" of the trace is a GPU or a vGPU, a "thread" one of its
tracks. On each track events are in order and none overlaps another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vgpu.protocol.trace import LeaseRecord
from vgpu.trace.recording import Recording
from vgpu.trace.spans import activity, busy_of, hand_overs, idle_in

Event = dict[str, Any]

GPU_PIDS: Final = 1_000
"""A GPU's number in the trace is (its index + 1) · 1000; its vGPUs follow."""
LEASES: Final = 1
WAITS: Final = 2
TAILS: Final = 3
IDLE: Final = 4
ACTIVITY: Final = 1
HAND_OVERS: Final = 2
FIRST_PROCESS: Final = 10
"""Two tracks for each process of a vGPU: its activity, its timed launches."""


@dataclass(slots=True)
class _Bar:
    name: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """A process of the trace. ``zero_ns``: when the trace begins."""

    recording: Recording
    pid: int
    zero_ns: int

    def at(self, ns: int) -> float:
        return (ns - self.zero_ns) / 1000

    def meta(self, tid: int, name: str, args: dict[str, Any]) -> Event:
        return {"ph": "M", "pid": self.pid, "tid": tid, "ts": 0, "name": name, "args": args}

    def named(self, name: str, order: int) -> Iterator[Event]:
        yield self.meta(0, "process_name", {"name": name})
        yield self.meta(0, "process_sort_index", {"sort_index": order})

    def track(self, tid: int, name: str, category: str, bars: Iterable[_Bar]) -> Iterator[Event]:
        """The bars that lie in the recorded time, in order, each cut where the one before goes on."""
        yield self.meta(tid, "thread_name", {"name": name})
        yield self.meta(tid, "thread_sort_index", {"sort_index": tid})
        free_ns = self.recording.begin_ns
        for bar in sorted(bars, key=lambda bar: (bar.begin_ns, bar.end_ns)):
            begin_ns, end_ns = max(bar.begin_ns, free_ns), min(bar.end_ns, self.recording.end_ns)
            if begin_ns >= end_ns:
                continue
            free_ns = end_ns
            yield {
                "ph": "X",
                "pid": self.pid,
                "tid": tid,
                "name": bar.name,
                "cat": category,
                "ts": self.at(begin_ns),
                "dur": (end_ns - begin_ns) / 1000,
                "args": bar.args,
            }

    def instant(self, tid: int, name: str, at_ns: int, args: dict[str, Any]) -> Event:
        where = {"pid": self.pid, "tid": tid, "name": name, "cat": "handover"}
        return {"ph": "i", "s": "t", **where, "ts": self.at(at_ns), "args": args}

    def counter(self, name: str, at_ns: int, value_ns: int) -> Event:
        return {
            "ph": "C",
            "pid": self.pid,
            "tid": 0,
            "name": name,
            "ts": self.at(at_ns),
            "args": {"ms": value_ns / 1e6},
        }

    def within(self, at_ns: int) -> bool:
        return self.recording.begin_ns <= at_ns <= self.recording.end_ns


def chrome_trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The whole file, as what ``json.dumps`` takes. Time begins with the first recording."""
    zero_ns = min((recording.begin_ns for recording in recordings), default=0)
    events: list[Event] = []
    for recording in recordings:
        first = (recording.gpu.index + 1) * GPU_PIDS
        events += _gpu(_Place(recording, first, zero_ns))
        for number, vgpu_id in enumerate(_order(recording), 1):
            events += _vgpu(_Place(recording, first + number, zero_ns), vgpu_id)
    events.sort(key=lambda event: (event["ph"] != "M", event["pid"], event["tid"], event["ts"]))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "begin_monotonic_ns": zero_ns,
            "lost_events": sum(recording.lost for recording in recordings),
            "whole": all(recording.whole for recording in recordings),
            "gpus": [recording.gpu.model_dump() for recording in recordings],
            "vgpus": [vgpu.model_dump() for recording in recordings for vgpu in recording.vgpus.values()],
        },
    }


def _order(recording: Recording) -> list[str]:
    """Its vGPUs, those that had nothing to do left out."""
    seen = {lease.vgpu_id for lease in recording.leases} | {wait.vgpu_id for wait in recording.waits}
    seen |= {record.vgpu_id for record in recording.busy}
    return [vgpu_id for vgpu_id in recording.vgpus if vgpu_id in seen] + sorted(seen - recording.vgpus.keys())


def _gpu(place: _Place) -> Iterator[Event]:
    recording, gpu = place.recording, place.recording.gpu
    simulated = ", simulated" if gpu.simulated else ""
    yield from place.named(f"GPU {gpu.index}: {gpu.name}{simulated}, {gpu.mode} mode", place.pid)
    spans = (
        _Bar(" + ".join(map(recording.label, span.vgpus)), span.begin_ns, span.end_ns) for span in activity(recording)
    )
    yield from place.track(ACTIVITY, "GPU activity", "activity", spans)
    if gpu.mode == "spatial":
        return
    gaps = []
    for passed in hand_overs(recording):
        name = f"{recording.label(passed.giver)} → {recording.label(passed.taker)}"
        args = {
            "epoch": passed.epoch,
            "gap_us": passed.gap_ns / 1000,
            "go_after_drain_us": (passed.go_ns - passed.drained_ns) / 1000,
        }
        if passed.gap_ns > 0:
            gaps.append(_Bar(name, passed.begin_ns, passed.end_ns, args))
        elif place.within(passed.begin_ns):
            yield place.instant(HAND_OVERS, name, passed.begin_ns, args)
    yield from place.track(HAND_OVERS, "hand-over gaps", "handover", gaps)


def _vgpu(place: _Place, vgpu_id: str) -> Iterator[Event]:
    recording = place.recording
    name = recording.label(vgpu_id)
    known = "" if name == vgpu_id else f" ({vgpu_id})"
    yield from place.named(f"{name}{known}: {recording.share(vgpu_id)} of GPU {recording.gpu.index}", place.pid)
    leases = [lease for lease in recording.leases if lease.vgpu_id == vgpu_id]
    yield from place.track(LEASES, "leases", "lease", _leases(recording, leases))
    waits = [
        _Bar("wait", wait.begin_ns, wait.end_ns, {"ended": wait.ended})
        for wait in recording.waits
        if wait.vgpu_id == vgpu_id
    ]
    yield from place.track(WAITS, "waits", "wait", waits)
    tails = [
        _Bar("tail", lease.end_ns, lease.drained_ns, {"epoch": lease.epoch})
        for lease in leases
        if lease.end_ns is not None and lease.drained_ns is not None
    ]
    yield from place.track(TAILS, "tails: from a lease's end until it had drained", "tail", tails)
    idle = [_Bar("idle", begin_ns, end_ns) for begin_ns, end_ns in idle_in(recording, vgpu_id)]
    yield from place.track(IDLE, "idle in a lease", "idle", idle)
    yield from _processes(place, vgpu_id)
    for level in recording.levels:
        if level.vgpu_id == vgpu_id and place.within(level.at_ns):
            yield place.counter(f"{level.name}, ms", level.at_ns, level.value_ns)
    for drain in recording.drains:
        if drain.vgpu_id == vgpu_id and place.within(drain.drained_ns):
            yield place.counter(f"window of process {drain.pid}, ms", drain.drained_ns, drain.window_ns)


def _leases(recording: Recording, leases: Sequence[LeaseRecord]) -> Iterator[_Bar]:
    """From GO to the drain, or to GO of the vGPU's next one."""
    inorder = sorted(leases, key=lambda lease: lease.go_ns)
    for i, lease in enumerate(inorder):
        drained_ns = recording.end_ns if lease.drained_ns is None else lease.drained_ns
        end_ns = min(drained_ns, inorder[i + 1].go_ns) if i + 1 < len(inorder) else drained_ns
        args = {
            "epoch": lease.epoch,
            "generation": recording.gpu.generation,
            "granted_ns": lease.granted_ns,
            "held_ns": drained_ns - lease.go_ns,
            "charged_ns": lease.charged_ns,
            "busy_ns": lease.busy_ns,
            "window_ns": lease.window_ns,
            "ended": lease.ended,
            "tail_ns": max(0, drained_ns - lease.end_ns) if lease.end_ns is not None else 0,
        }
        yield _Bar("shared lease" if lease.shared else "lease", lease.go_ns, end_ns, args)


def _processes(place: _Place, vgpu_id: str) -> Iterator[Event]:
    recording = place.recording
    busy = [record for record in recording.busy if record.vgpu_id == vgpu_id]
    timed = [record for record in recording.launches if record.vgpu_id == vgpu_id]
    processes = sorted({(r.slot, r.pid) for r in busy} | {(r.slot, r.pid) for r in timed})
    for number, (slot, pid) in enumerate(processes):
        tid = FIRST_PROCESS + 2 * number
        own = Recording(recording.gpu, 0, 0, busy=[r for r in busy if (r.slot, r.pid) == (slot, pid)])
        bars = [_Bar("busy", begin, end) for intervals in busy_of(own).values() for begin, end in intervals]
        yield from place.track(tid, f"GPU activity of process {pid}", "activity", bars)
        launches = [
            _Bar(
                f"{'graph' if launch.graph else 'kernel'} {launch.key:06x}",
                launch.seen_ns - launch.lasted_ns,
                launch.seen_ns,
                {"lasted_us": launch.lasted_ns / 1000},
            )
            for launch in timed
            if (launch.slot, launch.pid) == (slot, pid)
        ]
        yield from place.track(tid + 1, f"timed launches of process {pid}", "launch", launches)
