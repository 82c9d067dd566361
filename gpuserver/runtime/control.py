"""What may be asked of a GPU Server, and the links on which it is asked. Only the server's own user reaches its socket;
whom the node asks for is what the kernel told the node."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator

import trio
from pydantic import BaseModel, ValidationError

from gpuserver.core.admission.registry import Owner
from gpuserver.core.observe.usage import Turns, advise
from gpuserver.core.scheduler.interface import make_scheduler
from gpuserver.core.scheduler.leases import AccountSnapshot
from gpuserver.runtime.brokers import LinkErrors
from gpuserver.runtime.creation import Held, summary
from gpuserver.runtime.migration import unwritten
from gpuserver.runtime.names import link_name, unlink_name
from gpuserver.runtime.readings import (
    Rates,
    notes_on,
    outside_process,
    process_reading,
    seen_of,
    statement_of,
    vgpu_reading,
    warnings_on,
)
from gpuserver.runtime.server import GpuServer
from gpuserver.runtime.suspension import away
from gpuserver.runtime.tracing import Tracing
from gpuserver.runtime.vgpus import Vgpu
from vgpu.errors import ErrorCode, VgpuError, not_yours
from vgpu.event_types import EventType
from vgpu.groups import Groups
from vgpu.identity import Process
from vgpu.loggers import get_logger
from vgpu.protocol.hello import Hello
from vgpu.protocol.messages import (
    FORWARDS,
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
from vgpu.protocol.service import serve, welcome
from vgpu.protocol.stream import MessageStream
from vgpu.share import Mode
from vgpu.units import counted

log = get_logger(__name__)


class Control:
    """The requests of the control link, answered for one GPU."""

    def __init__(self, server: GpuServer) -> None:
        self._server = server
        self._tracing = Tracing(server)
        self._groups = Groups()

    # --- links

    async def serve(self, sock: trio.socket.SocketType) -> None:
        """One link, of a node or a broker. Whatever is wrong with it ends it, and it alone."""
        first_bytes = self._server.settings.limits.first_message_bytes
        async with MessageStream(sock, takes_descriptors=False, first_bytes=first_bytes) as link:
            try:
                peer = peer_of(sock)
            except OSError as error:
                log.warning("link closed", reason=f"its peer cannot be found out: {error}")
                return

            def greeted(hello: Hello) -> None:
                known = any(vgpu.broker == peer.process for vgpu in self._server.vgpus.values())
                if hello.role == "broker" and known:
                    link.admit_descriptors()  # its vGPU's pages

            try:
                if peer.uid not in {0, os.geteuid()}:
                    raise VgpuError(ErrorCode.NOT_YOURS, f"uid {peer.uid} has no business here")
                hello = await welcome(link, os.getpid(), greeted)
                if hello is None:
                    return
                if hello.role == "broker":
                    await self._server.brokers.converse(link, peer.process)
                elif hello.role == "server":
                    await self._server.gangs.converse(link)
                else:
                    await self._serve_requests(link)
            except LinkErrors as error:
                log.info("link closed", pid=peer.process.pid, uid=peer.uid, reason=_reason(error))
            except Exception:
                # Our own fault, but one link's: the GPU is still shared by everybody else.
                log.exception("link failed", pid=peer.process.pid, uid=peer.uid)

    async def _serve_requests(self, link: MessageStream) -> None:
        """What was asked for on this link and not confirmed goes with it."""
        creations, held = self._server.creations, Held()

        async def answer(forward: Forward) -> BaseModel:
            return await self._answer(forward, held)

        async def sent(forward: Forward) -> None:
            if isinstance(forward.request, Create) and not forward.request.request_id:
                for vgpu in held.vgpus:
                    await creations.confirm_delivered(vgpu)

        try:
            await serve(link, FORWARDS, answer, self._notices, sent, lambda f: isinstance(f.request, Create | Await))
        finally:
            creations.release(held)

    def _notices(self, forward: Forward) -> AsyncGenerator[Notice, None] | None:
        match forward.request:
            case Watch():
                return self._server.events.watch(forward.id)
            case Trace() as trace:
                return self._tracing.stream(forward.id, forward.uid, trace.duration_ns, work=trace.work)
            case _:
                return None

    async def _answer(self, forward: Forward, held: Held) -> BaseModel:
        server = self._server
        match forward.request:
            case Create() as create:
                return await self._create(create, forward, held)
            case Await(request_id=request_id):
                return await self._await(forward.uid, request_id)
            case Confirm(request_id=request_id):
                kept = await server.creations.confirm(forward.uid, request_id)
                return Confirmed(vgpu_id=kept.record.vgpu_id)
            case Set(vgpu=vgpu_id, changes=_) as change:
                return await self._set(self._owned(vgpu_id, forward.uid), change, forward.uid)
            case Remove(vgpu=vgpu_id, force=force):
                return await self._remove(self._owned(vgpu_id, forward.uid), forward.uid, force=force)
            case Suspend(vgpu=vgpu_id):
                vgpu = self._owned(vgpu_id, forward.uid)
                await server.suspension.suspend(vgpu)
                return self._reading(vgpu)
            case Resume(vgpu=vgpu_id):
                vgpu = self._owned(vgpu_id, forward.uid)
                await server.suspension.resume(vgpu)
                return self._reading(vgpu)
            case Migrate(vgpu=vgpu_id, gpu=gpu):
                return await server.migration.leave(self._owned(vgpu_id, forward.uid), int(gpu))
            case MigrateIn() as arriving:
                return await server.migration.arrive(arriving)
            case List():
                return VgpuList(vgpus=self._readings())
            case Inspect(vgpu=vgpu_id):
                return self._inspect(self._known(vgpu_id))
            case Processes(vgpu=vgpu_id):
                chosen = [self._known(vgpu_id)] if vgpu_id else list(server.vgpus.values())
                return ProcessList(processes=tuple(p for vgpu in chosen for p in self._processes(vgpu)))
            case Gpus():
                return GpuList(gpus=(self._gpu(self._readings()),))
            case SetGpu() as change:
                return await self._set_gpu(change, forward.uid)
            case Events():  # all it remembers: the node chooses
                return EventList(events=tuple(server.events.past))
            case GetSnapshot():
                return self._look()
            case GetMetrics():
                return self._meter()
            case _:
                raise VgpuError(ErrorCode.INVALID, f"{forward.request.op} is asked of the node, not of a GPU")

    # --- who may

    def _known(self, vgpu_id: str) -> Vgpu:
        vgpu = self._server.vgpus.get(vgpu_id)
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

    async def _create(self, create: Create, forward: Forward, held: Held) -> VgpuStatus:
        creations = self._server.creations
        share_gid = create.share_gid
        if create.spec.share_group is not None and share_gid < 0:  # a node of an older version leaves it to us
            share_gid = await self._groups.id_of(create.spec.share_group)
        owner = Owner(forward.uid, share_gid if create.spec.share_group is not None else -1)
        vgpu = await creations.create(create, owner, Process(*forward.asker), held)
        if create.wait:
            await creations.finished(vgpu)
        return self._reading(vgpu)

    async def _await(self, uid: int, request_id: str) -> VgpuStatus:
        creations = self._server.creations
        vgpu = await creations.asked_before(uid, request_id)
        if vgpu is None:
            raise VgpuError(ErrorCode.NOT_FOUND, f"no vGPU is made for request {request_id!r}", "ask again")
        await creations.finished(vgpu)
        return self._reading(vgpu)

    async def _set(self, vgpu: Vgpu, change: Set, uid: int) -> VgpuStatus:
        server = self._server
        if vgpu.passage.leaving is not None:
            raise away(vgpu)
        await server.memory.refresh()
        server.count_occupied(but=vgpu)
        before = vgpu.record
        record = server.registry.change(before.vgpu_id, change.changes, time.time_ns())
        if record.spec.name != before.spec.name:
            unlink_name(server.settings.paths, before.owner.uid, before.spec.name, before.vgpu_id)
            link_name(server.settings.paths, record.owner.uid, record.spec.name, record.vgpu_id)
        server.apply_shares()
        await server.swapping.make_room()
        if change.changes.idle_suspend_ns and not vgpu.dozing:
            await server.suspension.probe(vgpu)
        await server.brokers.changed(vgpu)
        written = await server.persist()
        text = f"{record.vgpu_id} changed by uid {uid}"
        server.record_event(EventType.CHANGED, vgpu, text, by_uid=uid, **summary(record.spec))
        if not written:
            raise unwritten(server, f"{record.vgpu_id} is changed")
        return self._reading(vgpu)

    async def _remove(self, vgpu: Vgpu, uid: int, *, force: bool) -> VgpuStatus:
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
            await self._server.migration.release(vgpu)
        except VgpuError:
            if not force:
                raise
        if not await self._server.remove(vgpu, EventType.REMOVED, f"{vgpu_id} removed by uid {uid}", by_uid=uid):
            raise unwritten(self._server, f"{vgpu_id} is removed")
        return last

    async def _set_gpu(self, change: SetGpu, uid: int) -> GpuStatus:
        server = self._server
        if uid not in {0, os.geteuid()}:
            raise VgpuError(
                ErrorCode.NOT_YOURS,
                f"only root or the node's own user may change a GPU, and you are uid {uid}",
                "sudo vgpuctl gpu set",
            )
        if change.mode is not None:  # the one that may be refused: first
            await self._set_mode(change.mode, uid)
        if change.period_ns is not None:
            server.set_period(change.period_ns)
        if change.window_ns is not None:
            server.set_window(change.window_ns)
        server.tokens.set_policy(server.policy)
        if not await server.persist():
            raise unwritten(server, f"GPU {server.facts.index} is changed")
        return self._gpu(self._readings())

    async def _set_mode(self, choice: ModeChoice, uid: int) -> None:
        """All or nothing: what can be refused is asked before MPS is touched, and again after."""
        server = self._server
        wanted = Mode.TEMPORAL if choice == "temporal" else Mode.SPATIAL
        if wanted is server.mode:
            server.mode_reason = "asked for"
            return
        async with server.mps.lifecycle_lock:
            self._check_mode(wanted)
            mode, reason = await trio.to_thread.run_sync(server.enter_mode, choice)
            try:
                self._check_mode(mode)  # somebody may have come meanwhile
            except VgpuError:
                back: ModeChoice = "spatial" if server.mode is Mode.SPATIAL else "temporal"
                await trio.to_thread.run_sync(server.enter_mode, back)
                raise
            server.registry.set_mode(mode)
            server.mode, server.mode_reason = mode, reason
            server.turns = Turns()
        shares = {record.key: record.share for record in server.registry}
        for vgpu in server.vgpus.values():
            vgpu.published_share = server.registry[vgpu.record.vgpu_id].share
        scheduler = make_scheduler(mode, server.policy, first_epoch=server.tokens.next_epoch)
        server.tokens.replace_scheduler(scheduler, shares)
        server.refresh_gangs()
        for vgpu in server.vgpus.values():
            vgpu.show(server.registry[vgpu.record.vgpu_id])
        for vgpu in list(server.vgpus.values()):
            await server.brokers.changed(vgpu)
        text = f"GPU {server.facts.index} is in {mode.value} mode: {reason}, by uid {uid}"
        server.record_event(EventType.MODE, None, text, by_uid=uid)

    def _check_mode(self, mode: Mode) -> None:
        server = self._server
        attached = server.attached_count
        if attached:
            several = counted(attached, "process")
            raise VgpuError(
                ErrorCode.IN_USE,
                f"GPU {server.facts.index} has {several} attached, and a process keeps its mode for life",
                "end them first: vgpuctl ps",
            )
        server.registry.in_mode(mode)

    # --- readings

    def _readings(self) -> tuple[VgpuStatus, ...]:
        server = self._server
        statements, now_ns = server.tokens.statements(), time.monotonic_ns()
        return tuple(self._read(vgpu, statements.get(vgpu.record.key), now_ns) for vgpu in server.vgpus.values())

    def _look(self) -> Snapshot:
        readings = self._readings()
        return Snapshot(at_unix_s=time.time(), gpus=(self._gpu(readings),), vgpus=readings)

    def _meter(self) -> MetricsSnapshot:
        server, index = self._server, self._server.facts.index
        snapshot, meters = self._look(), server.tokens.meters
        return MetricsSnapshot(
            snapshot=snapshot,
            processes=tuple(p for vgpu in server.vgpus.values() for p in self._processes(vgpu)),
            gpus=(
                GpuMeters(
                    gpu_index=index,
                    handovers=meters.handovers.histogram(),
                    loop_lag=meters.loop_lag.histogram(),
                ),
            ),
            vgpus=tuple(
                VgpuMeters(vgpu_id=vgpu.record.vgpu_id, gpu_index=index, waits=meters.waits(vgpu.record.key))
                for vgpu in server.vgpus.values()
                if not vgpu.removed.is_set()
            ),
        )

    def _reading(self, vgpu: Vgpu) -> VgpuStatus:
        return self._read(vgpu, self._server.tokens.statements().get(vgpu.record.key), time.monotonic_ns())

    def _read(self, vgpu: Vgpu, statement: AccountSnapshot | None, now_ns: int) -> VgpuStatus:
        """``statement`` None: the scheduler does not know it, now or for ever."""
        server = self._server
        if statement is None:
            book = vgpu.closed or server.tokens.benched(vgpu.record.key)
            assert book is not None
            statement = statement_of(vgpu.record, book)
        rates = server.window.rates(now_ns, statement)
        warnings = warnings_on(
            vgpu,
            server.registry,
            server.mps.reason,
            simulated=server.settings.simulated,
            least_context_bytes=server.memory.least_context_bytes,
        )
        return vgpu_reading(vgpu, server.place, statement, rates, now_ns, warnings)

    def _inspect(self, vgpu: Vgpu) -> VgpuDetail:
        server = self._server
        return VgpuDetail(
            vgpu=self._reading(vgpu),
            processes=tuple(self._processes(vgpu)),
            gpu=self._gpu(self._readings()),
            notes=notes_on(vgpu.record, server.mode),
            advice=advise(seen_of(vgpu, server.usage, server.mode, server.facts.index, server.turns)),
        )

    def _processes(self, vgpu: Vgpu) -> list[ProcessReading]:
        index, memory = self._server.facts.index, self._server.memory
        return [process_reading(vgpu, slot, index, memory) for slot in vgpu.slots]

    def _gpu(self, vgpus: tuple[VgpuStatus, ...]) -> GpuStatus:
        server = self._server
        rates = [Rates(v.tokens_per_second, v.held_ratio, v.busy_ratio) for v in vgpus]
        return GpuStatus(
            index=server.facts.index,
            uuid=server.facts.uuid,
            name=server.facts.name,
            simulated=server.settings.simulated,
            state="serving",
            mode="temporal" if server.mode is Mode.TEMPORAL else "spatial",
            mode_reason=server.mode_reason,
            period_ns=server.tokens.period_ns,
            sm_count=server.facts.sm_count,
            total_memory_bytes=server.facts.total_memory_bytes,
            used_memory_bytes=server.memory.latest.used_bytes,
            guaranteed_ratio=server.registry.guaranteed_ratio,
            guaranteed_memory_bytes=server.registry.guaranteed_memory_bytes,
            vgpus=len(vgpus),
            processes=sum(v.processes for v in vgpus),
            held_ratio=sum(r.held_ratio for r in rates),
            busy_ratio=sum(r.busy_ratio for r in rates),
            tokens_per_second=sum(r.tokens_per_second for r in rates),
            open_ended=any(v.open_ended for v in vgpus) and not any(r.tokens_per_second for r in rates),
            server_pid=os.getpid(),
            restarts=0,
            events_heard=server.tokens.events_heard,
            window_ns=server.policy.window_ns,
            mps_pid=server.mps.pid,
            mps_restarts=server.mps.restarts,
            mps_reason=server.mps.reason,
            outside=tuple(outside_process(one, server.facts.index) for one in server.memory.outside),
            host_memory_limit_bytes=server.swapping.stores.limit_bytes,
            host_memory_bytes=server.swapping.stores.ready_bytes,
            host_memory_used_bytes=server.swapping.stores.used_bytes,
            utilization_ratio=server.activity.utilization_ratio,
            memory_utilization_ratio=server.activity.memory_utilization_ratio,
            power_w=server.activity.power_w,
            temperature_c=server.activity.temperature_c,
            sm_clock_mhz=server.activity.sm_clock_mhz,
        )


def _reason(error: BaseException) -> str:
    return "a message that is not understood" if isinstance(error, ValidationError) else str(error) or repr(error)
