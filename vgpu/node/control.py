"""The requests that clients send to the node, and their answers.

The table of requests (``vgpu.protocol.requests``) names those that a GPU Server answers. The node passes them on. For
each other request this module has a handler.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

import trio
from pydantic import BaseModel

from vgpu.enums import PlacementName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.groups import Groups
from vgpu.identity import Peer, Process
from vgpu.node.autoscaling import Autoscaling
from vgpu.node.creation import Creation
from vgpu.node.feed import EventFeed
from vgpu.node.forwarding import Forwarder, not_served
from vgpu.node.readings import only
from vgpu.node.routing import candidates, find_gpu, serving
from vgpu.node.servers import ServerProcess
from vgpu.node.survey import SILENT, StatusCollector
from vgpu.paths import NodePaths
from vgpu.placement.box import request as room_for
from vgpu.placement.box import scarcer
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
    Resume,
    Set,
    Snapshot,
    Status,
    Trace,
    VgpuDetail,
    VgpuList,
    VgpuStatus,
    Watch,
)
from vgpu.protocol.requests import TABLE, Entry, Route, entry_of
from vgpu.protocol.service import checked, open_link, software_version
from vgpu.share import PPM

OWN: Final = tuple(entry for entry in TABLE if entry.route is Route.NODE and not entry.is_stream)
"""The requests that the node answers itself, but for streams."""


@dataclass(slots=True)
class Client:
    """The other end of one link. ``pending``: its creations that it has not confirmed, by request id."""

    peer: Peer
    pending: dict[str, Creation] = field(default_factory=dict)

    @property
    def uid(self) -> int:
        return self.peer.uid

    def close(self) -> None:
        """The link has ended: the node removes what it has not confirmed."""
        for creation in self.pending.values():
            creation.close()


class NodeControl:
    """Answers any number of clients at once. ``processes``: the GPU Servers, by the index of the GPU."""

    def __init__(
        self,
        paths: NodePaths,
        processes: Mapping[int, ServerProcess],
        survey: StatusCollector,
        feed: EventFeed,
        *,
        simulated: bool,
        placement: PlacementName = PlacementName.SPREAD,
    ) -> None:
        self._paths = paths
        self._processes = processes
        self._survey = survey
        self._feed = feed
        self._simulated = simulated
        self._placement = placement
        self._forwarder = Forwarder(processes, survey)
        self.autoscaling = Autoscaling(survey, self._carry_out, feed.publish)
        self._started_ns = time.monotonic_ns()
        self._creating = trio.Lock()
        self._groups = Groups()
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
        if isinstance(request, Set) and request.changes.name is not None:
            await self._refuse_taken_name(request.changes.name, vgpu.owner_uid, but=vgpu.vgpu_id)
        answer = await self._forwarder.to_vgpu(vgpu, request, client.uid, entry.answer)
        if isinstance(request, Set) and request.changes.scales:
            self.autoscaling.wake()
        return answer

    async def _carry_out(self, vgpu: VgpuStatus, request: Set | Migrate) -> VgpuStatus:
        """What the node wants itself, as if the vGPU's owner had asked."""
        if isinstance(request, Migrate):
            return await self._migrate(vgpu, request.gpu, vgpu.owner_uid)
        return await self._forwarder.to_vgpu(vgpu, request, vgpu.owner_uid, VgpuStatus)

    # --- changes

    async def _create(self, request: Create, client: Client) -> VgpuStatus:
        """Create it on the first GPU that takes it. If none does, raise the refusal of the one with most room.
        Admissions run one after the other, so that no name is given twice. What follows runs in parallel."""
        group = request.spec.share_group
        # Before the lock: while the name service is slow, others make vGPUs.
        share_gid = -1 if group is None else await self._groups.id_of(group)
        request_id = request.request_id or uuid4().hex
        owner_uid = _owner_of(request, client.uid)
        exact = request.model_copy(
            update={"request_id": request_id, "wait": False, "share_gid": share_gid, "owner_uid": None}
        )
        creation: Creation | None = None
        try:
            async with self._creating:
                creation = await self._admit(exact, owner_uid, client.peer.process)
            reading = await creation.finish()
        except BaseException:
            if creation is not None:
                creation.close()
            raise
        if request_id in client.pending:  # asked again on the same link
            client.pending[request_id].close()
        client.pending[request_id] = creation
        if request.spec.scales:
            self.autoscaling.wake()
        return reading

    async def _admit(self, request: Create, owner_uid: int, asker: Process) -> Creation:
        snapshot = await self._survey.snapshot()
        gpus = [vgpu.gpu_index for vgpu in snapshot.vgpus if _answers(vgpu, request, owner_uid)]
        if not gpus:
            if request.spec.name is not None:
                await self._refuse_taken_name(request.spec.name, owner_uid)
            found = candidates(request.gpu, snapshot.gpus, snapshot.vgpus, request.spec, self._placement)
            gpus = [gpu.index for gpu in found]
        refusals = []
        for index in gpus:
            begun = await self._begin(index, request, owner_uid, asker)
            if isinstance(begun, Creation):
                return begun
            refusals.append(begun)
        for gpu in (gpu for index in gpus for gpu in snapshot.gpus if gpu.index == index):
            wanted = room_for(request.spec, gpu)
            if await self.autoscaling.make_room(gpu.index, wanted.time_ppm / PPM * 100, wanted.memory_bytes):
                begun = await self._begin(gpu.index, request, owner_uid, asker)
                if isinstance(begun, Creation):
                    return begun
        room = {gpu.index: scarcer(gpu) for gpu in snapshot.gpus}
        emptiest = max(gpus, key=lambda index: room.get(index, 0.0))
        refusal = refusals[gpus.index(emptiest)]
        where = f"GPU {emptiest}" if len(gpus) == 1 else f"none of {len(gpus)} GPUs; GPU {emptiest}, the emptiest"
        raise VgpuError(refusal.code, f"{where}: {refusal.message}", refusal.hint)

    async def _begin(self, index: int, request: Create, owner_uid: int, asker: Process) -> Creation | VgpuError:
        """A creation that the GPU admits, or why it does not fit there."""
        creation = Creation(await self._forwarder.served(index), request, owner_uid, asker)
        try:
            await creation.begin()
        except BaseException as error:
            creation.close()
            if isinstance(error, VgpuError) and error.code in {ErrorCode.NO_ROOM, ErrorCode.MODE}:
                return error
            raise
        return creation

    async def _confirm(self, request: Confirm, client: Client) -> Confirmed:
        request_id, uid = request.request_id, client.uid
        creation = client.pending.pop(request_id, None)
        if creation is not None:
            try:
                return await creation.confirm()
            finally:
                creation.close()
        for vgpu in (await self._survey.snapshot()).vgpus:  # confirmed before, perhaps, and the answer was lost
            if _was_made_for(vgpu, request_id, vgpu.owner_uid if uid == 0 else uid):
                return await self._forwarder.to_gpu(vgpu.gpu_index, request, vgpu.owner_uid, Confirmed)
        raise VgpuError(ErrorCode.NOT_FOUND, f"no vGPU was made for request {request_id!r}", "ask again")

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

    async def _refuse_taken_name(self, name: str, owner_uid: int, but: str = "") -> None:
        """Names are unique per owner. Another owner may use the same name."""
        for vgpu in (await self._survey.snapshot()).vgpus:
            if vgpu.name == name and vgpu.owner_uid == owner_uid and vgpu.vgpu_id != but:
                hint = f"choose another --name; vgpuctl rm {name} removes that one"
                raise VgpuError(ErrorCode.EXISTS, f"{vgpu.vgpu_id} has the name {name!r} already", hint)

    # --- readings

    async def _list(self, _: List, __: Client) -> VgpuList:
        return VgpuList(vgpus=(await self._survey.snapshot()).vgpus)

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
        )

    async def _snapshot(self, _: GetSnapshot, __: Client) -> Snapshot:
        return await self._survey.snapshot()

    async def _metrics(self, _: GetMetrics, client: Client) -> MetricsSnapshot:
        return await self._survey.meter(client.uid)

    async def _past_events(self, asked: Events, client: Client) -> EventList:
        history = self._feed.history
        vgpu_id = history.meant(asked.vgpu, (await self._survey.snapshot()).vgpus, client.uid) if asked.vgpu else ""
        return EventList(events=history.find(vgpu_id, asked.since_unix_s, asked.most, asked.kinds))

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
                    yield Notice(id=watch.id, snapshot=only(wanted, await self._survey.snapshot()))
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


def _owner_of(request: Create, uid: int) -> int:
    """Whose vGPU user ``uid`` asks for. ``VgpuError`` (not-yours): only root may name another user, and only at root's
    node, because the vGPU's socket must belong to that user."""
    if request.owner_uid is None or request.owner_uid == uid:
        return uid
    if uid != 0:
        text = f"--owner: only root makes vGPUs for other users, and you are uid {uid}"
        raise VgpuError(ErrorCode.NOT_YOURS, text, "leave out --owner; the vGPU will be yours")
    if os.geteuid() != 0:
        text = f"--owner: this node runs as uid {os.geteuid()}, and only root's node serves other users"
        raise VgpuError(ErrorCode.NOT_YOURS, text, "sudo vgpuctl serve --detach")
    return request.owner_uid


def _answers(vgpu: VgpuStatus, request: Create, uid: int) -> bool:
    """Whether ``vgpu`` was made for this request, or for the same claim, of this user."""
    same_claim = request.claim is not None and vgpu.owner_uid == uid and request.claim.is_same(vgpu.claim)
    return same_claim or _was_made_for(vgpu, request.request_id, uid)


def _was_made_for(vgpu: VgpuStatus, request_id: str, uid: int) -> bool:
    return bool(request_id) and (vgpu.request_id, vgpu.owner_uid) == (request_id, uid)
