"""The requests that clients send to the node, and their answers.

The table of requests (``vgpu.protocol.requests``) names those that a GPU Server answers. The node passes them on. For
each other request this module has a handler.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Final

import trio
from pydantic import BaseModel

from vgpu.enums import PlacementName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.autoscaling import Autoscaling
from vgpu.node.database import NodeDatabase
from vgpu.node.feed import EventFeed
from vgpu.node.forwarding import Forwarder, not_served
from vgpu.node.readings import only
from vgpu.node.routing import find_gpu, find_vgpu, serving
from vgpu.node.servers import ServerProcess
from vgpu.node.survey import SILENT, StatusCollector
from vgpu.node.tenancy.admission import Admission, Client
from vgpu.node.tenancy.quotas import NodeQuotas
from vgpu.node.tenancy.reclaim import Reclaimer
from vgpu.node.usage import UsageKeeper
from vgpu.node.why import explained
from vgpu.paths import NodePaths
from vgpu.protocol.handlers import Handlers
from vgpu.protocol.hello import Hello
from vgpu.protocol.messages import (
    AnyRequest,
    Confirm,
    Confirmed,
    Create,
    EventList,
    EventReading,
    Events,
    Forward,
    GetMetrics,
    GetSnapshot,
    GpuList,
    Gpus,
    Inspect,
    List,
    MetricsSnapshot,
    Migrate,
    MigrateOutcome,
    NodeStatus,
    Notice,
    Processes,
    ProcessList,
    Remove,
    Resume,
    Set,
    Snapshot,
    Status,
    Suspend,
    Trace,
    VgpuDetail,
    VgpuList,
    VgpuStatus,
    Watch,
)
from vgpu.protocol.requests import TABLE, Entry, Route, entry_of
from vgpu.protocol.service import checked, open_link, software_version
from vgpu.protocol.tenancy import GetQueue, GetQuota, QueueList, QuotaReading, QuotasSet, SetQuotas
from vgpu.protocol.usage import Usage, UsageReport, Why, WhyReport
from vgpu.queueing.rules import DEFAULT_RULES, QueueRules

OWN: Final = tuple(entry for entry in TABLE if entry.route is Route.NODE and not entry.is_stream)
"""The requests that the node answers itself, but for streams."""


class NodeControl:
    """Answers any number of clients at once. ``processes``: the GPU Servers, by the index of the GPU."""

    def __init__(
        self,
        paths: NodePaths,
        processes: Mapping[int, ServerProcess],
        survey: StatusCollector,
        feed: EventFeed,
        usage: UsageKeeper,
        *,
        simulated: bool,
        placement: PlacementName = PlacementName.SPREAD,
        quotas: NodeQuotas,
        database: NodeDatabase,
        queue: QueueRules = DEFAULT_RULES,
    ) -> None:
        self._paths = paths
        self._processes = processes
        self._survey = survey
        self._feed = feed
        self._usage = usage
        self._simulated = simulated
        self._placement = placement
        self._quotas = quotas
        self._forwarder = Forwarder(processes, survey)
        self.autoscaling = Autoscaling(survey, self._carry_out, feed.publish)
        self._admission = Admission(
            self._forwarder,
            survey,
            quotas,
            placement,
            self.autoscaling,
            feed=feed,
            database=database,
            rules=queue,
        )
        self.queue = self._admission.queue
        self.reclaimer = Reclaimer(survey, self._forwarder, feed, quotas)
        self._started_ns = time.monotonic_ns()
        self._own = Handlers[Client](
            "node",
            OWN,
            {
                Create: self._create,
                Confirm: self._confirm,
                Migrate: self._migrate_named,
                List: self._list,
                Processes: self._list_processes,
                Gpus: self._list_gpus,
                Status: self._status,
                GetSnapshot: self._snapshot,
                GetMetrics: self._metrics,
                Events: self._past_events,
                GetQueue: self._list_queue,
                GetQuota: self._quota,
                SetQuotas: self._set_quotas,
                Usage: self._past_usage,
                Why: self._why,
            },
        )

    async def answer(self, request: AnyRequest, client: Client) -> BaseModel:
        entry = entry_of(request)
        if self._own.handles(request):
            return await self._own.answer(request, client)
        if entry.route is Route.VGPU:
            return await self._to_vgpu(request, client, entry)
        if entry.route is Route.GPU:
            gpu = find_gpu(entry.target(request), (await self._survey.snapshot()).gpus)
            return await self._forwarder.to_gpu(gpu.index, request, client.uid, entry.answer)
        raise VgpuError(ErrorCode.INVALID, f"{request.op} has no single answer")

    async def sent(self, request: AnyRequest, client: Client) -> None:
        """The answer has reached the client. A ``Create`` without a request id has no other confirmation."""
        if isinstance(request, Create) and not request.request_id and client.pending:
            await client.pending.popitem()[1].confirm()

    def notices(self, request: AnyRequest, client: Client) -> AsyncGenerator[Notice, None] | None:
        """The stream that answers the request; None: it has an answer."""
        match request:
            case Watch():
                return self._watch(request, client.uid)
            case Trace():
                return self._trace(request, client.uid)
            case _:
                return None

    async def _to_vgpu(self, request: AnyRequest, client: Client, entry: Entry) -> BaseModel:
        vgpu = await self._forwarder.find(entry.target(request), client.uid)
        answer: BaseModel
        if isinstance(request, Suspend):  # only the node preempts
            request = request.model_copy(update={"preempted": None})
        if isinstance(request, Resume):
            self.queue.check_resume(vgpu)
        if isinstance(request, Set):
            answer = await self._admission.change(request, vgpu, client.uid)
            if request.changes.scales:
                self.autoscaling.wake()
        else:
            answer = await self._forwarder.to_vgpu(vgpu, request, client.uid, entry.answer)
        if isinstance(answer, VgpuDetail):
            return answer.model_copy(update={"vgpu": self._remarked(answer.vgpu)})
        if isinstance(answer, VgpuStatus):
            (self._usage.hear_last if isinstance(request, Remove) else self._usage.hear)(answer)
        return answer

    async def _carry_out(self, vgpu: VgpuStatus, request: Set | Migrate) -> VgpuStatus:
        """What the node wants itself, as if the vGPU's owner had asked."""
        if isinstance(request, Migrate):
            return await self._migrate(vgpu, request.gpu, vgpu.owner_uid)
        return await self._admission.scale(request, vgpu)

    # --- changes

    async def _create(self, request: Create, client: Client) -> VgpuStatus:
        reading = await self._admission.create(request, client)
        if request.spec.scales:
            self.autoscaling.wake()
        return reading

    async def _confirm(self, request: Confirm, client: Client) -> Confirmed:
        return await self._admission.confirm(request, client)

    async def _migrate_named(self, request: Migrate, client: Client) -> VgpuStatus:
        return await self._migrate(await self._forwarder.find(request.vgpu, client.uid), request.gpu, client.uid)

    async def _migrate(self, vgpu: VgpuStatus, choice: str, uid: int) -> VgpuStatus:
        """First the vGPU becomes the other GPU's, then its programs are resumed there. That server also resumes them by
        itself. The request waits for it, and gets the result."""
        vgpu_id = vgpu.vgpu_id
        if choice.lower() == "auto":
            raise VgpuError(ErrorCode.INVALID, "a vGPU moves to a GPU that is named", "--gpu INDEX; vgpuctl gpu ls")
        gpu = serving(choice, (await self._survey.snapshot()).gpus)
        goes_on = vgpu.state == "moving"
        if gpu.index in self.queue.kept and not goes_on and gpu.index != vgpu.gpu_index:
            text = f"GPU {gpu.index} is kept for a request that has waited for long"
            raise VgpuError(ErrorCode.NO_ROOM, text, "choose another --gpu; vgpuctl queue")
        if gpu.index != vgpu.gpu_index:
            move = Migrate(vgpu=vgpu_id, gpu=str(gpu.index))
            try:
                goes_on = (await self._forwarder.to_gpu(vgpu.gpu_index, move, uid, MigrateOutcome)).goes_on
            except VgpuError as error:
                if error.code is ErrorCode.NOT_FOUND:  # it has changed its GPU since ``_find``, or is gone
                    return await self._migrate(await self._forwarder.find(vgpu_id, uid), choice, uid)
                hint = error.hint or f"asked again it goes on: vgpuctl migrate {vgpu_id} --gpu {gpu.index}"
                raise VgpuError(error.code, error.message, hint) from error
        elif not goes_on:
            hint = f"vgpuctl resume {vgpu_id} brings its programs back" if vgpu.state == "suspended" else ""
            raise VgpuError(ErrorCode.INVALID, f"{vgpu_id} is on GPU {gpu.index} already", hint)
        if not goes_on:
            return (await self._forwarder.to_gpu(gpu.index, Inspect(vgpu=vgpu_id), uid, VgpuDetail)).vgpu
        try:
            return await self._forwarder.to_gpu(gpu.index, Resume(vgpu=vgpu_id), uid, VgpuStatus)
        except VgpuError as error:
            text = f"{vgpu_id} is on GPU {gpu.index} now, and its programs are suspended: {error.message}"
            raise VgpuError(error.code, text, error.hint or f"vgpuctl resume {vgpu_id}") from error

    async def _set_quotas(self, request: SetQuotas, client: Client) -> QuotasSet:
        if client.uid not in {0, os.geteuid()}:
            text = f"only root or the node's own user may change quotas, and you are uid {client.uid}"
            raise VgpuError(ErrorCode.NOT_YOURS, text, "sudo vgpuctl config reload")
        self._quotas.quotas, self.queue.rules = request.quotas, request.queue
        return QuotasSet(sections=request.quotas.sections, over=await self._quotas.over(await self._survey.snapshot()))

    # --- readings

    async def _list_queue(self, _: GetQueue, __: Client) -> QueueList:
        return self.queue.reading()

    async def _quota(self, request: GetQuota, client: Client) -> QuotaReading:
        uid = client.uid if request.uid is None else request.uid
        if uid != client.uid and client.uid not in {0, os.geteuid()}:
            text = f"only root or the node's own user sees another user's quota, and you are uid {client.uid}"
            raise VgpuError(ErrorCode.NOT_YOURS, text, "vgpuctl quota shows your own")
        return self._quotas.reading(await self._quotas.allowance(uid), await self._survey.snapshot())

    async def _list(self, _: List, __: Client) -> VgpuList:
        return VgpuList(vgpus=(await self._snapshot_now()).vgpus)

    async def _list_processes(self, request: Processes, client: Client) -> ProcessList:
        if request.vgpu:
            vgpu = await self._forwarder.find(request.vgpu, client.uid)
            return await self._forwarder.to_vgpu(vgpu, Processes(vgpu=vgpu.vgpu_id), client.uid, ProcessList)
        return await self._survey.processes(client.uid)

    async def _list_gpus(self, _: Gpus, __: Client) -> GpuList:
        return GpuList(gpus=(await self._survey.snapshot()).gpus)

    async def _status(self, _: Status, __: Client) -> NodeStatus:
        snapshot = await self._survey.snapshot()
        return NodeStatus(
            software=software_version(),
            pid=os.getpid(),
            uptime_ns=time.monotonic_ns() - self._started_ns,
            simulated=self._simulated,
            runtime_dir=str(self._paths.runtime),
            state_dir=str(self._paths.state),
            gpus=snapshot.gpus,
            vgpus=len(snapshot.vgpus),
            processes=sum(vgpu.processes for vgpu in snapshot.vgpus),
            placement=self._placement,
        )

    async def _snapshot(self, _: GetSnapshot, __: Client) -> Snapshot:
        return await self._snapshot_now()

    async def _snapshot_now(self) -> Snapshot:
        """The state of all servers, with the node's own remarks."""
        snapshot = await self._survey.snapshot()
        return snapshot.model_copy(update={"vgpus": tuple(map(self._remarked, snapshot.vgpus))})

    def _remarked(self, vgpu: VgpuStatus) -> VgpuStatus:
        warning = self.reclaimer.warning(vgpu.vgpu_id)
        return vgpu.model_copy(update={"warnings": (*vgpu.warnings, warning)}) if warning else vgpu

    async def _metrics(self, _: GetMetrics, client: Client) -> MetricsSnapshot:
        of_the_node = {"users": self._usage.totals(client.uid), "waiting": len(self.queue)}
        return (await self._survey.meter(client.uid)).model_copy(update=of_the_node)

    async def _past_events(self, asked: Events, client: Client) -> EventList:
        history = self._feed.history
        vgpu_id = history.meant(asked.vgpu, (await self._survey.snapshot()).vgpus, client.uid) if asked.vgpu else ""
        return EventList(events=history.find(vgpu_id, asked.since_unix_s, asked.most, asked.kinds))

    async def _past_usage(self, asked: Usage, client: Client) -> UsageReport:
        return await self._usage.report(asked, client.uid)

    async def _why(self, asked: Why, client: Client) -> WhyReport:
        snapshot = await self._survey.snapshot()
        vgpu = find_vgpu(asked.vgpu, snapshot.vgpus, client.uid)
        if vgpu.state == "restarting":
            gpu = find_gpu(str(vgpu.gpu_index), snapshot.gpus)
            detail = VgpuDetail(vgpu=vgpu, processes=(), gpu=gpu, notes=())
        else:
            detail = await self._forwarder.to_vgpu(vgpu, Inspect(vgpu=vgpu.vgpu_id), client.uid, VgpuDetail)
        return await explained(detail, snapshot, self._usage, client.uid)

    # --- streams

    async def _watch(self, watch: Watch, uid: int) -> AsyncGenerator[Notice, None]:
        wanted = {(await self._forwarder.find(reference, uid)).vgpu_id for reference in watch.vgpus}
        sending, receiving = trio.open_memory_channel[EventReading](1024)
        if watch.events:
            self._feed.add(sending)
        try:
            due = trio.current_time()
            while True:
                if watch.snapshots and trio.current_time() >= due:
                    yield Notice(id=watch.id, snapshot=only(wanted, await self._snapshot_now()))
                    due = max(due + watch.interval_ns / 1e9, trio.current_time())
                event = None
                with trio.move_on_at(due if watch.snapshots else float("inf")):
                    event = await receiving.receive()
                # Outside of the scope, because its end would cancel the task that sends what was yielded.
                if event is not None and (not wanted or event.vgpu_id in wanted):
                    yield Notice(id=watch.id, event=event)
        finally:
            self._feed.discard(sending)

    async def _trace(self, trace: Trace, uid: int) -> AsyncGenerator[Notice, None]:
        """Pass on what one server records. If this generator is closed early, it ends the link, and the server drops
        the recording."""
        gpu = find_gpu(trace.gpu, (await self._survey.snapshot()).gpus)
        process = self._processes[gpu.index]
        if not process.serving:
            raise not_served(gpu.index, process.reason or SILENT)
        link, _ = await open_link(process.socket, Hello())
        async with link:
            await link.send(Forward(id=trace.id, uid=uid, request=trace).said_to(1))
            while (received := await link.receive()) is not None:
                if "ok" in received[0]:
                    checked(received)
                yield Notice.model_validate(received[0])
