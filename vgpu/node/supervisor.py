"""The node: supervises the GPU Servers, and answers on the control socket what concerns the whole machine.

The node decides nothing about a GPU. It passes a request to the server that owns the GPU, with the uid of the peer from
the kernel.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final
from uuid import uuid4

import trio
from pydantic import BaseModel, ValidationError

from vgpu.errors import ErrorCode, VgpuError
from vgpu.groups import Groups
from vgpu.identity import Peer
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.loggers import get_logger
from vgpu.node.creation import Creation
from vgpu.node.events import EventFile, EventLog, History, server_restarted
from vgpu.node.logfiles import keep_small
from vgpu.node.readings import only
from vgpu.node.routing import candidates, find_gpu, find_vgpu
from vgpu.node.servers import ServerProcess, Servers
from vgpu.node.service import tell_service_manager
from vgpu.node.sources import Places, Source, read_owners
from vgpu.node.survey import SILENT, StatusCollector
from vgpu.openfiles import is_kept
from vgpu.pacing import Pace, and_more
from vgpu.paths import NodePaths, unusable
from vgpu.process_tuning import keep_all
from vgpu.protocol.codec import MAX_REQUEST_BYTES, MAX_REQUEST_ITEMS
from vgpu.protocol.hello import Hello
from vgpu.protocol.messages import (
    REQUESTS,
    AnyRequest,
    Confirm,
    Confirmed,
    Create,
    EventList,
    EventReading,
    Events,
    Failure,
    Forward,
    GetMetrics,
    GetSnapshot,
    GpuList,
    Gpus,
    GpuStatus,
    Inspect,
    List,
    Migrate,
    MigrateOutcome,
    NodeStatus,
    Notice,
    Processes,
    ProcessList,
    Remove,
    Resume,
    Set,
    SetGpu,
    Snapshot,
    Status,
    Suspend,
    Trace,
    VgpuDetail,
    VgpuList,
    VgpuStatus,
    Watch,
)
from vgpu.protocol.peer import peer_of
from vgpu.protocol.service import AnyModel, ask, checked, open_link, serve, software_version, welcome
from vgpu.protocol.stream import LAST_DESCRIPTORS, MessageStream, check_length, listen, serve_links, until_replaced
from vgpu.spec import explain
from vgpu.trust import replaceable_part

log = get_logger(__name__)

ANSWER_S: Final = 5.0
CHANGE_S: Final = 60.0
"""The only time-out of a change. The node applies it, and a client waits for as long as the node is there."""
SUSPEND_S: Final = 600.0
"""As long as the driver takes to copy the memory of a whole card, and the host to find room for it."""
LOOK_AGAIN_S: Final = 0.05
RESTART_S: Final = 8.0
"""How long a request waits for a server that restarts. A restart takes half a second, and seconds on a busy machine."""
COMPLAINT_S: Final = 1.0
OWNERS_S: Final = 60.0
"""Between two readings of /etc/subuid."""


class Node:
    """``run`` until SIGTERM or SIGINT; then the servers stop too. ``idle_ns``: also after so long without a vGPU."""

    def __init__(
        self,
        paths: NodePaths,
        servers: Servers,
        gpus: Iterable[int],
        *,
        simulated: bool,
        limits: Limits = DEFAULT_LIMITS,
        idle_ns: int | None = None,
    ) -> None:
        self._paths = paths
        self._idle_s = None if idle_ns is None else idle_ns / 1e9
        self._servers = servers
        self._simulated = simulated
        self._limits = limits
        self._started_ns = time.monotonic_ns()
        self._creating = trio.Lock()
        self._groups = Groups()
        self._closed: Pace[Source] = Pace(COMPLAINT_S)
        self._places = Places(limits, frozenset({0, os.geteuid()}))
        self._stopping = False
        self._used_at = 0.0
        self._asking: set[MessageStream] = set()
        """Links that may still ask for a vGPU: all but those of watchers."""
        self._watchers: set[trio.MemorySendChannel[EventReading]] = set()
        history = History(limits.events_kept, limits.peer_events_kept, limits.events_kept_per_user)
        self._events = EventLog(EventFile(paths.events), history, EventFile(paths.program_events))
        self._processes = {
            index: ServerProcess(index, paths.server_socket(index), paths.server_log(index)) for index in gpus
        }
        self._survey = StatusCollector(self._processes, simulated=simulated)

    async def run(self) -> None:
        await trio.to_thread.run_sync(self._events.restore)
        try:
            await self._run()
        finally:
            self._events.flush()

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._events.write)
            nursery.start_soon(self._know_owners)
            nursery.start_soon(self._survey.run)
            nursery.start_soon(keep_small, [self._paths.node_log, *(p.log_path for p in self._processes.values())])
            for process in self._processes.values():
                nursery.start_soon(self._servers.keep, process, partial(self._hear, process), self._ended)
            nursery.start_soon(self._end_on_signal, nursery.cancel_scope)
            for process in self._processes.values():
                await process.settled.wait()
            # Every user may connect to root's node. The node checks each request against the peer's uid.
            listener = listen(self._paths.control_socket, mode=0o666 if os.geteuid() == 0 else 0o600)
            keep_all()
            nursery.start_soon(self._end_when_replaced, nursery.cancel_scope)
            tell_service_manager("READY=1")
            if os.geteuid() == 0 and (closed := closed_to_others(self._paths.runtime)):
                log.warning("other users cannot reach this node", closed=str(closed[0]), hint=f"chmod o+x {closed[0]}")
            log.info("node serves", control=str(self._paths.control_socket), gpus=len(self._processes))
            async with trio.open_nursery() as serving:
                if self._idle_s is not None:
                    nursery.start_soon(self._end_when_idle, self._idle_s, nursery.cancel_scope, serving.cancel_scope)
                serving.start_soon(partial(serve_links, listener, self._converse, _complain, most=self._limits.links))

    async def _end_on_signal(self, scope: trio.CancelScope) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                self._stopping = True
                tell_service_manager("STOPPING=1")
                self._paths.control_socket.unlink(missing_ok=True)
                await self._servers.stop(self._processes.values())
                scope.cancel()

    async def _end_when_idle(self, idle_s: float, scope: trio.CancelScope, serving: trio.CancelScope) -> None:
        """End after ``idle_s`` without a vGPU. Every link closes before any server stops. So a client has its vGPU, or
        it finds that its link ended before it asked."""
        self._used_at = trio.current_time()
        while True:
            await trio.sleep(min(1.0, idle_s / 4))
            looked_at = trio.current_time()
            if (await self._survey.snapshot()).vgpus:
                self._used_at = trio.current_time()
            # No checkpoint from here until the links are closed.
            if self._asking or self._stopping or looked_at < self._used_at + idle_s:
                continue
            self._stopping = True
            self._paths.control_socket.unlink(missing_ok=True)
            serving.cancel()
            log.info("the node ends: it had no vGPU", seconds=idle_s)
            await self._servers.stop(self._processes.values())
            scope.cancel()
            return

    async def _end_when_replaced(self, scope: trio.CancelScope) -> None:
        """End when the socket is gone. Reason: a node that no client reaches would otherwise go on to restart servers,
        beside those of the next node."""
        await until_replaced(self._paths.control_socket)
        if self._stopping:
            return
        self._stopping = True
        log.error("the node's socket was removed or replaced: it ends", control=str(self._paths.control_socket))
        tell_service_manager("STOPPING=1")
        await self._servers.stop(self._processes.values())
        scope.cancel()

    # --- links

    async def _know_owners(self) -> None:
        """The owners of subordinate uids, as the machine's files have them."""
        while True:
            self._places.owners = await trio.to_thread.run_sync(read_owners)
            await trio.sleep(OWNERS_S)

    async def _converse(self, sock: trio.socket.SocketType) -> None:
        async with MessageStream(
            sock,
            MAX_REQUEST_BYTES,
            takes_descriptors=False,
            first_bytes=self._limits.first_message_bytes,
            most_items=MAX_REQUEST_ITEMS,
        ) as link:
            try:
                peer = peer_of(sock)
            except OSError as error:
                log.warning("link closed", reason=f"its peer cannot be found out: {error}")
                return
            try:
                await self._converse_with(peer, link)
            except ValidationError as error:
                self._note_closed(peer, explain(error))
            except (OSError, VgpuError, trio.ClosedResourceError) as error:
                self._note_closed(peer, str(error))
            except Exception:
                log.exception("link failed", pid=peer.process.pid, uid=peer.uid)

    def _note_closed(self, peer: Peer, reason: str) -> None:
        missed = self._closed.due(self._places.owners.source_of(peer.uid), time.monotonic())
        if missed is not None:
            log.info("link closed", pid=peer.process.pid, uid=peer.uid, reason=reason + and_more(missed))

    async def _converse_with(self, peer: Peer, link: MessageStream) -> None:
        pending: dict[str, Creation] = {}

        async def answer(request: AnyRequest) -> BaseModel:
            if isinstance(request, Create):
                return await self._create(request, peer, pending)
            if isinstance(request, Confirm):
                return await self._confirm(request.request_id, peer.uid, pending)
            return await self._answer(request, peer.uid)

        async def sent(request: AnyRequest) -> None:
            if isinstance(request, Create | Confirm | Remove):
                self._used_at = trio.current_time()
            if isinstance(request, Create) and not request.request_id and pending:
                await pending.popitem()[1].confirm()

        kept = LAST_DESCRIPTORS if peer.uid in self._places.exempt else self._limits.descriptors_kept
        try:
            if is_kept(link.socket.fileno(), kept):
                raise VgpuError(ErrorCode.UNAVAILABLE, "this node has no descriptors left for links", "try again later")
            place = self._places.enter(peer.uid)
        except VgpuError as full:
            failure = Failure(id=0, code=full.code, error=full.message, hint=full.hint)
            await link.send(failure.model_dump(mode="json"))
            return
        try:
            self._asking.add(link)
            if await welcome(link, os.getpid()) is not None:
                await serve(link, REQUESTS, answer, partial(self._notices, uid=peer.uid, link=link), sent, _is_creation)
        finally:
            self._asking.discard(link)
            for creation in pending.values():
                creation.close()
            self._places.leave(place)

    def _notices(self, request: AnyRequest, uid: int, link: MessageStream) -> AsyncGenerator[Notice, None] | None:
        match request:
            case Watch():
                self._asking.discard(link)
                return self._watch(request, uid)
            case Trace():
                return self._trace(request, uid)
            case _:
                return None

    # --- answers

    async def _answer(self, request: AnyRequest, uid: int) -> BaseModel:
        match request:
            case Set(vgpu=reference) | Remove(vgpu=reference) | Inspect(vgpu=reference):
                vgpu = await self._find(reference, uid)
                model = VgpuDetail if isinstance(request, Inspect) else VgpuStatus
                if isinstance(request, Set) and request.changes.name is not None:
                    await self._refuse_taken_name(request.changes.name, vgpu.owner_uid, but=vgpu.vgpu_id)
                return await self._forward_to(vgpu, request, uid, model, CHANGE_S)
            case Suspend(vgpu=reference) | Resume(vgpu=reference):
                vgpu = await self._find(reference, uid)
                return await self._forward_to(vgpu, request, uid, VgpuStatus, SUSPEND_S)
            case Migrate(vgpu=reference, gpu=choice):
                return await self._migrate(await self._find(reference, uid), choice, uid)
            case List():
                return VgpuList(vgpus=(await self._survey.snapshot()).vgpus)
            case Processes(vgpu=reference):
                return await self._list_processes(reference, uid)
            case Gpus():
                return GpuList(gpus=(await self._survey.snapshot()).gpus)
            case SetGpu(gpu=choice):
                gpu = find_gpu(choice, (await self._survey.snapshot()).gpus)
                return await self._forward(gpu.index, request, uid, GpuStatus, CHANGE_S)
            case Status():
                return self._status(await self._survey.snapshot())
            case GetSnapshot():
                return await self._survey.snapshot()
            case GetMetrics():
                return await self._survey.meter(uid)
            case Events():
                return await self._what_happened(request, uid)
            case _:
                raise VgpuError(ErrorCode.INVALID, f"{request.op} has no single answer")

    async def _create(self, request: Create, peer: Peer, pending: dict[str, Creation]) -> VgpuStatus:
        """Create it on the first GPU that takes it. If none does, raise the refusal of the GPU with the most room.
        Admissions run one after the other, so that no name is given twice. What follows runs in parallel."""
        group = request.spec.share_group
        # Before the lock: while the name service is slow, others make vGPUs.
        share_gid = -1 if group is None else await self._groups.id_of(group)
        request_id = request.request_id or uuid4().hex
        exact = request.model_copy(update={"request_id": request_id, "wait": False, "share_gid": share_gid})
        creation: Creation | None = None
        try:
            async with self._creating:
                creation = await self._admit(exact, peer)
            reading = await creation.finish()
        except BaseException:
            if creation is not None:
                creation.close()
            raise
        if request_id in pending:  # asked again on the same link
            pending[request_id].close()
        pending[request_id] = creation
        return reading

    async def _admit(self, request: Create, peer: Peer) -> Creation:
        snapshot = await self._survey.snapshot()
        gpus = [vgpu.gpu_index for vgpu in snapshot.vgpus if _answers(vgpu, request.request_id, peer.uid)]
        if not gpus:
            if request.spec.name is not None:
                await self._refuse_taken_name(request.spec.name, peer.uid)
            gpus = [gpu.index for gpu in candidates(request.gpu, snapshot.gpus)]
        refusals = []
        for index in gpus:
            creation = Creation(await self._served(index), request, peer.uid, peer.process)
            try:
                await creation.begin()
            except VgpuError as error:
                creation.close()
                if error.code not in {ErrorCode.NO_ROOM, ErrorCode.MODE}:
                    raise
                refusals.append(error)
            except BaseException:
                creation.close()
                raise
            else:
                return creation
        first = refusals[0]
        where = f"GPU {gpus[0]}" if len(gpus) == 1 else f"none of {len(gpus)} GPUs; GPU {gpus[0]}, the emptiest"
        raise VgpuError(first.code, f"{where}: {first.message}", first.hint)

    async def _confirm(self, request_id: str, uid: int, pending: dict[str, Creation]) -> Confirmed:
        creation = pending.pop(request_id, None)
        if creation is not None:
            try:
                return await creation.confirm()
            finally:
                creation.close()
        for vgpu in (await self._survey.snapshot()).vgpus:  # confirmed before, perhaps, and the answer was lost
            if _answers(vgpu, request_id, uid):
                return await self._forward(vgpu.gpu_index, Confirm(request_id=request_id), uid, Confirmed, CHANGE_S)
        raise VgpuError(ErrorCode.NOT_FOUND, f"no vGPU was made for request {request_id!r}", "ask again")

    async def _migrate(self, vgpu: VgpuStatus, choice: str, uid: int) -> VgpuStatus:
        """First the vGPU becomes the other GPU's, then its programs are resumed there. That server also resumes them by
        itself. The request waits for it, and gets the result."""
        vgpu_id = vgpu.vgpu_id
        if choice.lower() == "auto":
            raise VgpuError(ErrorCode.INVALID, "a vGPU moves to a GPU that is named", "--gpu INDEX; vgpuctl gpu ls")
        [gpu] = candidates(choice, (await self._survey.snapshot()).gpus)
        goes_on = vgpu.state == "moving"
        if gpu.index != vgpu.gpu_index:
            move = Migrate(vgpu=vgpu_id, gpu=str(gpu.index))
            try:
                goes_on = (await self._forward(vgpu.gpu_index, move, uid, MigrateOutcome, SUSPEND_S)).goes_on
            except VgpuError as error:
                if error.code is ErrorCode.NOT_FOUND:  # it has changed its GPU since ``_find``, or is gone
                    return await self._migrate(await self._find(vgpu_id, uid), choice, uid)
                hint = error.hint or f"asked again it goes on: vgpuctl migrate {vgpu_id} --gpu {gpu.index}"
                raise VgpuError(error.code, error.message, hint) from error
        elif not goes_on:
            hint = f"vgpuctl resume {vgpu_id} brings its programs back" if vgpu.state == "suspended" else ""
            raise VgpuError(ErrorCode.INVALID, f"{vgpu_id} is on GPU {gpu.index} already", hint)
        if not goes_on:
            return (await self._forward(gpu.index, Inspect(vgpu=vgpu_id), uid, VgpuDetail, ANSWER_S)).vgpu
        try:
            return await self._forward(gpu.index, Resume(vgpu=vgpu_id), uid, VgpuStatus, SUSPEND_S)
        except VgpuError as error:
            text = f"{vgpu_id} is on GPU {gpu.index} now, and its programs are suspended: {error.message}"
            raise VgpuError(error.code, text, error.hint or f"vgpuctl resume {vgpu_id}") from error

    async def _refuse_taken_name(self, name: str, owner_uid: int, but: str = "") -> None:
        """Names are unique per owner. Another owner may use the same name."""
        for vgpu in (await self._survey.snapshot()).vgpus:
            if vgpu.name == name and vgpu.owner_uid == owner_uid and vgpu.vgpu_id != but:
                hint = f"choose another --name; vgpuctl rm {name} removes that one"
                raise VgpuError(ErrorCode.EXISTS, f"{vgpu.vgpu_id} has the name {name!r} already", hint)

    async def _find(self, reference: str, uid: int) -> VgpuStatus:
        """The vGPU that ``uid`` means. While a server restarts, its last report may lack vGPUs, so the node waits for
        the server."""
        deadline = trio.current_time() + RESTART_S
        while True:
            snapshot = await self._survey.snapshot()
            away = {gpu.index: gpu.reason for gpu in snapshot.gpus if gpu.state == "restarting"}
            try:
                vgpu = find_vgpu(reference, snapshot.vgpus, uid)
                if vgpu.gpu_index not in away:
                    return vgpu
            except VgpuError as error:
                if error.code is not ErrorCode.NOT_FOUND or not away:
                    raise
            if trio.current_time() > deadline:
                index, reason = next(iter(away.items()))
                raise _not_served(index, reason)
            await trio.sleep(LOOK_AGAIN_S)

    async def _list_processes(self, reference: str, uid: int) -> ProcessList:
        if reference:
            vgpu = await self._find(reference, uid)
            return await self._forward_to(vgpu, Processes(vgpu=vgpu.vgpu_id), uid, ProcessList, ANSWER_S)
        return await self._survey.processes(uid)

    async def _forward_to(
        self, vgpu: VgpuStatus, request: AnyRequest, uid: int, model: type[AnyModel], limit_s: float
    ) -> AnyModel:
        """Forward to the server of the GPU that has the vGPU. If the vGPU has moved meanwhile, forward to the server
        that has it now."""
        exact = request.model_copy(update={"vgpu": vgpu.vgpu_id})
        while True:
            try:
                return await self._forward(vgpu.gpu_index, exact, uid, model, limit_s)
            except VgpuError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
                now = await self._find(vgpu.vgpu_id, uid)
                if now.gpu_index == vgpu.gpu_index:
                    raise
                vgpu = now

    async def _forward(
        self, index: int, request: AnyRequest, uid: int, model: type[AnyModel], limit_s: float
    ) -> AnyModel:
        process = await self._served(index)
        return await ask(process.socket, Forward(uid=uid, request=request), model, limit_s)

    async def _served(self, index: int) -> ServerProcess:
        process = self._processes[index]
        with trio.move_on_after(RESTART_S):
            await process.up.wait()
        if not process.serving:
            raise _not_served(index, process.reason)
        return process

    def _status(self, snapshot: Snapshot) -> NodeStatus:
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

    # --- streams

    async def _hear(self, process: ServerProcess, link: MessageStream) -> None:
        """Pass on one server's events, until its link ends. The past events come first, because no node received them
        while there was none."""
        await link.send(Forward(uid=os.geteuid(), request=Watch(snapshots=False, events=True)).said_to(1))
        with suppress(VgpuError):  # a server of an older version keeps no events
            past = await ask(process.socket, Forward(uid=os.geteuid(), request=Events()), EventList, ANSWER_S)
            for event in past.events:
                if not self._events.history.is_past(event):
                    self._tell(event)
        while (received := await link.receive()) is not None:
            event_now = Notice.model_validate(received[0]).event
            if event_now is not None:
                self._tell(event_now)

    def _ended(self, process: ServerProcess, pid: int) -> None:
        self._tell(server_restarted(process.index, pid, process.restarts, time.time()))

    def _tell(self, event: EventReading) -> None:
        """Keep ``event``, and send it to every watcher, without a checkpoint in between. So a client that first watches
        and then asks for past events misses none."""
        if not self._events.tell(event):
            return
        for channel in list(self._watchers):
            with suppress(trio.WouldBlock, trio.BrokenResourceError):  # a watcher that does not keep up misses some
                channel.send_nowait(event)

    async def _what_happened(self, asked: Events, uid: int) -> EventList:
        history = self._events.history
        vgpu_id = history.meant(asked.vgpu, (await self._survey.snapshot()).vgpus, uid) if asked.vgpu else ""
        return EventList(events=history.find(vgpu_id, asked.since_unix_s, asked.most, asked.kinds))

    async def _watch(self, watch: Watch, uid: int) -> AsyncGenerator[Notice, None]:
        wanted = {(await self._find(reference, uid)).vgpu_id for reference in watch.vgpus}
        sending, receiving = trio.open_memory_channel[EventReading](1024)
        if watch.events:
            self._watchers.add(sending)
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
            self._watchers.discard(sending)

    async def _trace(self, trace: Trace, uid: int) -> AsyncGenerator[Notice, None]:
        """Pass on what one server records. If this generator is closed early, it ends the link, and the server drops
        the recording."""
        gpu = find_gpu(trace.gpu, (await self._survey.snapshot()).gpus)
        process = self._processes[gpu.index]
        if not process.serving:
            raise _not_served(gpu.index, process.reason or SILENT)
        link, _ = await open_link(process.socket, Hello())
        async with link:
            await link.send(Forward(id=trace.id, uid=uid, request=trace).said_to(1))
            while (received := await link.receive()) is not None:
                if "ok" in received[0]:
                    checked(received)
                yield Notice.model_validate(received[0])


def _answers(vgpu: VgpuStatus, request_id: str, uid: int) -> bool:
    """Whether ``vgpu`` was made for this request of this user."""
    return bool(request_id) and (vgpu.request_id, vgpu.owner_uid) == (request_id, uid)


def _is_creation(request: AnyRequest) -> bool:
    """Whether the node removes the result if the asker leaves before the answer."""
    return isinstance(request, Create)


def _not_served(index: int, reason: str) -> VgpuError:
    return VgpuError(ErrorCode.UNAVAILABLE, f"GPU {index} is not served: {reason}", "see: vgpuctl gpu ls")


def check_paths(paths: NodePaths) -> None:
    """``VgpuError`` (invalid): a socket of the node, or of a vGPU's broker, would have too long a path."""
    for path in (paths.control_socket, *paths.longest_sockets):
        check_length(path)


def prepare(paths: NodePaths) -> None:
    """The node's directories, with the permissions that let owners of vGPUs reach their own and nothing else.
    ``VgpuError``: one of them cannot be had."""
    shared = 0o711 if os.geteuid() == 0 else 0o700
    for directory, mode, variable in (
        (paths.runtime, 0o755 if os.geteuid() == 0 else 0o700, "VGPU_RUNTIME_DIR"),
        (paths.runtime / "gpus", 0o700, "VGPU_RUNTIME_DIR"),
        (paths.runtime / "vgpus", shared, "VGPU_RUNTIME_DIR"),
        (paths.state, 0o700, "VGPU_STATE_DIR"),
        (paths.logs, 0o700, "VGPU_STATE_DIR"),
    ):
        if (part := replaceable_part(directory)) is not None:
            raise VgpuError(
                ErrorCode.NOT_YOURS,
                f"another user can replace {directory}: {part} is theirs, or open to all",
                "set VGPU_RUNTIME_DIR and VGPU_STATE_DIR to directories of your own",
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(directory, error, variable) from error
        _own(directory, mode)


def closed_to_others(directory: Path) -> list[Path]:
    """``directory`` and its parents, as far as only the owner of each can pass through it."""
    return [part for part in (directory, *directory.parents) if not part.stat().st_mode & stat.S_IXOTH]


def _own(directory: Path, mode: int) -> None:
    """Refuse a directory of another user, because its owner could replace our sockets."""
    owner = directory.stat().st_uid
    if owner != os.geteuid():
        raise VgpuError(
            ErrorCode.NOT_YOURS,
            f"{directory} belongs to uid {owner}, and the node runs as uid {os.geteuid()}",
            "set VGPU_RUNTIME_DIR and VGPU_STATE_DIR to directories of your own",
        )
    directory.chmod(mode)


_complaints: Final[Pace[str]] = Pace(COMPLAINT_S)


def _complain(error: OSError) -> None:
    missed = _complaints.due("", time.monotonic())
    if missed is not None:
        log.warning("cannot accept a link", reason=str(error) + and_more(missed))
