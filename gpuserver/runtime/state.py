"""The state of one GPU Server that its services share, and the operations that several of them need.

Each service gets the ``GpuState`` and the other services that it calls. The state calls no service: a service that has
to act with the state adds a function to ``at_enlist``, ``at_strike_off`` or ``at_shares``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from cython_ext.pages.relaypage import RelayPage
from gpuserver.core.admission.registry import Registry, VgpuRecord
from gpuserver.core.observe.unmanaged import Response
from gpuserver.core.observe.usage import TurnUse, Usage
from gpuserver.core.scheduler.leases import AccountState, VgpuIndex
from gpuserver.core.scheduler.policy import Policy, with_period
from gpuserver.core.states.migration import AT_REST, MigrationState
from gpuserver.device.base import Activity, Capabilities, Checkpointer, GpuFacts, Partitioner
from gpuserver.runtime.events import EventFeed
from gpuserver.runtime.journal import Journal, ServerRow
from gpuserver.runtime.leases.gangs import GangLinks
from gpuserver.runtime.leases.tokens import TokenLoop
from gpuserver.runtime.names import link_name
from gpuserver.runtime.rates import RateWindow
from gpuserver.runtime.vgpus import Vgpu, new_grants
from vgpu.errors import ErrorCode, VgpuError
from vgpu.event_types import EventType
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.loggers import get_logger
from vgpu.openfiles import require
from vgpu.packing.lending import UNBOUNDED, Borrower, divide
from vgpu.paths import NodePaths
from vgpu.protocol.messages import EventReading, ModeChoice
from vgpu.share import Mode
from vgpu.units import format_bytes

log = get_logger(__name__)

GRACE_NS: Final = 10_000_000_000
"""How long a gate waits for a silent server before --on-server-loss applies."""
DESCRIPTORS_PER_VGPU: Final = 6
"""Grants page, activity page, the broker's link and pidfd, the owner's store, and one for a moment."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the node passes to the GPU Server at its start."""

    index: int
    """NVML index of the GPU."""
    mode: ModeChoice
    """The mode that the node asks for; the GPU Server decides what "auto" is."""
    simulated: bool
    """The GPU is a simulated one."""
    paths: NodePaths
    """The directories of the node."""
    host_memory_bytes: int
    """The most host memory for what is swapped out."""
    period_ns: int | None = None
    """The period of the policy. None: the value of the last ``gpu set``, else the policy's own."""
    window_ns: int | None = None
    """The window of the policy. None: the value of the last ``gpu set``, else the policy's own."""
    limits: Limits = DEFAULT_LIMITS
    """The most that one user can take."""
    unmanaged: Response = Response.REPORT
    """What happens to a vGPU's program that runs past the hook."""


@dataclass(eq=False)
class GpuState:
    """One GPU with its vGPUs. ``GpuServer`` makes it once all that it needs runs."""

    settings: Settings
    """What the node passed at the start."""
    facts: GpuFacts
    """What does not change while the GPU is there."""
    capabilities: Capabilities
    """What the GPU and its driver can do."""
    partitioner: Partitioner
    """The GPU's own MPS daemon. It runs in spatial mode."""
    checkpointer: Checkpointer
    """Takes what programs have on the GPU to the host's memory, and back."""
    nursery: trio.Nursery
    """The tasks of the GPU Server. Its cancellation ends the server."""
    relay_page: RelayPage
    """The page on which the dispatcher meets the brokers' relays."""
    tokens: TokenLoop
    """The scheduler and the dispatcher, with the account of each vGPU."""
    gangs: GangLinks
    """The gangs of the vGPUs, and the links to other GPU Servers."""
    registry: Registry
    """The vGPUs that are admitted, and what each of them is promised."""
    journal: Journal
    """The file from which the next GPU Server restores the vGPUs."""
    row: ServerRow
    """The journal's row of this server: generation, period and window. ``persist`` adds epoch and mode."""
    policy: Policy
    """The constants of the scheduler."""
    mode: Mode
    """Temporal or spatial."""
    mode_reason: str
    """Why the GPU is in that mode."""
    vgpus: dict[str, Vgpu] = field(default_factory=dict)
    """The vGPUs by id, those included that are being removed."""
    events: EventFeed = field(default_factory=EventFeed)
    """The last events, and the clients that watch for more."""
    usage: Usage = field(default_factory=Usage)
    """What each vGPU has used over its life."""
    turn_use: TurnUse = field(default_factory=TurnUse)
    """How well the GPU was used while vGPUs took turns."""
    rate_window: RateWindow = field(default_factory=RateWindow)
    """Samples of the accounts over the last second."""
    activity: Activity = field(default_factory=Activity)
    """The last figures of NVML: utilization, power, temperature, clock."""
    at_enlist: list[Callable[[Vgpu], None]] = field(default_factory=list)
    """Called with each new vGPU, once it has pages and an account."""
    at_strike_off: list[Callable[[Vgpu], None]] = field(default_factory=list)
    """Called with each vGPU that is no longer admitted, while ``vgpus`` still has it."""
    left_bytes: Callable[[], int] = lambda: 0
    """What removed vGPUs have left on the card, because other processes have imported it (memory/sharing.py)."""
    at_shares: list[Callable[[], None]] = field(default_factory=list)
    """Called after ``apply_shares``."""
    _journal_turn: trio.Lock = field(default_factory=trio.Lock)
    """Held by the task that writes the journal."""

    @property
    def generation(self) -> int:
        """How many servers this GPU has had, this one included."""
        return self.row.generation

    @property
    def attached_count(self) -> int:
        """The processes of all vGPUs that are not known to be dead. After a restart this includes the processes that
        have not come back yet."""
        return sum(max(len(vgpu.alive), len(vgpu.programs)) for vgpu in self.vgpus.values())

    # --- vGPUs come and go

    def require_descriptors(self, vgpus: int = 1) -> None:
        """``VgpuError`` (unavailable): this process has too few descriptors left for so many more vGPUs."""
        require_descriptors(self.settings, vgpus)

    def enlist(
        self,
        record: VgpuRecord,
        book: AccountState | None,
        *,
        passage: MigrationState = AT_REST,
        quiesced: bool = False,
    ) -> Vgpu:
        """Make the pages and the account of an admitted vGPU. The caller starts the broker."""
        generation = self.generation
        vgpu = Vgpu(record, generation, new_grants(record, self.facts, generation, GRACE_NS), passage=passage)
        self.vgpus[record.vgpu_id] = vgpu
        link_name(self.settings.paths, record.owner.uid, record.spec.name, record.vgpu_id)
        vgpu.published_share = record.share
        self.tokens.add(record.key, vgpu.grants, record.share, book)
        if record.suspended or quiesced:
            vgpu.stand_still()
            self.tokens.park(record.key)
        for act in self.at_enlist:
            act(vgpu)
        self.refresh_gangs()
        return vgpu

    def strike_off(self, vgpu: Vgpu) -> None:
        """Forget a vGPU whose account is closed. Another vGPU can have its key from now on."""
        self.relay_page.clear(vgpu.record.key)
        self.registry.remove(vgpu.record.vgpu_id)
        for act in self.at_strike_off:
            act(vgpu)
        self.usage.forget(vgpu.record.key)
        del self.vgpus[vgpu.record.vgpu_id]
        self.apply_shares()
        vgpu.close()

    def close(self) -> None:
        """Close the pages of all vGPUs. The brokers keep theirs."""
        for vgpu in self.vgpus.values():
            vgpu.close()

    # --- what each vGPU may have

    def refresh_gangs(self) -> None:
        """Form the gangs anew, after a vGPU or a process with several vGPUs came or went, or the mode changed."""
        self.gangs.enroll(self.vgpus.values(), self.mode)

    def apply_shares(self) -> None:
        """Publish each changed share to the scheduler and to the pages. One changed vGPU may change the weights of all
        that are overcommitted."""
        for record in self.registry:
            vgpu = self.vgpus.get(record.vgpu_id)
            if vgpu is None or vgpu.removed.is_set():
                continue
            if vgpu.record != record:
                vgpu.show(record)
            share = vgpu.share
            if vgpu.published_share != share:
                vgpu.published_share = share
                self.tokens.change(record.key, share)
        self.divide_card()
        for act in self.at_shares:
            act()

    def divide_card(self) -> None:
        """Divide the unpromised memory among the vGPUs that may own more than they were promised."""
        borrowers = [
            Borrower(
                vgpu.record.vgpu_id,
                promised_bytes=vgpu.record.guaranteed_memory_bytes,
                borrowed_bytes=vgpu.borrowed_bytes,
                limit_bytes=vgpu.grants.card_limit_bytes,
                grows=not vgpu.quiesced and not vgpu.swapped_out,
                asks_bytes=vgpu.room_bytes,
                more_bytes=vgpu.grants.spare_bytes or UNBOUNDED,
            )
            for vgpu in self.vgpus.values()
            if vgpu.record.borrows
        ]
        limits = divide(borrowers, self.facts.total_memory_bytes - self.registry.guaranteed_memory_bytes)
        for vgpu_id, vgpu in self.vgpus.items():
            limit = limits.get(vgpu_id, 0)
            if vgpu.grants.card_limit_bytes != limit:
                vgpu.grants.card_limit_bytes = limit

    def count_occupied(self, but: Vgpu | None = None, besides: int = 0) -> None:
        """Count what vGPUs have on the card beyond their promises, before a new promise. ``but``: the vGPU that gets
        the promise; ``besides``: the bytes that come with it."""
        others = [vgpu for vgpu in self.vgpus.values() if vgpu is not but and not vgpu.removed.is_set()]
        self.registry.occupied_bytes = sum(vgpu.kept_bytes for vgpu in others) + besides + self.left_bytes()

    def set_period(self, period_ns: int) -> None:
        """Change the policy's period, also for the next server."""
        self.policy = with_period(self.policy, period_ns)
        self.row = replace(self.row, period_ns=period_ns)

    def set_window(self, window_ns: int) -> None:
        """Change the policy's window, also for the next server."""
        self.policy = replace(self.policy, window_ns=window_ns)
        self.row = replace(self.row, window_ns=window_ns)

    def set_draining(self, draining: bool) -> None:
        """Take no new vGPUs from now on, or take them again, also as the next server."""
        self.registry.draining = draining
        self.row = replace(self.row, draining=draining)

    # --- events

    def record_event(self, kind: EventType, vgpu: Vgpu | None, text: str, **fields: int | float | str) -> None:
        """Log the event, and pass it to all watchers."""
        vgpu_id = "" if vgpu is None else vgpu.record.vgpu_id
        log.info(kind, vgpu=vgpu_id, text=text, **fields)
        self.events.tell(
            EventReading(
                at_unix_s=time.time(), kind=kind, gpu_index=self.facts.index, vgpu_id=vgpu_id, text=text, fields=fields
            )
        )

    def record_refusals(self, vgpu: Vgpu) -> None:
        """Record the allocations that were refused since the last call. A process that ends and a vGPU that is removed
        get a last call."""
        count, size = vgpu.new_refusals()
        if count:
            text = f"an allocation of {format_bytes(size)} was refused at its limit"
            if count > 1:
                text = f"{count} allocations were refused at its limit, the last one of {format_bytes(size)}"
            self.record_event(EventType.REFUSED, vgpu, text, count=count, size_bytes=size)

    # --- the journal

    async def persist(self, new: Vgpu | None = None) -> bool:
        """Write the journal now. False: the disk failed, and the GPU goes on. ``new``: the first vGPU of a write that
        has it; if that fails, its maker takes it back."""
        async with self._journal_turn:
            books: dict[VgpuIndex, AccountState] = self.tokens.books()
            rows = [
                vgpu.row(books.get(vgpu.record.key))
                for vgpu in self.vgpus.values()
                if (vgpu.written or vgpu is new)
                # A removed vGPU stays in the journal until its programs were brought back.
                and (not vgpu.removed.is_set() or vgpu.quiesced)
            ]
            server = replace(self.row, next_epoch=self.tokens.next_epoch, mode=self.mode.value)
            try:
                unfit = await trio.to_thread.run_sync(self.journal.write, server, rows)
            except Exception as error:  # a disk fails for many reasons, and no application is to blame
                log.error("the journal was not written", reason=str(error))
                return False
            if unfit:
                log.error("vGPUs were not written into the journal: their values do not fit", vgpus=", ".join(unfit))
            if new is not None:
                new.written = new.record.vgpu_id not in unfit
                return new.written
        return True

    def advance_past(self, generation: int, next_epoch: int) -> None:
        """Prepare for a vGPU that had pages and leases of another GPU: its new pages and leases have to be later."""
        self.row = replace(self.row, generation=max(self.generation, generation) + 1)
        self.tokens.skip_to(next_epoch)


def require_descriptors(settings: Settings, vgpus: int) -> None:
    """``VgpuError`` (unavailable): this process has too few descriptors left for so many more vGPUs."""
    needed, kept = vgpus * DESCRIPTORS_PER_VGPU, settings.limits.descriptors_kept
    require(needed, kept, f"the server of GPU {settings.index}")


def unwritten(state: GpuState, done: str = "") -> VgpuError:
    """The error of a change that the journal does not have. ``done``: the change that is in effect all the same."""
    text = f"the journal of GPU {state.facts.index} cannot be written"
    if done:
        text = f"{done}, but {text}: until it can, a GPU Server that starts anew does not know"
    return VgpuError(ErrorCode.INTERNAL, text, f"see: vgpuctl doctor; df -h {state.settings.paths.state}")
