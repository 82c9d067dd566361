"""Recordings of what happens on the GPU, for ``vgpuctl trace``. Nothing here exists while no client records.

A recording has a recorder beside the scheduler and reads the rings in the activity pages
(``cython_ext/logic/gate/trace.pxd``) every ``READ_S``. It ends with its link. It keeps a bounded number of events: a
client that reads too slowly loses some, and gets their number.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Final

import trio

from cython_ext.readings import SlotReading
from gpuserver.core.admission.registry import VgpuRecord
from gpuserver.core.observe.trace import Recorder, noted
from gpuserver.runtime.state import GpuState
from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Process
from vgpu.limits import is_exempt
from vgpu.protocol.messages import Notice
from vgpu.protocol.trace import TraceChunk, TracedGpu, TracedVgpu
from vgpu.share import Mode
from vgpu.units import counted

READ_S: Final = 0.02
"""Between two readings of the rings. A process may note 25,000 records a second before some are overwritten."""
TELL_S: Final = 0.1
LINGER_S: Final = 0.12
"""After the end: hooks poll long kernels every 50 ms at least."""
LAG_S: Final = 0.1
MOST_RECORDS: Final = 50_000
CHUNK_RECORDS: Final = 2_000
"""A frame of the control link holds 1 MiB, a record takes 200 bytes or less."""
PPM: Final = 1_000_000


class Tracing:
    """The recordings of one GPU, so many for each user and in all."""

    def __init__(self, state: GpuState) -> None:
        self._state = state
        self._running: Counter[int] = Counter()

    async def stream(
        self, request_id: int, uid: int, duration_ns: int, *, work: bool = True
    ) -> AsyncGenerator[Notice, None]:
        """``VgpuError`` (unavailable): there are as many recordings of this GPU as there may be for ``uid``. ``work``
        False: hooks are not asked what they see of it."""
        self._check_place(uid)
        self._running[uid] += 1
        recording = _Recording(self._state, duration_ns, work=work)
        try:
            while not recording.done:
                chunk = recording.chunk()
                yield Notice(id=request_id, trace=chunk)
                if not chunk.records or len(chunk.records) < CHUNK_RECORDS:
                    await recording.go_on()
        finally:
            self._running[uid] -= 1
            recording.close()

    def _check_place(self, uid: int) -> None:
        limits, gpu = self._state.settings.limits, f"GPU {self._state.facts.index}"
        most = limits.recordings
        if not is_exempt(uid):
            if self._running[uid] >= limits.recordings_per_user:
                raise VgpuError(
                    ErrorCode.UNAVAILABLE,
                    f"{gpu} is being recorded {counted(self._running[uid], 'time')} by uid {uid}, a user's most",
                    "try again when that recording has ended",
                )
            most -= limits.recordings_kept
        if self._running.total() >= most:
            raise VgpuError(
                ErrorCode.UNAVAILABLE,
                f"{gpu} is being recorded by {self._running.total()} others",
                "try again when one of them has ended",
            )


class _Recording:
    """One. ``close`` in any case."""

    def __init__(self, state: GpuState, duration_ns: int, *, work: bool) -> None:
        self._state = state
        self._work = work
        self._recorder = Recorder(MOST_RECORDS)
        self._known: set[str] = set()
        self._read_up_to: dict[tuple[str, Process], int] = {}
        self._finished = self.done = False
        self._begin_ns = time.monotonic_ns()
        self._end_ns = self._begin_ns + duration_ns
        self._until_ns = self._lag_ns = self._begin_ns
        self._skip_old()
        state.tokens.record(self._recorder, work=work)

    def close(self) -> None:
        self._state.tokens.forget_recorder(self._recorder)

    async def go_on(self) -> None:
        """Record for a while."""
        tell_ns = time.monotonic_ns() + int(TELL_S * 1e9)
        while not self.done and self._recorder.waiting < CHUNK_RECORDS and time.monotonic_ns() < tell_ns:
            await trio.sleep(READ_S)
            self._look()

    def chunk(self) -> TraceChunk:
        """The records since the last chunk."""
        records, lost = self._recorder.take(CHUNK_RECORDS)
        self.done = self._lingered() and not self._recorder.waiting
        return TraceChunk(
            gpu=self._gpu(),
            begin_ns=self._begin_ns,
            until_ns=self._until_ns,
            vgpus=self._fresh(),
            records=records,
            under_way=tuple(self._recorder.under_way(self._until_ns)),
            lost=lost,
            done=self.done,
        )

    def _look(self) -> None:
        now_ns = time.monotonic_ns()
        if not self._finished and now_ns >= self._end_ns:
            self._state.tokens.drain_events()
            self._recorder.finish(self._end_ns)
            self._finished = True
        if self._work:
            self._read_rings(now_ns)
        if not self._finished and now_ns - self._lag_ns >= int(LAG_S * 1e9):
            self._lag_ns = now_ns
            for statement in self._state.tokens.snapshot():
                self._recorder.stands(statement, now_ns)
        self._until_ns = min(now_ns, self._end_ns)

    def _lingered(self) -> bool:
        return self._finished and time.monotonic_ns() >= self._end_ns + int(LINGER_S * 1e9)

    # --- rings

    def _slots(self) -> list[tuple[str, SlotReading]]:
        return [(vgpu.record.vgpu_id, slot) for vgpu in self._state.vgpus.values() for slot in vgpu.slots]

    def _skip_old(self) -> None:
        """What was noted before the recording began is of another one."""
        for vgpu_id, slot in self._slots():
            activity = self._state.vgpus[vgpu_id].activity
            if activity is not None:
                _, newest, _ = activity.traced(slot.index)
                self._read_up_to[vgpu_id, Process(slot.pid, slot.start_time)] = newest

    def _read_rings(self, now_ns: int) -> None:
        window = self._begin_ns, self._end_ns
        for vgpu_id, slot in self._slots():
            activity = self._state.vgpus[vgpu_id].activity
            if activity is None:
                continue
            process = Process(slot.pid, slot.start_time)
            after = self._read_up_to.get((vgpu_id, process), 0)
            said, newest, lost = activity.traced(slot.index, after)
            self._read_up_to[vgpu_id, process] = newest
            self._recorder.miss(lost)
            for reading in said:
                record = noted(vgpu_id, slot.index, slot.pid, reading, window, now_ns)
                if record is not None:
                    self._recorder.add(record)

    # --- names

    def _gpu(self) -> TracedGpu:
        state = self._state
        return TracedGpu(
            index=state.facts.index,
            uuid=state.facts.uuid,
            name=state.facts.name,
            simulated=state.settings.simulated,
            mode="temporal" if state.mode is Mode.TEMPORAL else "spatial",
            period_ns=state.tokens.period_ns,
            generation=state.generation,
        )

    def _fresh(self) -> tuple[TracedVgpu, ...]:
        fresh = [vgpu.record for vgpu in self._state.vgpus.values() if vgpu.record.vgpu_id not in self._known]
        self._known |= {record.vgpu_id for record in fresh}
        return tuple(map(_traced, fresh))


def _traced(record: VgpuRecord) -> TracedVgpu:
    return TracedVgpu(
        vgpu_id=record.vgpu_id,
        name=record.spec.name,
        guarantee_ratio=record.share.guarantee_ppm / PPM,
        limit_ratio=record.share.limit_ppm / PPM,
        sm_percent=record.spec.compute_ratio * 100,
    )
