"""The recording of one GPU, from the chunks that its server has sent. Pure.

Times are nanoseconds of CLOCK_MONOTONIC, the same for all GPUs of a node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from vgpu.protocol.trace import (
    BusyRecord,
    DrainRecord,
    LaunchRecord,
    LeaseRecord,
    LevelRecord,
    TraceChunk,
    TracedGpu,
    TracedVgpu,
    TraceRecord,
    WaitRecord,
)

MOST_RECORDS: Final = 1_000_000
"""Of one GPU. What comes after them counts as lost."""


@dataclass(slots=True)
class Recording:
    """Of ``gpu``, from ``begin_ns`` to ``end_ns``. ``lost``: events that are missing in it. ``whole``: it went on for
    as long as was asked for. ``under_way``: leases and waits as they stood at ``end_ns``, until ``close``.
    """

    gpu: TracedGpu
    begin_ns: int
    end_ns: int
    vgpus: dict[str, TracedVgpu] = field(default_factory=dict)
    leases: list[LeaseRecord] = field(default_factory=list)
    waits: list[WaitRecord] = field(default_factory=list)
    busy: list[BusyRecord] = field(default_factory=list)
    launches: list[LaunchRecord] = field(default_factory=list)
    drains: list[DrainRecord] = field(default_factory=list)
    levels: list[LevelRecord] = field(default_factory=list)
    under_way: tuple[LeaseRecord | WaitRecord, ...] = ()
    lost: int = 0
    whole: bool = False

    @classmethod
    def beginning_with(cls, chunk: TraceChunk) -> Recording:
        made = cls(chunk.gpu, chunk.begin_ns, chunk.begin_ns)
        made.add(chunk)
        return made

    def add(self, chunk: TraceChunk) -> None:
        self.gpu, self.end_ns, self.whole = chunk.gpu, max(self.end_ns, chunk.until_ns), chunk.done
        self.lost += chunk.lost
        self.vgpus |= {vgpu.vgpu_id: vgpu for vgpu in chunk.vgpus}
        self.under_way = chunk.under_way
        for record in chunk.records:
            if self.events < MOST_RECORDS:
                self._sort_in(record)
            else:
                self.lost += 1

    def chunk(self) -> TraceChunk:
        """All of it as one chunk, like those of a server, to be stored and read again."""
        intervals: list[TraceRecord] = [*self.leases, *self.waits, *self.busy]
        return TraceChunk(
            gpu=self.gpu,
            begin_ns=self.begin_ns,
            until_ns=self.end_ns,
            vgpus=tuple(self.vgpus.values()),
            records=(*intervals, *self.launches, *self.drains, *self.levels),
            under_way=self.under_way,
            lost=self.lost,
            done=self.whole,
        )

    def close(self) -> None:
        """Call it when no chunk comes any more, whether or not the recording is whole."""
        for record in self.under_way:
            self._sort_in(record)
        self.under_way = ()

    def _sort_in(self, record: TraceRecord) -> None:
        match record:
            case LeaseRecord():
                self.leases.append(record)
            case WaitRecord():
                self.waits.append(record)
            case BusyRecord():
                self.busy.append(record)
            case LaunchRecord():
                self.launches.append(record)
            case DrainRecord():
                self.drains.append(record)
            case LevelRecord():
                self.levels.append(record)

    @property
    def events(self) -> int:
        intervals = len(self.leases) + len(self.waits) + len(self.busy)
        return intervals + len(self.launches) + len(self.drains) + len(self.levels)

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns

    def label(self, vgpu_id: str) -> str:
        """The vGPU's name if it has one, else its id."""
        vgpu = self.vgpus.get(vgpu_id)
        return vgpu_id if vgpu is None or vgpu.name is None else vgpu.name

    def share(self, vgpu_id: str) -> str:
        """What it was promised, in words: ``30 %``."""
        vgpu = self.vgpus.get(vgpu_id)
        if vgpu is None:
            return "?"
        width = "" if self.gpu.mode == "temporal" else f" on {vgpu.sm_percent:.3g} % of the SMs"
        return f"{100 * vgpu.guarantee_ratio:.3g} %{width}"

    def held_ratio(self, vgpu_id: str) -> float:
        """The part of the recorded time in which it held a lease, until that had drained."""
        held_ns = 0
        covered_ns = self.begin_ns
        for lease in sorted(
            (lease for lease in self.leases if lease.vgpu_id == vgpu_id), key=lambda lease: lease.go_ns
        ):
            drained_ns = self.end_ns if lease.drained_ns is None else min(lease.drained_ns, self.end_ns)
            held_ns += max(0, drained_ns - max(covered_ns, lease.go_ns))
            covered_ns = max(covered_ns, drained_ns)
        return held_ns / self.length_ns if self.length_ns else 0.0
