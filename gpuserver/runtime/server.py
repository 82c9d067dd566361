"""One GPU Server: owns the truth about one GPU. Lifecycle and wiring; requests are answered in ``control.py``.

What it owns, in the order in which it is made and (reversed) given up: the lock of its directory, NVML, the journal,
the relay page, the dispatcher thread, the vGPUs with their pages, the socket. Brokers and processes are not owned: they
outlive it, and find the next one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import trio

from cython_ext.dispatcher import Dispatcher
from cython_ext.relaypage import RelayPage
from gpuserver.core.admission.lending import UNBOUNDED, Borrower, divide
from gpuserver.core.admission.registry import GpuCapacity, PerUser, Registry, VgpuRecord
from gpuserver.core.observe.unmanaged import Response, Unmanaged
from gpuserver.core.observe.usage import Turns, Usage
from gpuserver.core.scheduler.interface import make_scheduler
from gpuserver.core.scheduler.leases import AccountState, Mode, VgpuIndex
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, with_period
from gpuserver.core.states.migration import AT_REST, MigrationState, Step
from gpuserver.device.mps import MpsDaemon, client_priority
from gpuserver.device.nvml import Activity, NvmlGpu
from gpuserver.device.pidfd import send
from gpuserver.runtime.brokers import Brokers, find_broker
from gpuserver.runtime.creation import Creations
from gpuserver.runtime.dozing import Dozing
from gpuserver.runtime.events import EventFeed
from gpuserver.runtime.gangs import GangLinks
from gpuserver.runtime.housekeeping import Housekeeping
from gpuserver.runtime.journal import Journal
from gpuserver.runtime.memory import MemoryWatch
from gpuserver.runtime.migration import Migration
from gpuserver.runtime.mps import MpsWatch
from gpuserver.runtime.names import link_name, unlink_name
from gpuserver.runtime.outside import UnmanagedProcess
from gpuserver.runtime.readings import GpuPlace, RateWindow
from gpuserver.runtime.suspension import Suspension, away
from gpuserver.runtime.swapping import Swapping
from gpuserver.runtime.tokens import TokenLoop
from gpuserver.runtime.unmanaged import respond, sightings
from gpuserver.runtime.vgpus import NO_PROCESS, Planned, Vgpu, new_grants
from vgpu.broker.places import keep_places
from vgpu.errors import ErrorCode, VgpuError
from vgpu.event_types import EventType
from vgpu.identity import Member, Process
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.loggers import get_logger
from vgpu.openfiles import require
from vgpu.pacing import Pace, and_more
from vgpu.paths import NodePaths
from vgpu.protocol.broker import Adopt, Attached, Died, Reaped
from vgpu.protocol.messages import EventReading, ModeChoice
from vgpu.protocol.peer import is_running
from vgpu.protocol.stream import serve_links, until_replaced
from vgpu.units import format_bytes

log = get_logger(__name__)

LEAVE_S: Final = 1.0
GRACE_NS: Final = 10_000_000_000
"""How long a gate waits on a silent server before --on-server-loss applies."""
DESCRIPTORS_PER_VGPU: Final = 6
"""Grants page, activity page, its broker's link and pidfd, its owner's store, and one for a moment."""
_SHUTDOWN_S: Final = 5.0
JUDGE_S: Final = 1.0

Serve = Callable[[trio.socket.SocketType], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the node says at the start. ``mode``: "auto" is decided here. ``host_memory_bytes``: the most that what is
    away from the card may have. ``period_ns``, ``window_ns``: of the policy; None is what ``gpu set`` left, else its
    own."""

    index: int
    mode: ModeChoice
    simulated: bool
    paths: NodePaths
    host_memory_bytes: int
    period_ns: int | None = None
    window_ns: int | None = None
    limits: Limits = DEFAULT_LIMITS
    unmanaged: Response = Response.REPORT


class GpuServer:
    """One GPU's vGPUs, their tokens and their memory. ``run`` until SIGTERM."""

    def __init__(self, settings: Settings, gpu: NvmlGpu, daemon: MpsDaemon, journal: Journal) -> None:
        self.settings = settings
        self.facts = gpu.facts
        self.daemon = daemon
        self.started = time.monotonic_ns()
        self.vgpus: dict[str, Vgpu] = {}
        self.place = GpuPlace(self.facts.index, self.facts.uuid, settings.simulated, _environment(settings))
        self.window = RateWindow()
        self.usage = Usage()
        self.turns = Turns()
        self.activity = Activity()
        self.policy = DEFAULT_POLICY
        self.gpu = gpu
        self._journal = journal
        self._journal_turn = trio.Lock()
        self.events = EventFeed()
        self._row, self._remembered = journal.begin()
        self.require_descriptors(len(self._remembered))
        # Brokers of the server before us.
        found = ((row.vgpu_id, find_broker(settings.paths, row.vgpu_id)) for row in self._remembered)
        self._found = {vgpu_id: broker for vgpu_id, broker in found if broker is not None}
        if period_ns := settings.period_ns or self._row.period_ns:
            self.policy = with_period(self.policy, period_ns)
        if window_ns := settings.window_ns or self._row.window_ns:
            self.policy = replace(self.policy, window_ns=window_ns)
        self.mode, self.mode_reason = self._choose_mode()
        limits = settings.limits
        per_user = PerUser(limits.vgpus_per_user, limits.vgpus_kept, frozenset({0, os.geteuid()}))
        self.registry = Registry(GpuCapacity(self.facts.total_memory_bytes, self.facts.sm_count), self.mode, per_user)
        self._unmanaged = Unmanaged(settings.unmanaged)
        self._judged_at = float("-inf")
        self.memory = MemoryWatch(
            gpu,
            lambda: list(self.vgpus.values()),
            self._release,
            self._notice,
            self._daemon_pid,
            self._judge_outsiders,
        )
        self.suspension = Suspension(self)
        self.migration = Migration(self)
        self.creations = Creations(self)
        self.swapping = Swapping(self)
        self.dozing = Dozing(self)
        self.housekeeping = Housekeeping(self)
        self.mps = MpsWatch(daemon, lambda: self.attached_count, lambda kind, text: self.record_event(kind, None, text))

    # --- modes

    def _choose_mode(self) -> tuple[Mode, str]:
        """The mode to begin in: where processes may be left, with their brokers or without, the one that they have."""
        if self._row.mode and (self._found or any(is_running(p) for r in self._remembered for p in r.passage.programs)):
            kept = Mode(self._row.mode)
            if kept is Mode.SPATIAL:
                self.daemon.start()
            return kept, "kept over a restart, for the processes that are attached"
        mode, reason = self.enter_mode(self.settings.mode)
        return mode, "the default" if self.settings.mode == "temporal" else reason  # nobody need have asked for it

    def enter_mode(self, choice: ModeChoice) -> tuple[Mode, str]:
        """Make the device ready for ``choice``. ``VgpuError`` (mode) if it has to be spatial and MPS does not start."""
        if choice == "temporal":
            self.daemon.stop()
            return Mode.TEMPORAL, "asked for"
        try:
            if self.facts.sm_count <= 0:
                raise VgpuError(ErrorCode.MODE, "this driver does not tell how many SMs the GPU has")
            self.daemon.start()
        except VgpuError as error:
            if choice == "spatial":
                raise
            return Mode.TEMPORAL, f"auto: {error.message}"
        return Mode.SPATIAL, "asked for" if choice == "spatial" else "auto: the MPS daemon runs"

    # --- life

    async def run(self, listener: trio.socket.SocketType, serve: Serve) -> None:
        """Serve until SIGTERM or SIGINT. ``serve`` answers one link."""
        settings = self.settings
        with ExitStack() as owned:
            self._relay_page = RelayPage.create()
            owned.callback(self._relay_page.close)
            dispatcher = owned.enter_context(Dispatcher(self._relay_page))
            owned.callback(self._close_vgpus)
            scheduler = make_scheduler(self.mode, self.policy, first_epoch=self._row.next_epoch)
            self.tokens = TokenLoop(scheduler, dispatcher)
            self.gangs = GangLinks(self.settings.paths, self.facts.index, self.tokens)
            self.brokers = Brokers(
                self.settings.paths,
                self.facts.index,
                self._relay_page,
                self.swapping.stores,
                self.describe,
                self.vgpus.get,
                self,
                self.memory.look,
                settings.limits,
            )
            owned.callback(self.brokers.template.end)
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                self._restore()
                nursery.start_soon(self._end_on_signal)
                nursery.start_soon(self._end_when_replaced)
                nursery.start_soon(self.tokens.run)
                nursery.start_soon(self.gangs.run)
                nursery.start_soon(self.memory.run)
                nursery.start_soon(self.swapping.run)
                nursery.start_soon(self.dozing.run)
                nursery.start_soon(self.mps.run, lambda: self.mode is Mode.SPATIAL)
                nursery.start_soon(self.housekeeping.run)
                nursery.start_soon(self.brokers.template.keep)
                nursery.start_soon(partial(serve_links, listener, serve, _complain, most=settings.limits.links))
                log.info(
                    "serving", gpu=self.facts.uuid, mode=self.mode.value, why=self.mode_reason, vgpus=len(self.vgpus)
                )
            dispatcher.close()

    def _close_vgpus(self) -> None:
        for vgpu in self.vgpus.values():
            vgpu.close()

    async def _end_on_signal(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                await self._end()

    async def _end_when_replaced(self) -> None:
        """No client reaches this server any more, and the next node starts another server of this GPU."""
        await until_replaced(self.settings.paths.server_socket(self.settings.index))
        log.error("the server's socket was removed or replaced: it ends", gpu=self.facts.uuid)
        await self._end()

    async def _end(self) -> None:
        with trio.move_on_after(_SHUTDOWN_S, shield=True):
            await self.brokers.stop(tuple(self.vgpus.values()))
            await self.persist()
            if self.mode is Mode.SPATIAL and not self.attached_count:
                await self.mps.stop()
        log.info("stopped", gpu=self.facts.uuid)
        self.nursery.cancel_scope.cancel()

    def _restore(self) -> None:
        """What the journal remembers, under a grants page of this server's generation."""
        rows = self._remembered
        self.registry.restore(
            (
                *(r.vgpu_id, r.key, r.spec, r.owner, r.created_unix_ns, r.expires_unix_ns),
                r.suspended and not (r.passage.goes_on or r.dozing),  # else its place is kept for it
            )
            for r in rows
        )
        for row in rows:
            vgpu = self.enlist(self.registry[row.vgpu_id], row.book, passage=row.passage, quiesced=row.suspended)
            vgpu.dozing, vgpu.written, vgpu.origin = row.dozing, True, row.origin
            vgpu.returning = row.members
            vgpu.broker = self._found.get(row.vgpu_id, NO_PROCESS)
            if row.passage.next_step is Step.ASK:
                self.nursery.start_soon(self.migration.settle, vgpu)
                continue
            self.brokers.claim(vgpu)
            self.nursery.start_soon(self.brokers.keep, vgpu)
            self.nursery.start_soon(self.migration.be_released, vgpu)
            self.creations.watch(vgpu)
            if row.passage.next_step is Step.GO_ON:
                self.nursery.start_soon(self.migration.go_on, vgpu)
        self._remembered = []

    # --- vGPUs

    def require_descriptors(self, vgpus: int = 1) -> None:
        """``VgpuError`` (unavailable): this process has not enough left for so many more vGPUs."""
        needed, kept = vgpus * DESCRIPTORS_PER_VGPU, self.settings.limits.descriptors_kept
        require(needed, kept, f"the server of GPU {self.facts.index}")

    def enlist(
        self,
        record: VgpuRecord,
        book: AccountState | None,
        *,
        passage: MigrationState = AT_REST,
        quiesced: bool = False,
    ) -> Vgpu:
        """Pages and account for ``record``; its broker is another matter."""
        generation = self._row.generation
        vgpu = Vgpu(record, generation, new_grants(record, self.facts, generation, GRACE_NS), passage=passage)
        self.vgpus[record.vgpu_id] = vgpu
        link_name(self.settings.paths, record.owner.uid, record.spec.name, record.vgpu_id)
        vgpu.published_share = record.share
        self.tokens.add(record.key, vgpu.grants, record.share, book)
        if record.suspended or quiesced:
            vgpu.stand_still()
            self.tokens.bench(record.key)
        self.swapping.enlist(vgpu)
        self.refresh_gangs()
        return vgpu

    def refresh_gangs(self) -> None:
        """A vGPU or a process with several came or went, or the mode changed: who is in which gang now?"""
        self.gangs.enroll((vgpu for vgpu in self.vgpus.values() if not vgpu.quiesced), self.mode)

    def apply_shares(self) -> None:
        """One vGPU changed, and so perhaps the weights of the overcommitted: tell scheduler and pages what is new."""
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
        if self.mode is Mode.SPATIAL:
            self.nursery.start_soon(self._tell_places)

    def divide_card(self) -> None:
        """Tell those who may own more than they were promised how much that is just now."""
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
        """Before anything is promised: what others have on the card beyond what they were. ``but``: to whom it is to
        be; ``besides``: what comes with that."""
        others = [vgpu for vgpu in self.vgpus.values() if vgpu is not but and not vgpu.removed.is_set()]
        self.registry.occupied_bytes = sum(vgpu.kept_bytes for vgpu in others) + besides

    async def remove(self, vgpu: Vgpu, kind: EventType, text: str, **fields: int | float | str) -> bool:
        """Remove a vGPU, whoever uses it. Its key is free only once its broker can no longer write under it.
        False: it is gone, but the journal still has it."""
        if vgpu.passage.leaving is not None:
            raise away(vgpu)
        if vgpu.removed.is_set():
            raise VgpuError(ErrorCode.REMOVED, f"{vgpu.record.vgpu_id} is being removed already")
        vgpu.take_away()
        async with vgpu.lifecycle_lock:
            if vgpu.quiesced:
                await self.suspension.let_go(vgpu)
        self.refresh_gangs()
        vgpu.closed = self.tokens.remove(vgpu.record.key)
        self.memory.forget(vgpu)
        await self.brokers.dismiss(vgpu, removed=True)
        with trio.move_on_after(LEAVE_S):
            await vgpu.left.wait()
        send(vgpu.broker, signal.SIGKILL)
        await vgpu.left.wait()
        self.housekeeping.tell_refusals(vgpu)
        self._strike_off(vgpu)
        self._close_door(vgpu)
        written = await self.persist()
        self.record_event(kind, vgpu, text, **fields)
        return written

    def _strike_off(self, vgpu: Vgpu) -> None:
        self._relay_page.clear(vgpu.record.key)
        self.registry.remove(vgpu.record.vgpu_id)
        self.swapping.forget(vgpu)
        self.usage.forget(vgpu.record.key)
        del self.vgpus[vgpu.record.vgpu_id]
        self.apply_shares()
        vgpu.close()

    def forget(self, vgpu: Vgpu) -> None:
        """It is another server's, with its broker and its door."""
        vgpu.closed = self.tokens.remove(vgpu.record.key)
        self.memory.forget(vgpu)
        self._strike_off(vgpu)
        self.refresh_gangs()

    def advance_past(self, generation: int, next_epoch: int) -> None:
        """What comes has seen pages and leases of another GPU: those that it is shown here have to be later."""
        self._row = replace(self._row, generation=max(self._row.generation, generation) + 1)
        self.tokens.skip_to(next_epoch)

    def _close_door(self, vgpu: Vgpu) -> None:
        door = self.settings.paths.broker_socket(vgpu.record.vgpu_id)
        with suppress(OSError):
            private = self.settings.paths.broker_dir(vgpu.record.vgpu_id)
            for path in (*private.iterdir(), *door.parent.glob("*.sock")):
                path.unlink(missing_ok=True)
            private.rmdir()
            door.parent.rmdir()
        record = vgpu.record
        unlink_name(self.settings.paths, record.owner.uid, record.spec.name, record.vgpu_id)

    def describe(self, vgpu: Vgpu) -> Adopt:
        """What its broker has to know."""
        record = vgpu.record
        spatial = record.partition is not None
        vgpu.published_places = self._places if spatial else ()
        limited = record.partition is not None and not record.spec.burst
        return Adopt(
            vgpu_id=record.vgpu_id,
            key=record.key,
            generation=vgpu.generation,
            owner_uid=record.owner.uid,
            share_gid=record.owner.share_gid,
            mode="spatial" if spatial else "temporal",
            gpu_index=self.facts.index,
            gpu_uuid=self.facts.uuid,
            simulated=self.settings.simulated,
            sm_percent=record.spec.compute_ratio * 100,
            mps_pipe_directory=str(self.daemon.directories.pipe) if spatial else "",
            mps_log_directory=str(self.daemon.directories.log) if spatial else "",
            mps_active_thread_percentage=record.partition.percent_text if limited and record.partition else "",
            # The only device that the daemon shows is number 0, whatever the GPU's index.
            mps_pinned_memory_limit=f"0={record.most_per_process_bytes >> 20}M" if spatial else "",
            mps_client_priority=client_priority(record.spec.priority) if spatial else "",
            sm_planned=sms_planned(record),
            memory_planned_bytes=record.most_per_process_bytes if spatial else 0,
            most_processes=self.daemon.most_processes if spatial else 0,
            suspended=vgpu.quiesced and not vgpu.dozing,
            places=vgpu.published_places,
        )

    @property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """Of the processes that the MPS server takes, those that are kept for each vGPU."""
        granted = {vgpu.record.key: vgpu.record.partition for vgpu in self.vgpus.values()}
        shares = {key: partition.percent / 100 for key, partition in granted.items() if partition is not None}
        return tuple(
            keep_places(self.daemon.most_processes, shares, self.settings.limits.mps_places_kept_percent).items()
        )

    async def _tell_places(self) -> None:
        """A vGPU came, went or changed: the others' brokers count with it from now on."""
        places = self._places
        for vgpu in list(self.vgpus.values()):
            if vgpu.record.partition is not None and vgpu.published_places != places:
                await self.brokers.changed(vgpu)

    @property
    def generation(self) -> int:
        """How many servers this GPU has had, this one included."""
        return self._row.generation

    @property
    def attached_count(self) -> int:
        """Processes of all vGPUs that are not known to be dead; after a restart, those too that are not back yet."""
        return sum(max(len(vgpu.alive), len(vgpu.programs)) for vgpu in self.vgpus.values())

    # --- what brokers report

    def attached(self, vgpu: Vgpu, message: Attached) -> None:
        process = Process(message.pid, message.start_time)
        vgpu.planned[message.slot] = Planned(
            message.sm_planned, message.memory_planned_bytes, message.mps_client_priority
        )
        vgpu.members[message.slot] = Member(message.slot, process, message.uid, message.command, counts=message.counts)
        vgpu.returning = tuple(member for member in vgpu.returning if member.process != process)
        self.apply_shares()
        known = vgpu.last_reported.get(message.slot) == process
        if message.vgpus or not known:  # a broker that was restarted does not know the others any more
            self._accompany(vgpu, message.slot, message.vgpus)
        if known:
            return  # a broker that reconnects tells the whole state; a process may attach again
        vgpu.last_reported[message.slot] = process
        self.nursery.start_soon(self.persist)  # if server and broker die, it is to be found again
        self.memory.expect_growth()
        self.record_event(
            EventType.ATTACHED, vgpu, f"process {message.pid} ({message.command}) attached", pid=message.pid
        )

    def _accompany(self, vgpu: Vgpu, slot: int, vgpus: tuple[str, ...]) -> None:
        if vgpus:
            vgpu.coattached[slot] = vgpus
        else:
            vgpu.coattached.pop(slot, None)
        self.refresh_gangs()

    def died(self, vgpu: Vgpu, message: Died) -> None:
        if vgpu.last_reported.get(message.slot) == Process(message.pid, message.start_time):
            self._accompany(vgpu, message.slot, ())
        member = vgpu.members.get(message.slot)
        if member is not None and member.process == Process(message.pid, message.start_time):
            vgpu.members[message.slot] = replace(member, alive=False)
        left = tuple(p for p in vgpu.passage.programs if p != Process(message.pid, message.start_time))
        vgpu.passage = replace(vgpu.passage, programs=left)
        if self.memory.died(vgpu, message.slot, Process(message.pid, message.start_time)):
            self.housekeeping.tell_refusals(vgpu)
            vgpu.count_past(message.slot)
            vgpu.planned.pop(message.slot, None)
            self.apply_shares()
            self.record_event(EventType.ENDED, vgpu, f"process {message.pid} ended", pid=message.pid)

    def reaped(self, vgpu: Vgpu, message: Reaped) -> None:
        member = vgpu.members.get(message.slot)
        if member is not None and member.process.pid == message.pid and not member.alive:
            del vgpu.members[message.slot]
        process = self.memory.reaped(vgpu, message.slot)
        # A program that was replaced by another (exec) keeps its name: what stands under it may be the other's by now,
        # and is given back with that.
        if process is not None and not any(process in other.programs for other in self.vgpus.values()):
            self.swapping.stores.release(process)
        released_bytes = min(message.released_bytes, self.facts.total_memory_bytes)  # the process wrote that number
        text = f"the driver let process {message.pid} go, {format_bytes(released_bytes)} free again"
        self.record_event(EventType.DETACHED, vgpu, text, pid=message.pid, released_bytes=released_bytes)

    async def _release(self, vgpu: Vgpu, slot: int, process: Process) -> bool:
        return await self.brokers.gone(vgpu, slot, process)

    # --- events

    def _daemon_pid(self) -> int | None:
        return self.mps.pid

    def _notice(self, kind: EventType, vgpu: Vgpu | None, text: str, pid: int) -> None:
        self.record_event(kind, vgpu, text, pid=pid)

    async def _judge_outsiders(self, outside: Sequence[UnmanagedProcess], inside: Mapping[int, str]) -> None:
        """/proc is read in a thread: a process that holds its memory's lock lets its readers wait. Once a second."""
        if trio.current_time() - self._judged_at < JUDGE_S:
            return
        self._judged_at = trio.current_time()
        seen = await trio.to_thread.run_sync(sightings, outside, inside, self.settings.paths, self._sole_users())
        for command in self._unmanaged.see(seen, time.monotonic_ns()):
            text = await trio.to_thread.run_sync(respond, command)
            vgpu = self.vgpus.get(command.sighting.vgpu_id)
            self.record_event(EventType.UNMANAGED, vgpu, text, pid=command.sighting.process.pid)

    def _sole_users(self) -> dict[str, int]:
        """Of the vGPUs that are shared with no group."""
        records = [vgpu.record for vgpu in self.vgpus.values()]
        return {record.vgpu_id: record.owner.uid for record in records if record.owner.share_gid < 0}

    def record_event(self, kind: EventType, vgpu: Vgpu | None, text: str, **fields: int | float | str) -> None:
        """Log it, and tell whoever watches."""
        vgpu_id = "" if vgpu is None else vgpu.record.vgpu_id
        log.info(kind, vgpu=vgpu_id, text=text, **fields)
        self.events.tell(
            EventReading(
                at_unix_s=time.time(), kind=kind, gpu_index=self.facts.index, vgpu_id=vgpu_id, text=text, fields=fields
            )
        )

    # --- what outlives it

    async def persist(self, new: Vgpu | None = None) -> bool:
        """Write the journal now. A disk that fails does not stop the GPU; it is reported, and False. ``new``: with this
        one; before that it is not written, and if it cannot be, whoever makes it takes it back."""
        async with self._journal_turn:
            books: dict[VgpuIndex, AccountState] = self.tokens.books()
            rows = [
                vgpu.row(books.get(vgpu.record.key))
                for vgpu in self.vgpus.values()
                if (vgpu.written or vgpu is new)
                and (not vgpu.removed.is_set() or vgpu.quiesced)  # whoever cannot be brought back yet is not forgotten
            ]
            server = replace(self._row, next_epoch=self.tokens.next_epoch, mode=self.mode.value)
            try:
                unfit = await trio.to_thread.run_sync(self._journal.write, server, rows)
            except Exception as error:  # the disk's reasons are many, none of them the applications' fault
                log.error("the journal was not written", reason=str(error))
                return False
            if unfit:
                log.error("vGPUs were not written into the journal: their values do not fit", vgpus=", ".join(unfit))
            if new is not None:
                new.written = new.record.vgpu_id not in unfit
                return new.written
        return True

    def set_period(self, period_ns: int) -> None:
        self.policy = with_period(self.policy, period_ns)
        self._row = replace(self._row, period_ns=period_ns)

    def set_window(self, window_ns: int) -> None:
        self.policy = replace(self.policy, window_ns=window_ns)
        self._row = replace(self._row, window_ns=window_ns)


def sms_planned(record: VgpuRecord) -> int:
    """SMs that MPS should limit each of its processes to; 0: it does not limit them."""
    granted = record.partition
    if granted is None or record.spec.burst or granted.granted_sms == granted.sm_count:
        return 0
    return granted.granted_sms


def _environment(settings: Settings) -> dict[str, str]:
    """Where this node is, for processes."""
    found = {"VGPU_RUNTIME_DIR": str(settings.paths.runtime)}
    if settings.simulated:
        found["VGPU_SIM_DIR"] = os.environ["VGPU_SIM_DIR"]
    return found


_complaints: Final[Pace[str]] = Pace(1.0)


def _complain(error: OSError) -> None:
    missed = _complaints.due("", time.monotonic())
    if missed is not None:
        log.warning("cannot accept a link", reason=str(error) + and_more(missed))
