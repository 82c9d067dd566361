"""Recordings as Hypothesis makes them up, and a plain one: two vGPUs that take turns."""

from __future__ import annotations

from hypothesis import strategies as st

from vgpu.protocol.trace import (
    BusyRecord,
    DrainRecord,
    LaunchRecord,
    LeaseRecord,
    LevelRecord,
    TracedGpu,
    TracedVgpu,
    WaitRecord,
)
from vgpu.trace.recording import Recording

MS = 1_000_000
BEGIN = 5_000 * MS
IDS = ("vgpu-0000aaaa", "vgpu-0000bbbb", "vgpu-0000cccc")
PROCESSES = ((0, 4711), (1, 4712), (0, 4713))


def gpu(mode: str = "temporal", index: int = 0) -> TracedGpu:
    fields = {"index": index, "uuid": "GPU-1", "name": "NVIDIA H200", "simulated": False, "mode": mode}
    return TracedGpu.model_validate(fields | {"period_ns": 57 * MS, "generation": 3})


def vgpu(vgpu_id: str, name: str | None, percent: float) -> TracedVgpu:
    return TracedVgpu(
        vgpu_id=vgpu_id, name=name, guarantee_ratio=percent / 100, limit_ratio=percent / 100, sm_percent=percent
    )


def empty(mode: str = "temporal", index: int = 0, length_ns: int = 100 * MS) -> Recording:
    vgpus = {IDS[0]: vgpu(IDS[0], "thirty", 30), IDS[1]: vgpu(IDS[1], None, 70)}
    return Recording(gpu(mode, index), BEGIN, BEGIN + length_ns, vgpus, whole=True)


def lease(vgpu_id: str, epoch: int, go_ns: int, end_ns: int | None, drained_ns: int | None) -> LeaseRecord:
    """Times from the recording's begin."""
    held_ns = 0 if drained_ns is None else drained_ns - go_ns
    return LeaseRecord(
        vgpu_id=vgpu_id,
        epoch=epoch,
        go_ns=BEGIN + go_ns,
        granted_ns=None if end_ns is None else end_ns - go_ns,
        end_ns=None if end_ns is None else BEGIN + end_ns,
        drained_ns=None if drained_ns is None else BEGIN + drained_ns,
        charged_ns=held_ns,
        busy_ns=held_ns,
        window_ns=12 * MS,
        ended="in-force" if drained_ns is None else "ended",
    )


def turns(gap_ns: int = 100_000, count: int = 10) -> Recording:
    """Leases of 3 and 7 ms in turns, a hand-over gap between them; what waits, waits."""
    made = empty(length_ns=count * 10 * MS)
    at = 0
    for epoch in range(1, 2 * count + 1):
        own, other = (IDS[0], IDS[1]) if epoch % 2 else (IDS[1], IDS[0])
        end = at + (3 if epoch % 2 else 7) * MS - gap_ns
        made.leases.append(lease(own, epoch, at, end - 50_000, end))
        made.busy.append(BusyRecord(vgpu_id=own, slot=0, pid=4711 + epoch % 2, begin_ns=BEGIN + at, end_ns=BEGIN + end))
        made.waits.append(WaitRecord(vgpu_id=other, begin_ns=BEGIN + at, end_ns=BEGIN + end + gap_ns, ended="lease"))
        at = end + gap_ns
    return made


times = st.integers(-20 * MS, 120 * MS).map(lambda at: BEGIN + at)
spans = st.tuples(times, times).filter(lambda pair: pair[0] < pair[1])
ids = st.sampled_from(IDS)


@st.composite
def leases(draw: st.DrawFn) -> LeaseRecord:
    go, drained = draw(spans)
    end = draw(st.none() | times)
    running = draw(st.booleans())
    return LeaseRecord(
        vgpu_id=draw(ids),
        epoch=draw(st.integers(1, 9)),
        go_ns=go,
        granted_ns=None if end is None else end - go,
        end_ns=end,
        drained_ns=None if running else drained,
        charged_ns=0,
        busy_ns=0,
        window_ns=0,
        ended="in-force" if running else draw(st.sampled_from(["ended", "returned", "revoked", "removed"])),
    )


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Anything that the records can say, whether or not it makes sense: processes' own words are among them."""
    made = empty(draw(st.sampled_from(["temporal", "spatial"])), draw(st.integers(0, 3)))

    def process() -> dict[str, object]:
        slot, pid = draw(st.sampled_from(PROCESSES))
        return {"vgpu_id": draw(ids), "slot": slot, "pid": pid}

    made.leases += draw(st.lists(leases(), max_size=8))
    ended = st.sampled_from(["lease", "gave-up", "still-waits"])
    for begin, end in draw(st.lists(spans, max_size=5)):
        fields = {"vgpu_id": draw(ids), "begin_ns": begin, "end_ns": end, "ended": draw(ended)}
        made.waits.append(WaitRecord.model_validate(fields))
    for begin, end in draw(st.lists(spans, max_size=10)):
        made.busy.append(BusyRecord.model_validate(process() | {"begin_ns": begin, "end_ns": end}))
    for seen in draw(st.lists(times, max_size=5)):
        lasted = {"lasted_ns": draw(st.integers(0, 2**38)), "key": draw(st.integers(0, 2**24 - 1)), "graph": False}
        made.launches.append(LaunchRecord.model_validate(process() | lasted | {"seen_ns": seen}))
    for at in draw(st.lists(times, max_size=3)):
        made.drains.append(DrainRecord.model_validate(process() | {"epoch": 1, "drained_ns": at, "window_ns": 5}))
        made.levels.append(LevelRecord(vgpu_id=draw(ids), name="lag", at_ns=at, value_ns=-5))
    return made
