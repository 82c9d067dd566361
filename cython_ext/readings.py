"""What the native modules hand to Python: readings of shared pages, and what the dispatcher saw.

Everything that comes from an activity page is a tenant's word. Readings are range-checked: times and amounts lie within
0 … 2⁶³ − 1, states are known ones, commands are printable. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple


class PageMode(IntEnum):
    """``GrantsPage.mode``."""

    TEMPORAL = 1
    SPATIAL = 2


MEMORY_KINDS: Final = ("device", "managed", "vmm", "async", "array", "graph", "shared")
"""In the order of ``SlotReading.committed_bytes`` (KIND_* in layout.pxd)."""
MANAGED: Final = MEMORY_KINDS.index("managed")
DEVICE: Final = MEMORY_KINDS.index("device")
SHARED: Final = MEMORY_KINDS.index("shared")


class GrantsFlag(IntFlag):
    """``GrantsPage.flags``."""

    CONTENDED = 1
    """Another vGPU of the GPU wants: returning early is worth something."""
    REMOVED = 2
    """The vGPU is gone: every gate fails."""
    LOSS_ERROR = 4
    """A lost server makes gates fail after the grace period."""
    LOSS_RUN = 8
    """A lost server opens the gates after the grace period."""
    TRACED = 16
    """A client traces: hooks record what they observe of the GPU."""
    STILL = 64
    """Its programs are to be suspended: no work is queued ahead of leases that will not come."""
    MANAGED = 32
    """Plain allocations are managed memory, which the driver moves to and from the host."""
    SWAPPABLE = 128
    """Plain allocations can leave the card and come back to the same addresses."""
    AWAY = 256
    """They are to be in the host's memory. With STILL, while no lease is given."""
    PRESENT = 512
    """They are to be on the card. Neither: they stay where they are."""
    SHARED = 1024
    """Its open-ended lease is a shared one."""
    COMPANY = 2048
    """vGPUs with shared leases compute at the same time as this one."""
    PASSED = 4096
    """With AWAY: another vGPU comes onto the card meanwhile."""


class SlotState(IntEnum):
    """``Slot.state``."""

    FREE = 0
    RESERVED = 1
    ACTIVE = 2
    DEAD = 3


class Where(IntEnum):
    """``Slot.where``: of what can leave the card."""

    RESIDENT = 0
    AWAY = 1
    STUCK = 2
    """The move that was asked for is not possible now; it is tried again."""
    MOVING = 3
    KEPT_AWAY = 4
    """The same, of the move back: the card has no room."""
    FAILED_BACK = 5
    """The same, of the move back: the driver fails it."""


class EventKind(IntEnum):
    """What a dispatcher reports (see ``Event``)."""

    WANTS = 1
    """A vGPU that was idle wants a token."""
    IDLE = 2
    """A vGPU that waited without a lease in force wants nothing any more."""
    WENT = 3
    """GO was given: the lease is usable and charged from ``at_ns`` to ``end_ns``."""
    DRAINED = 4
    """The lease is over: drained, or returned early (``wants`` false)."""
    OBSERVED = 5
    """A reading of a lease in force."""
    LOST = 6
    """``epoch`` events did not fit the ring. Ask ``Dispatcher.outstanding`` and ``Dispatcher.wants`` for the truth."""


class Event(NamedTuple):
    """Something the dispatcher saw. Fields without a meaning for ``kind`` are 0.

    ``end_ns`` (WENT): end of the lease as it went, None while open-ended. ``taken_ns`` (WENT): so long before GO its
    vGPU had work on the GPU, which is charged as well. ``idle_ns`` (DRAINED, OBSERVED): held time in
    which nothing ran, 0 ≤ idle ≤ held. ``wants`` (DRAINED, OBSERVED): whether the vGPU still wants a token.
    ``drains_by_ns`` (OBSERVED): when everything submitted is predicted to be done. ``used_ns`` (DRAINED, OBSERVED): GPU
    time used under the lease, 0 ≤ used ≤ held, as far as the vGPU's processes have counted it.
    """

    kind: EventKind
    vgpu: int
    epoch: int
    at_ns: int
    end_ns: int | None
    idle_ns: int
    wants: bool
    longest_kernel_ns: int
    handover_cost_ns: int
    drains_by_ns: int
    taken_ns: int = 0
    used_ns: int = 0


@dataclass(frozen=True, slots=True)
class LeaseReading:
    """One lease as a grants page shows it. ``end_ns`` None: open-ended."""

    epoch: int
    start_ns: int
    end_ns: int | None
    go_by_ns: int | None
    on_go: bool


@dataclass(frozen=True, slots=True)
class PlanReading:
    """The published plan of a vGPU, and how far it has come."""

    current: LeaseReading | None
    next: LeaseReading | None
    open_epoch: int
    go_epoch: int
    free_epoch: int
    change: int


@dataclass(frozen=True, slots=True)
class SlotReading:
    """One process of a vGPU. ``pid`` and ``start_time`` (clock ticks since boot) name it uniquely.

    ``committed_bytes`` is indexed by memory kind: device, managed, VMM, stream-ordered, arrays, graphs, and
    what other processes may have, too. ``turn``: the
    newest epoch whose work may run, of work queued ahead; 0: none ever was. ``tail_epoch``: it takes no more
    work, and the work that runs under it is short. ``sm_planned``, ``sm_count``: SMs that its partition should give it
    (0: no limit), and that its driver reports (0: not known). ``where`` (``Where``): of what can leave the card;
    ``away_bytes`` of it are in the host's memory, and the last move took ``moved_ns``. ``move_result``: the driver's
    code that failed the move back; 0: none. ``room_bytes``: an allocation waits for so much more of the card.
    ``demand_ppm``: the part of its time in which it needs the GPU, 0: not measured; ``waits_ppm``: the part of the last
    200 ms in which it waited for the GPU; ``work_ns``: GPU time that its launches take by themselves, as learned;
    ``burst_us``: that of what it launches between two waits for it.
    ``imported_bytes``: memory of other processes that it holds; it is not charged with that.
    """

    index: int
    state: SlotState
    pid: int
    start_time: int
    want: bool
    undrained: bool
    drained_epoch: int
    last_epoch: int
    want_since_ns: int
    drained_ns: int
    last_submit_ns: int
    busy_ns: int
    overrun_ns: int
    launches: int
    graph_launches: int
    copies: int
    gate_waits: int
    gate_wait_ns: int
    longest_kernel_ns: int
    refill_ns: int
    reserved_bytes: int
    committed_bytes: tuple[int, ...]
    peak_bytes: int
    refusals: int
    refused_bytes: int
    command: str
    turn: int = 0
    tail_epoch: int = 0
    copied_bytes: int = 0
    sm_planned: int = 0
    sm_count: int = 0
    where: int = 0
    move_result: int = 0
    away_bytes: int = 0
    moved_ns: int = 0
    room_bytes: int = 0
    pinned_ns: int = 0
    demand_ppm: int = 0
    waits_ppm: int = 0
    burst_us: int = 0
    work_ns: int = 0
    pinned_bytes: int = 0
    clean_blocks: int = 0
    imported_bytes: int = 0

    @property
    def charged_bytes(self) -> int:
        """What the limit ledger charges this process with."""
        return self.reserved_bytes + sum(self.committed_bytes)


class StepsReading(NamedTuple):
    """Decode steps and prefills of a vGPU's processes that were in time and that were not, by their targets (``--slo``,
    ``cython_ext/logic/meter/steps.pxd``). ``tpot_mean_ns``: of the last decode steps, ``ttft_last_ns``: of the last
    prefill; 0: none was counted."""

    tpot_attained: int = 0
    tpot_missed: int = 0
    ttft_attained: int = 0
    ttft_missed: int = 0
    tpot_mean_ns: int = 0
    ttft_last_ns: int = 0


class DemandReading(NamedTuple):
    """What hooks measured of a vGPU (``cython_ext/logic/meter/demand.pxd``). Of the process with the most each: its
    demand, 0: not measured; its mean burst; and the part of the last 200 ms in which it waited for the GPU. Of all its
    processes: the GPU time that their launches take by themselves. Ratios are parts per million."""

    demand_ppm: int
    burst_ns: int
    waits_ppm: int
    work_ns: int


@dataclass(frozen=True, slots=True)
class RelayReading:
    """A vGPU's processes, merged by its relay."""

    want: bool
    returned_epoch: int
    drained_epoch: int
    processes: int
    drained_ns: int
    busy_ns: int
    launches: int
    longest_kernel_ns: int
    refill_ns: int
    want_since_ns: int
    tail_epoch: int
    split_drain_epoch: int
    submitted_epoch: int
    submitted_ns: int
    demand_ppm: int
    waits_ppm: int
    burst_us: int
    work_ns: int


class TraceKind(IntEnum):
    """``TraceReading.kind``; a tenant may write others, which mean nothing."""

    BUSY = 1
    """The GPU had work of the process, by its account."""
    LAUNCH = 2
    """A launch that was timed; it was found complete at ``end_ns``."""
    DRAIN = 3
    """A lease that ended at ``begin_ns`` (0: it had no end) had drained at ``end_ns``."""


class TraceReading(NamedTuple):
    """What a process noted of the GPU. ``value``: see the properties, which mean something for their kind alone."""

    kind: int
    begin_ns: int
    end_ns: int
    value: int

    @property
    def lasted_ns(self) -> int:
        """LAUNCH: its length between device events."""
        return (self.value >> 24) & ((1 << 38) - 1)

    @property
    def key(self) -> int:
        """LAUNCH: a number of 24 bits that launches of the same kernel, grid and block have in common."""
        return self.value & ((1 << 24) - 1)

    @property
    def is_graph(self) -> bool:
        """LAUNCH: it was a graph."""
        return bool(self.value >> 63)

    @property
    def epoch(self) -> int:
        """DRAIN: of the lease."""
        return self.value >> 32

    @property
    def window_ns(self) -> int:
        """DRAIN: the in-flight window from then on, in whole microseconds."""
        return (self.value & 0xFFFFFFFF) * 1000


@dataclass(frozen=True, slots=True)
class Death:
    """A process that gave up its slot. ``clean``: its hook thread unlocked it (normal exit), else it was killed."""

    slot: int
    at_ns: int
    clean: bool


@dataclass(frozen=True, slots=True)
class DispatcherStats:
    """Counters since the start. ``lateness_log2_ns[i]``: GOs that came 2ⁱ⁻¹ … 2ⁱ − 1 ns after they were due."""

    wakes: int
    reports: int
    gos: int
    forced: int
    """GOs that came by ``go_by_ns`` while a predecessor had not drained."""
    events: int
    lost: int
    lateness_log2_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RelayStats:
    """Counters since the start. ``hushed``: wants that ended because their process slept through a lease.

    ``throttled``: times a storm of doorbells was made to wait.
    """

    wakes: int
    rings: int
    returns: int
    undone_returns: int
    hushed: int
    throttled: int
