"""The records of leases and waits in a recording: events and commands of a scheduler in, records out. Pure.

A recorder gets the scheduler's events (``on_event``) and then its commands (``on_command``), decision by decision. It
knows a lease from its publication to its drain, and a wait from the moment a vGPU wants the GPU without a lease.
``enter`` gives it the state at its beginning, and ``finish`` records the leases and waits that last at its end. Times
are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from cython_ext.readings import TraceKind, TraceReading
from gpuserver.core.scheduler.leases import (
    AccountSnapshot,
    Command,
    Drained,
    Event,
    Idle,
    Lease,
    LeaseStarted,
    Observed,
    Publish,
    Removed,
    Runnable,
    VgpuIndex,
    Withdraw,
)
from vgpu.protocol.trace import BusyRecord, DrainRecord, LaunchRecord, LeaseRecord, LevelRecord, TraceRecord, WaitRecord

MOST_LOST: Final = (1 << 63) - 1
"""The most that a message can carry."""
Ended = Literal["ended", "returned", "revoked", "removed", "in-force"]


@dataclass(slots=True)
class _Course:
    """A lease that is not over, as the dispatcher has it. ``most_end_ns``: the latest end that it had since GO; None:
    it was open-ended."""

    lease: Lease
    go_ns: int | None = None
    most_end_ns: int | None = None
    idle_ns: int = 0
    withdrawn: bool = False
    shared: bool = False
    """It is, or was, a shared lease."""

    def go(self, at_ns: int, taken_ns: int = 0) -> None:
        """GO: the record begins where the charge begins."""
        self.lease = self.lease.begun(at_ns)
        self.go_ns, self.most_end_ns = at_ns - taken_ns, self.lease.end_ns

    def publish(self, lease: Lease) -> None:
        if self.go_ns is None:
            self.lease = lease
            return
        self.lease = replace(self.lease, end_ns=lease.end_ns, window_ns=lease.window_ns)
        if self.most_end_ns is not None:
            self.most_end_ns = None if lease.end_ns is None else max(self.most_end_ns, lease.end_ns)

    @property
    def cut(self) -> bool:
        """Whether it ends earlier than an end that was published before."""
        if self.withdrawn:
            return True
        end_ns = self.lease.end_ns
        return end_ns is not None and (self.most_end_ns is None or end_ns < self.most_end_ns)


@dataclass(slots=True)
class _Track:
    vgpu_id: str
    courses: dict[int, _Course] = field(default_factory=dict)
    waits_since_ns: int | None = None
    held_ns: int = 0
    """Of all its leases that are over, as the scheduler has charged them."""
    busy_ns: int = 0

    @property
    def holds(self) -> bool:
        return any(course.go_ns is not None for course in self.courses.values())


class Recorder:
    """Collects records; ``take`` hands them over. Keeps ``most`` at a time: beyond, they are dropped and counted."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tracks: dict[VgpuIndex, _Track] = {}
        self._records: deque[TraceRecord] = deque()
        self._lost = 0

    # --- input

    def enter(
        self,
        key: VgpuIndex,
        vgpu_id: str,
        now_ns: int,
        *,
        leases: Iterable[tuple[Lease, bool]] = (),
        wants: bool = False,
        booked: tuple[int, int] = (0, 0),
    ) -> None:
        """A vGPU's state at ``now_ns``. ``leases``: its published leases, and whether each has started; ``booked``:
        held and busy time of those that are over."""
        track = self._tracks[key] = _Track(vgpu_id, held_ns=booked[0], busy_ns=booked[1])
        for lease, went in leases:
            course = track.courses[lease.epoch] = _Course(lease)
            if went:
                course.go(lease.start_ns)
        if wants and not track.holds:
            track.waits_since_ns = now_ns

    def on_event(self, event: Event, now_ns: int, booked: tuple[int, int] | None = None) -> None:
        """``booked``: as in ``enter``, after the last ``Drained`` of its vGPU before a decision."""
        track = None if not hasattr(event, "vgpu") else self._tracks.get(event.vgpu)
        if track is None:
            return
        match event:
            case Runnable():
                self._wants(track, now_ns)
            case Idle():
                self._waited(track, now_ns, "gave-up")
            case LeaseStarted(epoch=epoch, at_ns=at_ns, taken_ns=taken_ns):
                self._waited(track, at_ns - taken_ns, "lease")
                # An unknown lease was withdrawn a moment ago: it ends as soon as it has drained.
                course = track.courses.setdefault(
                    epoch, _Course(Lease(event.vgpu, epoch, at_ns, at_ns), withdrawn=True)
                )
                if course.go_ns is None:
                    course.go(at_ns, taken_ns)
            case Drained():
                self._drained(track, event, booked)
            case Observed():
                self._observed(track, event, now_ns)
            case Removed(vgpu=key):
                self._waited(track, now_ns, "gave-up")
                for lease in _open_leases(track, now_ns, "removed"):
                    self.add(lease)
                del self._tracks[key]
            case _:
                pass

    def on_command(self, command: Command) -> None:
        """Take in the scheduler's commands, in order."""
        match command:
            case Publish(lease=lease):
                track = self._tracks.get(lease.vgpu)
                if track is None:
                    return
                track.courses.setdefault(lease.epoch, _Course(lease)).publish(lease)
            case Withdraw(vgpu=key, epoch=epoch):
                track = self._tracks.get(key)
                course = None if track is None else track.courses.get(epoch)
                if track is None or course is None:
                    return
                if course.go_ns is None:
                    del track.courses[epoch]
                course.withdrawn = True  # its start, if any, was among the events that led to this

    def shares(self, key: VgpuIndex) -> None:
        """The vGPU's leases are shared ones from now on."""
        track = self._tracks.get(key)
        for course in () if track is None else track.courses.values():
            course.shared = True

    def stands(self, statement: AccountSnapshot, now_ns: int) -> None:
        """Record the lag of a vGPU's account."""
        track = self._tracks.get(statement.vgpu)
        if track is not None:
            self.add(LevelRecord(vgpu_id=track.vgpu_id, name="lag", at_ns=now_ns, value_ns=statement.lag_ns))

    def finish(self, now_ns: int) -> None:
        """The recording ends: record leases and waits that are not over as they stand."""
        for record in self.under_way(now_ns):
            self.add(record)
        self._tracks.clear()

    def under_way(self, now_ns: int) -> list[LeaseRecord | WaitRecord]:
        """Leases and waits that are not over, as they stand."""
        found: list[LeaseRecord | WaitRecord] = []
        for track in self._tracks.values():
            found += _open_leases(track, now_ns, "in-force")
            since_ns = track.waits_since_ns
            if since_ns is not None and since_ns < now_ns:
                found.append(WaitRecord(vgpu_id=track.vgpu_id, begin_ns=since_ns, end_ns=now_ns, ended="still-waits"))
        return found

    # --- output

    def add(self, record: TraceRecord) -> None:
        if len(self._records) < self._most:
            self._records.append(record)
        else:
            self.miss(1)

    def miss(self, count: int) -> None:
        """So many events were lost before they arrived here. A tenant reports the count, which may be any number."""
        self._lost = min(self._lost + count, MOST_LOST)

    def take(self, most: int) -> tuple[tuple[TraceRecord, ...], int]:
        """The next records, ``most`` of them, and how many events were lost since the last call."""
        count = min(most, len(self._records))
        lost, self._lost = self._lost, 0
        return tuple(self._records.popleft() for _ in range(count)), lost

    @property
    def waiting(self) -> int:
        """The number of records that were not taken yet."""
        return len(self._records)

    # --- leases and waits

    def _wants(self, track: _Track, now_ns: int) -> None:
        if track.waits_since_ns is None and not track.holds:
            track.waits_since_ns = now_ns

    def _waited(self, track: _Track, at_ns: int, ended: Literal["lease", "gave-up"]) -> None:
        since_ns, track.waits_since_ns = track.waits_since_ns, None
        if since_ns is not None and since_ns < at_ns:
            self.add(WaitRecord(vgpu_id=track.vgpu_id, begin_ns=since_ns, end_ns=at_ns, ended=ended))

    def _drained(self, track: _Track, event: Drained, booked: tuple[int, int] | None) -> None:
        for epoch in [e for e, older in track.courses.items() if e < event.epoch and older.go_ns is not None]:
            # An epoch that has drained is over, with every older one; the newer record shows the older charge.
            older = track.courses.pop(epoch)
            self.add(_lease(track, older, max(event.at_ns, older.go_ns or 0), 0, 0, "revoked"))
        course = track.courses.pop(event.epoch, None)
        if course is not None and course.go_ns is not None:
            held_ns = busy_ns = 0
            if booked is not None:
                held_ns, busy_ns = booked[0] - track.held_ns, booked[1] - track.busy_ns
            early = not event.wants and (course.lease.end_ns is None or event.at_ns < course.lease.end_ns)
            ended: Ended = "returned" if early else "revoked" if course.cut else "ended"
            self.add(_lease(track, course, event.at_ns, held_ns, busy_ns, ended))
        if booked is not None:
            track.held_ns, track.busy_ns = booked
        if event.wants:
            self._wants(track, event.at_ns)

    def _observed(self, track: _Track, event: Observed, now_ns: int) -> None:
        course = track.courses.get(event.epoch)
        if course is not None:
            course.idle_ns = event.idle_ns
        if event.drains_by_ns:
            queued_ns = max(0, event.drains_by_ns - now_ns)
            self.add(LevelRecord(vgpu_id=track.vgpu_id, name="backlog", at_ns=now_ns, value_ns=queued_ns))


def _open_leases(track: _Track, now_ns: int, ended: Ended) -> list[LeaseRecord]:
    found = []
    for course in track.courses.values():
        if course.go_ns is not None and course.go_ns < now_ns:
            held_ns = now_ns - course.go_ns
            drained_ns = now_ns if ended == "removed" else None
            found.append(_lease(track, course, drained_ns, held_ns, max(0, held_ns - course.idle_ns), ended))
    return found


def _lease(
    track: _Track, course: _Course, drained_ns: int | None, charged_ns: int, busy_ns: int, ended: Ended
) -> LeaseRecord:
    assert course.go_ns is not None
    return LeaseRecord(
        vgpu_id=track.vgpu_id,
        epoch=course.lease.epoch,
        go_ns=course.go_ns,
        granted_ns=None if course.most_end_ns is None else course.most_end_ns - course.go_ns,
        end_ns=course.lease.end_ns,
        drained_ns=drained_ns,
        charged_ns=charged_ns,
        busy_ns=busy_ns,
        window_ns=course.lease.window_ns,
        ended=ended,
        shared=course.shared,
    )


def noted(
    vgpu_id: str, slot: int, pid: int, said: TraceReading, window: tuple[int, int], now_ns: int
) -> BusyRecord | LaunchRecord | DrainRecord | None:
    """A process's reading of the GPU as a record, cut to ``window`` (begin and end). None if it lies outside, or cannot
    be true at ``now_ns``: the reading comes from a tenant."""
    begin_ns, until_ns = window
    end_ns = said.end_ns
    if not begin_ns < end_ns <= now_ns:
        return None
    if said.kind == TraceKind.BUSY:
        since_ns, end_ns = max(said.begin_ns, begin_ns), min(end_ns, until_ns)
        if since_ns >= end_ns:
            return None
        return BusyRecord(vgpu_id=vgpu_id, slot=slot, pid=pid, begin_ns=since_ns, end_ns=end_ns)
    if end_ns > until_ns:
        return None
    if said.kind == TraceKind.LAUNCH:
        return LaunchRecord(
            vgpu_id=vgpu_id,
            slot=slot,
            pid=pid,
            seen_ns=end_ns,
            lasted_ns=said.lasted_ns,
            key=said.key,
            graph=said.is_graph,
        )
    if said.kind == TraceKind.DRAIN:
        window_ns = said.window_ns
        return DrainRecord(
            vgpu_id=vgpu_id, slot=slot, pid=pid, epoch=said.epoch, drained_ns=end_ns, window_ns=window_ns
        )
    return None
