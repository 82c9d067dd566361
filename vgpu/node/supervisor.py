"""The node's process: it supervises the GPU Servers, and serves the links of clients.

``control`` answers the requests on these links. The uid of a client comes from the kernel.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import trio
from pydantic import ValidationError

from client_hook import reach
from vgpu.enums import PlacementName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Peer
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.loggers import get_logger
from vgpu.node.control import NodeControl
from vgpu.node.database import NodeDatabase
from vgpu.node.events import EventFile, EventLog, History, history_lost, server_restarted
from vgpu.node.feed import EventFeed
from vgpu.node.logfiles import keep_small
from vgpu.node.servers import ServerProcess, Servers
from vgpu.node.service import tell_service_manager
from vgpu.node.sources import Places, Source, read_owners
from vgpu.node.survey import StatusCollector
from vgpu.node.tenancy.admission import Client
from vgpu.node.tenancy.quotas import NodeQuotas
from vgpu.node.usage import UsageKeeper
from vgpu.openfiles import is_kept
from vgpu.pacing import Pace, and_more
from vgpu.paths import NodePaths, unusable
from vgpu.process_tuning import keep_all
from vgpu.protocol.codec import MAX_REQUEST_BYTES, MAX_REQUEST_ITEMS
from vgpu.protocol.messages import (
    REQUESTS,
    AnyRequest,
    Confirm,
    Create,
    EventList,
    Events,
    Failure,
    Forward,
    Notice,
    Remove,
    Watch,
)
from vgpu.protocol.peer import peer_of
from vgpu.protocol.requests import READING_S
from vgpu.protocol.service import ask, serve, welcome
from vgpu.protocol.stream import LAST_DESCRIPTORS, MessageStream, check_length, listen, serve_links, until_replaced
from vgpu.queueing.rules import DEFAULT_RULES, QueueRules
from vgpu.quotas.quota import NO_QUOTAS, Quotas
from vgpu.spec import explain
from vgpu.trust import replaceable_part

log = get_logger(__name__)

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
        placement: PlacementName = PlacementName.SPREAD,
        quotas: Quotas = NO_QUOTAS,
        queue: QueueRules = DEFAULT_RULES,
    ) -> None:
        self._paths = paths
        self._idle_s = None if idle_ns is None else idle_ns / 1e9
        self._servers = servers
        self._limits = limits
        self._closed: Pace[Source] = Pace(COMPLAINT_S)
        self._places = Places(limits, frozenset({0, os.geteuid()}))
        self._stopping = False
        self._used_at = 0.0
        self._asking: set[MessageStream] = set()
        """Links that may still ask for a vGPU: all but those of watchers."""
        history = History(limits.events_kept, limits.peer_events_kept, limits.events_kept_per_user)
        self._events = EventLog(EventFile(paths.events), history, EventFile(paths.program_events))
        self._processes = {
            index: ServerProcess(index, paths.server_socket(index), paths.server_log(index)) for index in gpus
        }
        self._survey = StatusCollector(self._processes, simulated=simulated)
        self._feed = EventFeed(self._events)
        self._quotas = NodeQuotas(quotas, lambda: self._places.owners)
        self._database = NodeDatabase(paths.database, warn=self._warn_of_history)
        self._usage = UsageKeeper(self._database, self._survey)
        self._control = NodeControl(
            paths,
            self._processes,
            self._survey,
            self._feed,
            self._usage,
            simulated=simulated,
            placement=placement,
            quotas=self._quotas,
            database=self._database,
            queue=queue,
        )

    async def run(self) -> None:
        await trio.to_thread.run_sync(self._events.restore)
        with suppress(VgpuError):  # the node serves without it, and its log says so
            await self._database.write(lambda _: None)
        try:
            await self._run()
        finally:
            self._usage.end()
            self._database.close()
            self._events.flush()

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._events.write)
            nursery.start_soon(self._know_owners)
            nursery.start_soon(self._survey.run)
            nursery.start_soon(self._control.reclaimer.run)
            nursery.start_soon(self._control.queue.run)
            nursery.start_soon(self._control.autoscaling.run)
            nursery.start_soon(keep_small, [self._paths.node_log, *(p.log_path for p in self._processes.values())])
            for process in self._processes.values():
                nursery.start_soon(self._servers.keep, process, partial(self._receive_events, process), self._ended)
            nursery.start_soon(self._end_on_signal, nursery.cancel_scope)
            for process in self._processes.values():
                await process.settled.wait()
            nursery.start_soon(self._usage.run)
            # Every user may connect to root's node. The node checks each request against the peer's uid.
            listener = listen(self._paths.control_socket, mode=0o666 if os.geteuid() == 0 else 0o600)
            keep_all()
            nursery.start_soon(self._end_when_replaced, nursery.cancel_scope)
            tell_service_manager("READY=1")
            if os.geteuid() == 0 and (closed := reach.closed_directories(self._paths.runtime)):
                log.warning("other users cannot reach this node", closed=str(closed[0]), hint=f"chmod o+x {closed[0]}")
            elif os.geteuid() == 0 and (kept := reach.closed_to_others()):
                log.warning("other users cannot run this vgpuctl", closed=str(kept), hint=reach.ELSEWHERE)
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
                await self._usage.last_sample()
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
        client = Client(peer)

        def notices(request: AnyRequest) -> AsyncGenerator[Notice, None] | None:
            if isinstance(request, Watch):
                self._asking.discard(link)
            return self._control.notices(request, client)

        async def sent(request: AnyRequest) -> None:
            if isinstance(request, Create | Confirm | Remove):
                self._used_at = trio.current_time()
            await self._control.sent(request, client)

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
                await serve(
                    link,
                    REQUESTS,
                    partial(self._control.answer, client=client),
                    notices,
                    sent,
                    is_dropped=_is_creation,
                )
        finally:
            self._asking.discard(link)
            client.close()
            self._places.leave(place)

    # --- events

    async def _receive_events(self, process: ServerProcess, link: MessageStream) -> None:
        """Pass on one server's events, until its link ends. The past events come first, because no node received them
        while there was none."""
        await link.send(Forward(uid=os.geteuid(), request=Watch(snapshots=False, events=True)).said_to(1))
        self._control.autoscaling.wake()  # the server may have vGPUs with bounds in its journal
        with suppress(VgpuError):  # a server of an older version keeps no events
            past = await ask(process.socket, Forward(uid=os.geteuid(), request=Events()), EventList, READING_S)
            for event in past.events:
                if not self._events.history.is_past(event):
                    self._feed.publish(event)
        while (received := await link.receive()) is not None:
            event_now = Notice.model_validate(received[0]).event
            if event_now is not None:
                self._feed.publish(event_now)

    def _warn_of_history(self, text: str) -> None:
        self._feed.publish(history_lost(text, time.time()))

    def _ended(self, process: ServerProcess, pid: int) -> None:
        self._feed.publish(server_restarted(process.index, pid, process.restarts, time.time()))


def _is_creation(request: AnyRequest) -> bool:
    """Whether the node removes the result if the asker leaves before the answer."""
    return isinstance(request, Create)


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
