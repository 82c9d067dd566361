"""A vGPU as the GPU Server holds it: its record, its pages, and the descriptors that are handed to its broker."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.readings import DEVICE, MANAGED, MEMORY_KINDS, GrantsFlag, PageMode, SlotReading, SlotState, Where
from gpuserver.core.admission.origin import KEPT, Origin
from gpuserver.core.admission.registry import VgpuRecord
from gpuserver.core.scheduler.leases import AccountState, ServiceTotals
from gpuserver.core.states.migration import AT_REST, MigrationState
from gpuserver.core.states.standby import NO_STANDBY, Standby
from gpuserver.device.base import GpuFacts
from gpuserver.runtime.journal import VgpuRow
from vgpu.enums import OnServerLoss, Oversubscribe
from vgpu.errors import VgpuError
from vgpu.identity import Member, Process
from vgpu.integrations.claims import Claim
from vgpu.protocol.peer import is_running
from vgpu.protocol.stream import MessageStream
from vgpu.queueing.preempted import Preempted
from vgpu.share import Share

NO_PROCESS = Process(0, 0)
_UNSERVED = ServiceTotals(0, 0, 0)
_LOSS_FLAGS = {
    OnServerLoss.BLOCK: GrantsFlag(0),
    OnServerLoss.ERROR: GrantsFlag.LOSS_ERROR,
    OnServerLoss.RUN: GrantsFlag.LOSS_RUN,
}
_MEMORY_FLAGS = {
    None: GrantsFlag(0),
    Oversubscribe.MANAGED: GrantsFlag.MANAGED,
    Oversubscribe.SWAP: GrantsFlag.SWAPPABLE,
}
_POLICY_FLAGS = GrantsFlag.LOSS_ERROR | GrantsFlag.LOSS_RUN


@dataclass(frozen=True, slots=True)
class Ledger:
    """A vGPU's memory ledger, read slot by slot, and how many operations it had seen before and after that."""

    begun: int
    slots: tuple[SlotReading, ...]
    ended: int

    @property
    def known(self) -> bool:
        """Whether there was a page to read."""
        return self.begun >= 0

    def rests_until(self, later: Ledger) -> bool:
        """Nothing was allocated, freed or moved between the two readings, nor was anything under way."""
        if self.begun != later.ended or any(slot.reserved_bytes for slot in later.slots):
            return False
        places = [(slot.pid, slot.where, slot.away_bytes) for slot in self.slots if slot.where]
        return places == [(slot.pid, slot.where, slot.away_bytes) for slot in later.slots if slot.where] and not any(
            slot.where not in {Where.RESIDENT, Where.AWAY} for slot in later.slots
        )


NO_LEDGER = Ledger(-1, (), -1)
"""Of a vGPU whose page is away, or that was not there yet."""


@dataclass(frozen=True, slots=True)
class Past:
    """Counters of processes that are no more."""

    refusals: int = 0
    launches: int = 0
    refused_bytes: int = 0
    """Of the last one of them."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The limits with which a process was started, for its life. 0: MPS does not limit it, or the figure is lost.
    ``client_priority``: CUDA_MPS_CLIENT_PRIORITY, "" if it is not known."""

    sms: int
    memory_bytes: int
    client_priority: str = ""


NOT_PLANNED: Final = Planned(0, 0)


def set_event() -> trio.Event:
    """Of what is so from the beginning."""
    event = trio.Event()
    event.set()
    return event


@dataclass(slots=True, eq=False)
class Vgpu:
    """One vGPU of this GPU Server: its pages, its broker, its processes, and where its memory is."""

    record: VgpuRecord
    generation: int
    # --- pages
    grants: GrantsPage
    activity: ActivityPage | None = None
    """None from a restart of the server until the broker brings the page back."""
    activity_fd: int = -1
    """Descriptor of the activity page, handed to every broker of this vGPU."""
    written: bool = False
    """The journal has the vGPU. Clients see a vGPU only from then on."""
    # --- its broker
    broker: Process = NO_PROCESS
    link: MessageStream | None = None
    """To its broker, while there is one."""
    lists: bool = False
    """That broker gives and takes the list of processes."""
    listens: bool = False
    """The broker's socket was open."""
    registered: trio.Event = field(default_factory=trio.Event)
    admits: trio.Event = field(default_factory=trio.Event)
    """Set once the broker's socket is open."""
    removed: trio.Event = field(default_factory=trio.Event)
    """Set at the vGPU's end."""
    left: trio.Event = field(default_factory=trio.Event)
    """Set once no task keeps a broker for it any more."""
    keeper_scope: trio.CancelScope | None = None
    """Of the task that keeps the broker alive."""
    failure: str = ""
    """Why it admits no processes; empty: it does."""
    # --- what it has had
    retired: Past = Past()
    """Counters of its processes that have ended."""
    high_water: Past = Past()
    """The most of ``retired`` and of live counters that was ever reported: reported counters only grow."""
    served: ServiceTotals = _UNSERVED
    closed: AccountState | None = None
    """Its account when the scheduler forgot it for ever."""
    published_share: Share | None = None
    """What the scheduler knows of it."""
    published_places: tuple[tuple[int, int], ...] = ()
    """What its broker knows of the places of the MPS server."""
    # --- its processes
    members: dict[int, Member] = field(default_factory=dict)
    """By slot. The broker's word, which has it from the kernel: no page adds a process or takes one away."""
    returning: tuple[Member, ...] = ()
    """Members by the journal, until the broker of this server has reported its own."""
    last_reported: dict[int, Process] = field(default_factory=dict)
    """The process that was reported last in each slot."""
    coattached: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """By slot, all vGPUs of a process that has several, in the order of attaching."""
    refused: dict[tuple[int, Process], int] = field(default_factory=dict)
    """How many refusals were reported as events, by slot and process."""
    implicit_peak_bytes: int = 0
    """The most implicit memory of each of its processes."""
    compared: set[Process] = field(default_factory=set)
    """Processes whose SMs were compared with those planned."""
    planned: dict[int, Planned] = field(default_factory=dict)
    """By slot, what MPS holds the process to, for its life, by the broker's word."""
    # --- suspended, swapped, on the way to another GPU
    lifecycle_lock: trio.Lock = field(default_factory=trio.Lock)
    """Held during suspend, resume and migrate."""
    quiesced: bool = False
    """Its programs are stopped, or are about to be."""
    idle_suspended: tuple[Process, ...] = ()
    """Its processes that are stopped because it was idle, until one of them wants the GPU. Empty: it is not
    idle-suspended."""
    lends_memory: bool = False
    """What it was promised is free meanwhile."""
    suspend_error: str = ""
    """Why it could not be suspended or resumed by itself."""
    preempted: Preempted | None = None
    """The request for which the node has suspended it. None while its programs run."""
    standby: Standby = NO_STANDBY
    """What resumes it by itself, while it is suspended."""
    starting: int = 0
    """So many new processes wait at the broker until it is resumed."""
    connected_port: int = 0
    """While it is suspended: to this port there is a connection that was not there before; 0: there is none."""
    unheard_ports: tuple[int, ...] = ()
    """While it is suspended: ports of its triggers on which none of its processes listens."""
    expected: bool = False
    """Its memory comes back to the card before a program wants it."""
    swapped_out: bool = False
    """Its memory may be in the host's, so it gets no leases."""
    group_wants: bool = False
    """It is swapped together with its group, and a program of the group wants the GPU."""
    group_awaits: str = ""
    """Why its group waits, if another vGPU of the group is the reason."""
    driver_bytes: dict[int, int] | None = None
    """What the driver showed of its processes when they ran last, by pid. None: not asked yet, or no answer."""
    swaps_out: int = 0
    swaps_in: int = 0
    passage: MigrationState = AT_REST
    """Where it stands between two GPUs."""
    settled: trio.Event = field(default_factory=trio.Event)
    """Set once the GPU that it was leaving for has answered, with ``refusal`` if it was not taken there."""
    refusal: VgpuError | None = None
    # --- how it came, and until when it stays
    origin: Origin = KEPT
    """The request for which it was made, and until when it stays."""
    awaited_pods: tuple[str, ...] = ()
    """Their processes wait at the broker, and the claim does not name them."""
    holders: set[object] = field(default_factory=set)
    """Links on which it was asked for."""
    made: trio.Event = field(default_factory=set_event)
    """Set once it is ready, or ``unmade`` says why it is not."""
    unmade: VgpuError | None = None

    def is_answer_to(self, uid: int, request_id: str) -> bool:
        return self.origin.request_id == request_id and self.record.owner.uid == uid

    def is_of_claim(self, uid: int, claim: Claim) -> bool:
        return self.record.owner.uid == uid and claim.is_same(self.origin.claim)

    @property
    def tenant(self) -> int:
        """By which its store is known. The vGPUs of one owner share a store. A vGPU that containers mount has a store
        of its own, by a number that is no uid."""
        return -1 - self.record.key if self.mountable else self.record.owner.uid

    @property
    def mountable(self) -> bool:
        """It admits each process that reaches it through a container's mount."""
        return self.origin.attach == "mount"

    @property
    def present(self) -> dict[int, Process]:
        """Its living processes, by slot."""
        return {slot: member.process for slot, member in self.members.items() if member.alive}

    @property
    def slots(self) -> list[SlotReading]:
        """What its processes say of their work; none while the page is away. Which processes those are, and whether
        they live, is no word of theirs."""
        if self.activity is None:
            return []
        page, members = self.activity, sorted(self.members.items())
        return [page.read_member(slot, one.process.pid, one.process.start_time, one.alive) for slot, one in members]

    @property
    def ledger(self) -> Ledger:
        """What its processes own; nothing while the page is away."""
        if self.activity is None:
            return NO_LEDGER
        begun = self.activity.ledger_epoch
        return Ledger(begun, tuple(self.slots), self.activity.ledger_epoch)

    @property
    def alive(self) -> list[SlotReading]:
        """Processes attached and not known to be dead."""
        return [slot for slot in self.slots if slot.state is not SlotState.DEAD]

    @property
    def programs(self) -> tuple[Process, ...]:
        """Its processes, those too that were in it when its last server or broker died, and have not come back yet."""
        before = (process for process in self.passage.programs if is_running(process))
        return tuple(dict.fromkeys((*self.present.values(), *before)))

    def uid_of(self, process: Process) -> int:
        """By which the kernel knew it when it attached; −1: not known any more."""
        known = (*self.members.values(), *self.returning)
        return next((member.uid for member in known if member.process == process), -1)

    @property
    def refusals(self) -> int:
        """Allocations refused at the limit since this server began."""
        return bounded(self.retired.refusals + sum(slot.refusals for slot in self.alive))

    @property
    def refused_bytes(self) -> int:
        """Size of the last allocation that was refused, of those that are here or, without one, of those that were."""
        return max((slot.refused_bytes for slot in self.slots if slot.refusals), default=self.retired.refused_bytes)

    def new_refusals(self) -> tuple[int, int]:
        """How many allocations were refused since the last call, and the size of the last one. Ended processes count
        while they have their slots."""
        reported, self.refused = self.refused, {}
        count = size = 0
        for slot in self.slots:
            name = slot.index, Process(slot.pid, slot.start_time)
            self.refused[name] = slot.refusals
            if slot.refusals > reported.get(name, 0):
                count += slot.refusals - reported.get(name, 0)
                size = max(size, slot.refused_bytes)
        return bounded(count), size

    @property
    def used_bytes(self) -> int:
        """Of the GPU's memory, as charged."""
        return bounded(self.grants.implicit_bytes + sum(slot.charged_bytes for slot in self.slots))

    @property
    def borrowed_bytes(self) -> int:
        """What it has on the card just now that it was not promised. A checkpoint leaves nothing there, swapping what
        cannot be moved."""
        return 0 if self.record.suspended and not self.swaps else self.excess_bytes

    @property
    def excess_bytes(self) -> int:
        """What it has, on the card or on the host, beyond what it was promised. While its page is away, as much as it
        may; its ledger is a tenant's word, and not believed beyond that."""
        record = self.record
        total = self.grants.total_memory_bytes
        if record.spec.oversubscribe is not None:
            most, owned = total, self.used_bytes - self.managed_bytes - self.away_bytes
        else:
            most = min(record.memory_limit_bytes, total) - record.promised_memory_bytes
            owned = self.used_bytes - record.promised_memory_bytes
        if self.activity is None and record.borrows:
            return most
        return min(max(0, owned), max(most, 0) if record.borrows else total)

    @property
    def swaps(self) -> bool:
        """Its plain memory can leave the card."""
        return self.record.swaps

    @property
    def movable_bytes(self) -> int:
        """Of its memory what can leave the card, wherever it is: not that of programs with several GPUs, which reach
        into it from the others."""
        if not self.swaps:
            return 0
        return bounded(sum(slot.committed_bytes[DEVICE] for slot in self.slots if slot.index not in self.coattached))

    def committed_by_kind(self) -> dict[str, int]:
        """Bytes of each kind of memory (``MEMORY_KINDS``), of all processes but those that use several GPUs."""
        alone = [slot.committed_bytes for slot in self.slots if slot.index not in self.coattached]
        sums = [bounded(sum(sizes)) for sizes in zip(*alone, strict=True)]
        return dict(zip(MEMORY_KINDS, sums or [0] * len(MEMORY_KINDS), strict=False))

    @property
    def kept_bytes(self) -> int:
        """Of what it has on the card and was not promised, what cannot give way. Its ledger is believed as far as the
        driver shows that much for the same process: with a lie it would keep others from what is free."""
        record = self.record
        if record.suspended and not self.swaps:
            return 0
        if self.activity is None or self.driver_bytes is None:
            return min(max(0, self.borrowed_bytes - self.here_bytes), record.memory_limit_bytes)
        claimed: dict[int, int] = {}
        for slot in self.slots:
            claimed[slot.pid] = claimed.get(slot.pid, 0) + self._kept_of(slot)
        shown = {pid: amount or record.memory_limit_bytes for pid, amount in self.driver_bytes.items()}
        owned = sum(min(amount, shown.get(pid, 0)) for pid, amount in claimed.items())
        # What is reserved is on its way to the card, and the driver may not show it yet.
        reserved = min(sum(slot.reserved_bytes for slot in self.slots), record.memory_limit_bytes)
        promised = 0 if record.spec.oversubscribe is not None else record.promised_memory_bytes
        most = self.grants.total_memory_bytes
        if record.borrows and record.spec.oversubscribe is None:
            most = max(0, min(record.memory_limit_bytes, most) - promised)
        return min(max(0, self.grants.implicit_bytes + owned + reserved - promised), most)

    def _kept_of(self, slot: SlotReading) -> int:
        """Of what a process says that it owns, what cannot leave the card."""
        owned = sum(slot.committed_bytes)
        if self.record.spec.oversubscribe is not None:
            owned -= slot.committed_bytes[MANAGED]
        if self.swaps and slot.index not in self.coattached:
            owned -= slot.committed_bytes[DEVICE]
        return owned

    @property
    def away_bytes(self) -> int:
        """Of that what is in the host's memory."""
        return bounded(sum(away_of(slot) for slot in self.slots)) if self.swaps else 0

    @property
    def pinned_bytes(self) -> int:
        """Of its memory that can leave the card, how much host memory is pinned for."""
        if not self.swaps:
            return 0
        return bounded(sum(min(slot.pinned_bytes, slot.committed_bytes[DEVICE]) for slot in self.slots))

    @property
    def here_bytes(self) -> int:
        """Of that what is on the card."""
        return self.movable_bytes - self.away_bytes

    @property
    def room_bytes(self) -> int:
        """Its allocations wait for so much more of the card."""
        return min(sum(slot.room_bytes for slot in self.alive), self.record.memory_limit_bytes) if self.swaps else 0

    @property
    def pending_bytes(self) -> int:
        """Of its reservations those of allocations that wait for room: the card has none of it."""
        return bounded(sum(min(slot.reserved_bytes, slot.room_bytes) for slot in self.alive)) if self.swaps else 0

    @property
    def managed_bytes(self) -> int:
        """Of these what the driver may move to the host."""
        return bounded(sum(slot.committed_bytes[MANAGED] for slot in self.slots))

    @property
    def launches(self) -> int:
        return bounded(self.retired.launches + sum(slot.launches for slot in self.alive))

    def show_counts(self) -> Past:
        """Refusals and launches, never fewer than in an earlier reading. Between a process's death and the broker's
        report, and while the page is away, the process's counts are not known."""
        self.high_water = Past(
            max(self.high_water.refusals, self.refusals), max(self.high_water.launches, self.launches)
        )
        return self.high_water

    def show_served(self, now: ServiceTotals) -> ServiceTotals:
        """The same of what it has had: that a gap was idle, or an overlap another's, is known once it was charged."""
        self.served = ServiceTotals(*map(max, self.served, now))
        return self.served

    def booked(self, book: AccountState | None) -> AccountState | None:
        """``book`` for the next server, which must not report less than this one has."""
        if book is None:
            return None
        held_ns, busy_ns, _ = self.served
        return replace(book, held_ns=max(book.held_ns, held_ns), busy_ns=max(book.busy_ns, busy_ns))

    def row(self, book: AccountState | None) -> VgpuRow:
        """As the journal remembers it, with the account that it has now."""
        passage = replace(self.passage, programs=self.programs)
        back = [one for one in self.returning if one.process not in self.present.values() and is_running(one.process)]
        return VgpuRow.of(
            self.record,
            self.booked(book),
            suspended=self.quiesced,
            passage=passage,
            idle_suspended=self.idle_suspended,
            members=(*self.members.values(), *back),
            origin=self.origin,
            preempted=self.preempted,
            standby=self.standby,
        )

    @property
    def share(self) -> Share:
        """What the scheduler has to know: its share, as wide as the widest of its processes was made at its start. A
        vGPU that bursts takes no width from others. In temporal mode one process whose hook counts nothing is enough
        for leases that have an end."""
        record = self.record
        if record.partition is None:
            counted = all(one.counts for one in (*self.members.values(), *self.returning) if one.alive)
            return record.share if counted else replace(record.share, counted=False, shareable=False)
        if record.spec.burst:
            return record.share
        widest = max((self.sms_of(slot) for slot in self.alive), default=0)
        if widest <= record.partition.granted_sms:
            return record.share
        sm_count = record.partition.sm_count
        return replace(record.share, sm_mpercent=min(widest, sm_count) * 100_000 // sm_count)

    def sms_of(self, slot: SlotReading) -> int:
        """The SMs that a process has for its life: the limit that MPS got, else the figure that the driver gave the
        process. That figure is a tenant's word. 0: the process has not asked yet."""
        planned = self.planned.get(slot.index)
        return planned.sms if planned is not None and planned.sms else slot.sm_count

    def count_past(self, slot: int) -> None:
        """The process in ``slot`` has ended: keep what it had counted."""
        if self.activity is not None:
            reading = self.activity.read_slot(slot)
            self.retired = Past(
                bounded(self.retired.refusals + reading.refusals),
                bounded(self.retired.launches + reading.launches),
                reading.refused_bytes if reading.refusals else self.retired.refused_bytes,
            )

    def show(self, record: VgpuRecord) -> None:
        """Write what ``record`` says into the grants page."""
        self.record = record
        self.grants.mode = page_mode(record)
        self.grants.memory_limit_bytes = record.memory_limit_bytes
        self.grants.process_limit_bytes = record.process_limit_bytes
        self.grants.slo_ns = record.share.tpot_ns, record.share.ttft_ns
        self.grants.flags = (self.grants.flags & ~_POLICY_FLAGS) | _LOSS_FLAGS[record.spec.on_server_loss]
        self.grants.wake()

    def stand_still(self, still: bool = True) -> None:
        """Its programs are to, or may go on."""
        self.quiesced = still
        flags = self.grants.flags
        stays = still or GrantsFlag.AWAY in flags
        self.grants.flags = flags | GrantsFlag.STILL if stays else flags & ~GrantsFlag.STILL

    def place(self, *, on_card: bool) -> None:
        """What can be moved is to be there; nothing is queued ahead of leases meanwhile."""
        flags = self.grants.flags & ~(GrantsFlag.AWAY | GrantsFlag.PRESENT | GrantsFlag.STILL)
        still = GrantsFlag.STILL if self.quiesced or not on_card else GrantsFlag(0)
        self.grants.flags = flags | still | (GrantsFlag.PRESENT if on_card else GrantsFlag.AWAY)
        self.grants.wake()

    def pass_others(self, passes: bool) -> None:
        """While it leaves the card, whether another vGPU comes: it gives that one's mappings time."""
        flags = self.grants.flags & ~GrantsFlag.PASSED | (GrantsFlag.PASSED if passes else GrantsFlag(0))
        if flags != self.grants.flags:
            self.grants.flags = flags

    def take_away(self) -> None:
        """It was removed: every gate of its processes fails from now on."""
        self.grants.flags = self.grants.flags & ~GrantsFlag.PASSED | GrantsFlag.REMOVED
        self.grants.wake()
        self.removed.set()

    def take_activity(self, descriptor: int) -> None:
        """Map the page that its broker kept; owns ``descriptor`` from here on. ``PageError`` if it is no such page."""
        try:
            page = ActivityPage.map(descriptor, repair=True)
        except BaseException:
            os.close(descriptor)
            raise
        self._drop_activity()
        self.activity, self.activity_fd = page, descriptor

    def make_activity(self) -> None:
        page = ActivityPage.create(self.generation)
        self.activity, self.activity_fd = page, os.dup(page.fileno())
        page.close_descriptor()

    def _drop_activity(self) -> None:
        if self.activity is not None:
            self.activity.close()
            os.close(self.activity_fd)
            self.activity, self.activity_fd = None, -1

    def close(self) -> None:
        """Give the pages back; processes keep their own mappings."""
        self.grants.close()
        self._drop_activity()


def away_of(slot: SlotReading) -> int:
    """What a process says that it has in the host's memory, as far as it can be so."""
    return min(slot.away_bytes, slot.committed_bytes[DEVICE])


def bounded(total: int) -> int:
    """A sum of what tenants claim, small enough for every message and page."""
    return min(total, (1 << 63) - 1)


def page_mode(record: VgpuRecord) -> PageMode:
    """Its mode as the grants page says it; a vGPU with a partition is a spatial one."""
    return PageMode.TEMPORAL if record.partition is None else PageMode.SPATIAL


def new_grants(record: VgpuRecord, facts: GpuFacts, generation: int, grace_ns: int) -> GrantsPage:
    """A grants page without leases. ``grace_ns``: how long a gate waits for a silent server."""
    page = GrantsPage.create(
        vgpu_id=record.vgpu_id,
        gpu_uuid=facts.uuid,
        mode=page_mode(record),
        generation=generation,
        memory_limit_bytes=record.memory_limit_bytes,
        process_limit_bytes=record.process_limit_bytes,
        total_memory_bytes=facts.total_memory_bytes,
        grace_ns=grace_ns,
        flags=_LOSS_FLAGS[record.spec.on_server_loss] | _MEMORY_FLAGS[record.spec.oversubscribe],
    )
    page.slo_ns = record.share.tpot_ns, record.share.ttft_ns
    return page
