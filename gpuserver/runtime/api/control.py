"""The requests that a GPU Server answers, and their links. Only the server's own user reaches its socket. The uid of a
request is the one that the kernel reported to the node."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio
from pydantic import BaseModel, ValidationError

from gpuserver.core.admission.registry import Owner
from gpuserver.core.observe.usage import TurnUse, advise
from gpuserver.core.scheduler.interface import make_scheduler
from gpuserver.core.scheduler.leases import AccountSnapshot
from gpuserver.runtime.api.readings import (
    GpuPlace,
    notes_on,
    outside_process,
    process_reading,
    seen_of,
    statement_of,
    vgpu_reading,
    warnings_on,
)
from gpuserver.runtime.api.tracing import Tracing
from gpuserver.runtime.lifecycle.brokers import Brokers
from gpuserver.runtime.lifecycle.creation import Creations, Held, summary
from gpuserver.runtime.lifecycle.migration import Migration
from gpuserver.runtime.lifecycle.removal import Removal
from gpuserver.runtime.lifecycle.suspension import Suspension, away
from gpuserver.runtime.lifecycle.triggers import Triggers
from gpuserver.runtime.links import LinkErrors
from gpuserver.runtime.memory.swapping import Swapping
from gpuserver.runtime.memory.watch import MemoryWatch
from gpuserver.runtime.mps import MpsWatch, enter_mode
from gpuserver.runtime.names import link_name, unlink_name
from gpuserver.runtime.rates import Rates
from gpuserver.runtime.state import GpuState, Settings, unwritten
from gpuserver.runtime.vgpus import Vgpu
from vgpu.errors import ErrorCode, VgpuError, not_yours
from vgpu.event_types import EventType
from vgpu.groups import Groups
from vgpu.identity import Process
from vgpu.integrations.claims import check_allotted
from vgpu.loggers import get_logger
from vgpu.protocol.handlers import Handlers
from vgpu.protocol.hello import Hello
from vgpu.protocol.messages import (
    FORWARDS,
    Arrival,
    Await,
    Confirm,
    Confirmed,
    Create,
    EventList,
    Events,
    Forward,
    GetMetrics,
    GetSnapshot,
    GpuList,
    Gpus,
    GpuStatus,
    Inspect,
    List,
    MetricsSnapshot,
    Migrate,
    MigrateIn,
    MigrateOutcome,
    ModeChoice,
    Notice,
    Processes,
    ProcessList,
    ProcessReading,
    Remove,
    Resume,
    Set,
    SetGpu,
    Snapshot,
    Suspend,
    Trace,
    VgpuDetail,
    VgpuList,
    VgpuStatus,
    Watch,
)
from vgpu.protocol.meters import GpuMeters, VgpuMeters
from vgpu.protocol.peer import peer_of
from vgpu.protocol.requests import TABLE
from vgpu.protocol.service import serve, welcome
from vgpu.protocol.stream import MessageStream
from vgpu.share import Mode
from vgpu.units import counted

log = get_logger(__name__)


OWN: Final = tuple(entry for entry in TABLE if entry.on_server and not entry.is_stream)
"""The requests that have one answer."""


@dataclass(frozen=True, slots=True)
class Asker:
    """The node, or another GPU Server. ``held``: the creations of its link that it has not confirmed."""

    forward: Forward
    held: Held

    @property
    def uid(self) -> int:
        return self.forward.uid


class Control:
    """Answers the requests of the control link for one GPU."""

    def __init__(
        self,
        state: GpuState,
        *,
        memory: MemoryWatch,
        brokers: Brokers,
        swapping: Swapping,
        suspension: Suspension,
        triggers: Triggers,
        removal: Removal,
        creations: Creations,
        migration: Migration,
        mps: MpsWatch,
    ) -> None:
        self._state = state
        self._memory = memory
        self._brokers = brokers
        self._swapping = swapping
        self._suspension = suspension
        self._triggers = triggers
        self._removal = removal
        self._creations = creations
        self._migration = migration
        self._mps = mps
        self._tracing = Tracing(state)
        self._groups = Groups()
        settings, facts = state.settings, state.facts
        self._handlers = Handlers[Asker](
            "GPU Server",
            OWN,
            {
                Create: self._create,
                Await: self._await,
                Confirm: self._confirm,
                Set: self._set,
                Remove: self._remove,
                Suspend: self._suspend,
                Resume: self._resume,
                Migrate: self._migrate_away,
                MigrateIn: self._migrate_in,
                SetGpu: self._set_gpu,
                List: self._list,
                Inspect: self._inspect,
                Processes: self._list_processes,
                Gpus: self._list_gpus,
                Events: self._past_events,
                GetSnapshot: self._snapshot,
                GetMetrics: self._metrics,
            },
        )
        self._place = GpuPlace(facts.index, facts.uuid, settings.simulated, _environment(settings))

    # --- links

    async def serve(self, sock: trio.socket.SocketType) -> None:
        """One link, of a node or a broker. Whatever is wrong with it ends it, and it alone."""
        first_bytes = self._state.settings.limits.first_message_bytes
        async with MessageStream(sock, takes_descriptors=False, first_bytes=first_bytes) as link:
            try:
                peer = peer_of(sock)
            except OSError as error:
                log.warning("link closed", reason=f"its peer cannot be found out: {error}")
                return

            def greeted(hello: Hello) -> None:
                known = any(vgpu.broker == peer.process for vgpu in self._state.vgpus.values())
                if hello.role == "broker" and known:
                    link.admit_descriptors()  # its vGPU's pages

            try:
                if peer.uid not in {0, os.geteuid()}:
                    raise VgpuError(ErrorCode.NOT_YOURS, f"uid {peer.uid} has no business here")
                hello = await welcome(link, os.getpid(), greeted)
                if hello is None:
                    return
                if hello.role == "broker":
                    await self._brokers.serve_link(link, peer.process)
                elif hello.role == "server":
                    await self._state.gangs.serve_link(link)
                else:
                    await self._serve_requests(link)
            except LinkErrors as error:
                log.info("link closed", pid=peer.process.pid, uid=peer.uid, reason=_reason(error))
            except Exception:
                # An error of this server ends one link. The GPU is still shared over the others.
                log.exception("link failed", pid=peer.process.pid, uid=peer.uid)

    async def _serve_requests(self, link: MessageStream) -> None:
        """What was asked for on this link and not confirmed goes with it."""
        held = Held()

        async def answer(forward: Forward) -> BaseModel:
            return await self._answer(forward, held)

        async def sent(forward: Forward) -> None:
            if isinstance(forward.request, Create) and not forward.request.request_id:
                for vgpu in held.vgpus:
                    await self._creations.confirm_delivered(vgpu)

        try:
            await serve(link, FORWARDS, answer, self._notices, sent, lambda f: isinstance(f.request, Create | Await))
        finally:
            self._creations.release(held)

    def _notices(self, forward: Forward) -> AsyncGenerator[Notice, None] | None:
        match forward.request:
            case Watch():
                return self._state.events.watch(forward.id)
            case Trace() as trace:
                return self._tracing.stream(forward.id, forward.uid, trace.duration_ns, work=trace.work)
            case _:
                return None

    async def _answer(self, forward: Forward, held: Held) -> BaseModel:
        if not self._handlers.handles(forward.request):
            raise VgpuError(ErrorCode.INVALID, f"{forward.request.op} is asked of the node, not of a GPU")
        return await self._handlers.answer(forward.request, Asker(forward, held))

    # --- permission

    def _known(self, vgpu_id: str) -> Vgpu:
        vgpu = self._state.vgpus.get(vgpu_id)
        if vgpu is None:
            raise VgpuError(ErrorCode.NOT_FOUND, f"there is no vGPU {vgpu_id}", "see: vgpuctl ls")
        return vgpu

    def _owned(self, vgpu_id: str, uid: int) -> Vgpu:
        vgpu = self._known(vgpu_id)
        owner = vgpu.record.owner.uid
        if uid not in {0, owner}:
            raise not_yours(vgpu_id, owner, uid)
        return vgpu

    # --- changes

    async def _create(self, create: Create, asker: Asker) -> VgpuStatus:
        forward, share_gid = asker.forward, create.share_gid
        if create.spec.share_group is not None and share_gid < 0:  # a node of an older version leaves it to us
            share_gid = await self._groups.id_of(create.spec.share_group)
        owner = Owner(forward.uid, share_gid if create.spec.share_group is not None else -1)
        vgpu = await self._creations.create(create, owner, Process(*forward.asker), asker.held)
        if create.wait:
            await self._creations.finished(vgpu)
        return self._reading(vgpu)

    async def _confirm(self, confirm: Confirm, asker: Asker) -> Confirmed:
        kept = await self._creations.confirm(asker.uid, confirm.request_id)
        return Confirmed(vgpu_id=kept.record.vgpu_id)

    async def _await(self, wait: Await, asker: Asker) -> VgpuStatus:
        request_id = wait.request_id
        vgpu = await self._creations.asked_before(asker.uid, request_id)
        if vgpu is None:
            raise VgpuError(ErrorCode.NOT_FOUND, f"no vGPU is made for request {request_id!r}", "ask again")
        await self._creations.finished(vgpu)
        return self._reading(vgpu)

    async def _set(self, change: Set, asker: Asker) -> VgpuStatus:
        state, vgpu, uid = self._state, self._owned(change.vgpu, asker.uid), asker.uid
        if vgpu.passage.leaving is not None:
            raise away(vgpu)
        check_allotted(vgpu.origin.claim, vgpu.record.spec, change.changes)
        await self._memory.refresh()
        state.count_occupied(but=vgpu)
        before, scaling = vgpu.record, change.scaling
        if scaling is not None and not scaling.holds_for(before.spec, change.changes):
            raise VgpuError(ErrorCode.INVALID, f"{before.vgpu_id} has another size or other bounds by now")
        record = state.registry.change(before.vgpu_id, change.changes, time.time_ns())
        if record.spec.name != before.spec.name:
            unlink_name(state.settings.paths, before.owner.uid, before.spec.name, before.vgpu_id)
            link_name(state.settings.paths, record.owner.uid, record.spec.name, record.vgpu_id)
        state.apply_shares()
        await self._swapping.make_room()
        if change.changes.idle_suspend_ns and not vgpu.idle_suspended:
            await self._suspension.probe(vgpu)
        await self._brokers.changed(vgpu)
        written = await state.persist()
        if scaling is not None:
            state.record_event(EventType.SCALED, vgpu, f"{record.vgpu_id} {scaling.reason}", **summary(record.spec))
        else:
            text = f"{record.vgpu_id} changed by uid {uid}"
            state.record_event(EventType.CHANGED, vgpu, text, by_uid=uid, **summary(record.spec))
        if not written:
            raise unwritten(state, f"{record.vgpu_id} is changed")
        return self._reading(vgpu)

    async def _suspend(self, suspend: Suspend, asker: Asker) -> VgpuStatus:
        vgpu = self._owned(suspend.vgpu, asker.uid)
        standby = await self._triggers.prepare(vgpu, suspend)
        await self._suspension.suspend(vgpu, suspend.preempted, standby)
        return self._reading(vgpu)

    async def _resume(self, resume: Resume, asker: Asker) -> VgpuStatus:
        vgpu = self._owned(resume.vgpu, asker.uid)
        await self._suspension.resume(vgpu)
        return self._reading(vgpu)

    async def _migrate_away(self, migrate: Migrate, asker: Asker) -> MigrateOutcome:
        return await self._migration.leave(self._owned(migrate.vgpu, asker.uid), int(migrate.gpu))

    async def _migrate_in(self, arriving: MigrateIn, _: Asker) -> Arrival:
        return await self._migration.arrive(arriving)

    async def _remove(self, remove: Remove, asker: Asker) -> VgpuStatus:
        vgpu, uid, force = self._owned(remove.vgpu, asker.uid), asker.uid, remove.force
        vgpu_id, processes = vgpu.record.vgpu_id, vgpu.alive
        if processes and not force:
            pids = ", ".join(str(process.pid) for process in processes[:5]) + (" …" if len(processes) > 5 else "")
            raise VgpuError(
                ErrorCode.IN_USE,
                f"{vgpu_id} has {counted(len(processes), 'running process')} ({pids})",
                f"end them, or: vgpuctl rm -f {vgpu_id}",
            )
        last = self._reading(vgpu)
        try:
            await self._migration.release(vgpu)
        except VgpuError:
            if not force:
                raise
        if not await self._removal.remove(vgpu, EventType.REMOVED, f"{vgpu_id} removed by uid {uid}", by_uid=uid):
            raise unwritten(self._state, f"{vgpu_id} is removed")
        return last

    async def _set_gpu(self, change: SetGpu, asker: Asker) -> GpuStatus:
        state, uid = self._state, asker.uid
        if uid not in {0, os.geteuid()}:
            raise VgpuError(
                ErrorCode.NOT_YOURS,
                f"only root or the node's own user may change a GPU, and you are uid {uid}",
                "sudo vgpuctl gpu set",
            )
        if change.mode is not None:  # the one that may be refused: first
            await self._set_mode(change.mode, uid)
        if change.period_ns is not None:
            state.set_period(change.period_ns)
        if change.window_ns is not None:
            state.set_window(change.window_ns)
        if change.draining is not None and change.draining != state.row.draining:
            state.set_draining(change.draining)
            kind = EventType.DRAINED if change.draining else EventType.UNDRAINED
            does = "takes no new vGPUs" if change.draining else "takes vGPUs again"
            state.record_event(kind, None, f"GPU {state.facts.index} {does}, by uid {uid}", by_uid=uid)
        state.tokens.set_policy(state.policy)
        if not await state.persist():
            raise unwritten(state, f"GPU {state.facts.index} is changed")
        return self._gpu(self._readings())

    async def _set_mode(self, choice: ModeChoice, uid: int) -> None:
        """All or nothing: what can be refused is asked before MPS is touched, and again after."""
        state = self._state
        wanted = Mode.TEMPORAL if choice == "temporal" else Mode.SPATIAL
        if wanted is state.mode:
            state.mode_reason = "asked for"
            return
        async with self._mps.lifecycle_lock:
            self._check_mode(wanted)
            enter = partial(enter_mode, state.partitioner, state.facts, state.capabilities)
            mode, reason = await trio.to_thread.run_sync(enter, choice)
            try:
                self._check_mode(mode)  # a process may have attached meanwhile
            except VgpuError:
                back: ModeChoice = "spatial" if state.mode is Mode.SPATIAL else "temporal"
                await trio.to_thread.run_sync(enter, back)
                raise
            state.registry.set_mode(mode)
            state.mode, state.mode_reason = mode, reason
            state.turn_use = TurnUse()
        shares = {record.key: record.share for record in state.registry}
        for vgpu in state.vgpus.values():
            vgpu.published_share = state.registry[vgpu.record.vgpu_id].share
        scheduler = make_scheduler(mode, state.policy, first_epoch=state.tokens.next_epoch)
        state.tokens.replace_scheduler(scheduler, shares)
        state.refresh_gangs()
        for vgpu in state.vgpus.values():
            vgpu.show(state.registry[vgpu.record.vgpu_id])
        for vgpu in list(state.vgpus.values()):
            await self._brokers.changed(vgpu)
        text = f"GPU {state.facts.index} is in {mode.value} mode: {reason}, by uid {uid}"
        state.record_event(EventType.MODE, None, text, by_uid=uid)

    def _check_mode(self, mode: Mode) -> None:
        state = self._state
        attached = state.attached_count
        if attached:
            several = counted(attached, "process")
            raise VgpuError(
                ErrorCode.IN_USE,
                f"GPU {state.facts.index} has {several} attached, and a process keeps its mode for life",
                "end them first: vgpuctl ps",
            )
        state.registry.in_mode(mode)

    # --- readings

    def _readings(self) -> tuple[VgpuStatus, ...]:
        state = self._state
        statements, now_ns = state.tokens.statements(), time.monotonic_ns()
        return tuple(self._read(vgpu, statements.get(vgpu.record.key), now_ns) for vgpu in state.vgpus.values())

    async def _list(self, _: List, __: Asker) -> VgpuList:
        return VgpuList(vgpus=self._readings())

    async def _list_processes(self, wanted: Processes, _: Asker) -> ProcessList:
        chosen = [self._known(wanted.vgpu)] if wanted.vgpu else list(self._state.vgpus.values())
        return ProcessList(processes=tuple(p for vgpu in chosen for p in self._processes(vgpu)))

    async def _list_gpus(self, _: Gpus, __: Asker) -> GpuList:
        return GpuList(gpus=(self._gpu(self._readings()),))

    async def _past_events(self, _: Events, __: Asker) -> EventList:
        """All that the server remembers: the node chooses."""
        return EventList(events=tuple(self._state.events.past))

    async def _snapshot(self, _: GetSnapshot, __: Asker) -> Snapshot:
        return self._snapshot_now()

    def _snapshot_now(self) -> Snapshot:
        readings = self._readings()
        return Snapshot(at_unix_s=time.time(), gpus=(self._gpu(readings),), vgpus=readings)

    async def _metrics(self, _: GetMetrics, __: Asker) -> MetricsSnapshot:
        state, index = self._state, self._state.facts.index
        snapshot, meters = self._snapshot_now(), state.tokens.meters
        return MetricsSnapshot(
            snapshot=snapshot,
            processes=tuple(p for vgpu in state.vgpus.values() for p in self._processes(vgpu)),
            gpus=(
                GpuMeters(
                    gpu_index=index,
                    handovers=meters.handovers.histogram(),
                    loop_lag=meters.loop_lag.histogram(),
                ),
            ),
            vgpus=tuple(
                VgpuMeters(vgpu_id=vgpu.record.vgpu_id, gpu_index=index, waits=meters.waits(vgpu.record.key))
                for vgpu in state.vgpus.values()
                if not vgpu.removed.is_set()
            ),
        )

    def _reading(self, vgpu: Vgpu) -> VgpuStatus:
        return self._read(vgpu, self._state.tokens.statements().get(vgpu.record.key), time.monotonic_ns())

    def _read(self, vgpu: Vgpu, statement: AccountSnapshot | None, now_ns: int) -> VgpuStatus:
        """``statement`` None: the scheduler does not know it, now or for ever."""
        state = self._state
        if statement is None:
            book = vgpu.closed or state.tokens.parked_account(vgpu.record.key)
            assert book is not None
            statement = statement_of(vgpu.record, book)
        rates = state.rate_window.rates(now_ns, statement)
        warnings = warnings_on(
            vgpu,
            state.registry,
            self._mps.reason,
            state.partitioner.client_priority(vgpu.record.spec.priority),
            simulated=state.settings.simulated,
            least_context_bytes=self._memory.least_context_bytes,
        )
        return vgpu_reading(vgpu, self._place, statement, rates, now_ns, warnings)

    async def _inspect(self, inspect: Inspect, _: Asker) -> VgpuDetail:
        state, vgpu = self._state, self._known(inspect.vgpu)
        advice = advise(seen_of(vgpu, state.usage, state.mode, state.facts.index, state.turn_use))
        if advice is not None and vgpu.record.spec.scales:  # what the text names to type would end the bounds
            advice = advice.model_copy(update={"text": ""})
        return VgpuDetail(
            vgpu=self._reading(vgpu),
            processes=tuple(self._processes(vgpu)),
            gpu=self._gpu(self._readings()),
            notes=notes_on(vgpu.record, state.mode),
            advice=advice,
            mounts=self._brokers.containers.volumes(vgpu),
        )

    def _processes(self, vgpu: Vgpu) -> list[ProcessReading]:
        index, memory = self._state.facts.index, self._memory
        return [process_reading(vgpu, slot, index, memory) for slot in vgpu.slots]

    def _gpu(self, vgpus: tuple[VgpuStatus, ...]) -> GpuStatus:
        state = self._state
        rates = [Rates(v.tokens_per_second, v.held_ratio, v.busy_ratio) for v in vgpus]
        return GpuStatus(
            index=state.facts.index,
            uuid=state.facts.uuid,
            name=state.facts.name,
            simulated=state.settings.simulated,
            state="serving",
            mode="temporal" if state.mode is Mode.TEMPORAL else "spatial",
            mode_reason=state.mode_reason,
            draining=state.row.draining,
            period_ns=state.tokens.period_ns,
            sm_count=state.facts.sm_count,
            total_memory_bytes=state.facts.total_memory_bytes,
            used_memory_bytes=self._memory.latest.used_bytes,
            guaranteed_ratio=state.registry.guaranteed_ratio,
            guaranteed_memory_bytes=state.registry.guaranteed_memory_bytes,
            vgpus=len(vgpus),
            processes=sum(v.processes for v in vgpus),
            held_ratio=sum(r.held_ratio for r in rates),
            busy_ratio=sum(r.busy_ratio for r in rates),
            tokens_per_second=sum(r.tokens_per_second for r in rates),
            open_ended=any(v.open_ended for v in vgpus) and not any(r.tokens_per_second for r in rates),
            server_pid=os.getpid(),
            restarts=0,
            events_heard=state.tokens.events_drained,
            window_ns=state.policy.window_ns,
            mps_pid=self._mps.pid,
            mps_restarts=self._mps.restarts,
            mps_reason=self._mps.reason,
            outside=tuple(outside_process(one, state.facts.index) for one in self._memory.outside),
            host_memory_limit_bytes=self._swapping.stores.limit_bytes,
            host_memory_bytes=self._swapping.stores.ready_bytes,
            host_memory_used_bytes=self._swapping.stores.used_bytes,
            utilization_ratio=state.activity.utilization_ratio,
            memory_utilization_ratio=state.activity.memory_utilization_ratio,
            power_w=state.activity.power_w,
            temperature_c=state.activity.temperature_c,
            sm_clock_mhz=state.activity.sm_clock_mhz,
        )


def _environment(settings: Settings) -> dict[str, str]:
    """The variables by which a process finds this node."""
    found = {"VGPU_RUNTIME_DIR": str(settings.paths.runtime)}
    if settings.simulated:
        found["VGPU_SIM_DIR"] = os.environ["VGPU_SIM_DIR"]
    return found


def _reason(error: BaseException) -> str:
    return "a message that is not understood" if isinstance(error, ValidationError) else str(error) or repr(error)
