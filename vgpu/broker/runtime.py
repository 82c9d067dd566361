"""The broker process: the shell of ``vgpu.broker.core``, on trio.

The broker admits processes, watches them, and keeps a link to its GPU Server.

Lifetimes: the pages outlive every process that maps them. A broker outlives its GPU Server for the sake of the
processes, and reconnects. A broker that dies is started again, and the server sends it the list of its processes.
Grants never pass through the broker. The native relay merges wants. The server writes leases into the page that the
processes have mapped.

The broker knows which process is in which slot from the kernel (the credentials of its socket) and from that list.
Tenants write the activity page, so the broker believes nothing in it about slots.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio
from pydantic import ValidationError

from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.pages.relaypage import RelayPage
from cython_ext.relay.relay import Relay
from vgpu.broker.core import Admission, Admissions, Asleep, company, foreign, gpu_full, is_foreign, may_attach
from vgpu.broker.ownsockets import OwnSockets, Serve
from vgpu.broker.places import has_place
from vgpu.errors import VgpuError, cleaned
from vgpu.identity import Peer, Process
from vgpu.integrations import cgroups
from vgpu.integrations.cgroups import NOWHERE, Place
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.logs import tell
from vgpu.pacing import Pace, and_more
from vgpu.protocol.broker import (
    OBSERVER_SLOT,
    TO_BROKER,
    Admitted,
    Adopt,
    Attach,
    Attached,
    Awaits,
    Closed,
    Died,
    Gone,
    Listening,
    Look,
    Message,
    Noted,
    Reaped,
    Refused,
    Register,
    Starting,
    Stop,
)
from vgpu.protocol.codec import MAX_HOOK_BYTES, MAX_REQUEST_ITEMS, ProtocolError
from vgpu.protocol.hello import Hello, Welcome
from vgpu.protocol.peer import is_alive, is_running, peer_of
from vgpu.protocol.stream import LINK_ENDED, MessageStream, connect, listen, serve_links
from vgpu.protocol.versions import OLDEST_VERSION

ATTACH_S: Final = 3.0  # a hook sends one message; a process that takes longer occupies the link for nothing
RECONNECT_S: Final = (0.02, 0.1, 1.0)  # first pause; longest while the server is likely to be restarting; longest
RESTART_S: Final = 10.0
WAIT_S: Final = 7.0
"""For so long a process waits until its pod is named (the driver of Kubernetes asks the API server) and until its
suspended vGPU is resumed, both together. The hook waits for ``VGPU_PATIENCE_S`` of cython_ext/hook/connect.h, and so
has the answer."""
RUNS_S: Final = 0.1
"""While it waits for the resume: how often the broker checks that it runs."""
LONELY_S: Final = 30.0  # without a server and without a process there is nothing left to keep
NOTED_S: Final = 1.0
"""A server notes an admission within milliseconds. A server that is held up for longer notes it later. If this broker
dies before that, the next broker learns of the process from the process's own knock."""
ASIDE_S: Final = 20.0  # a hook knocks once a second at a new broker, and may have to wait for a CPU
UNUSED_S: Final = 300.0  # a hook takes its slot within microseconds of the answer, unless its program is stopped
LOOK_S: Final = 0.5
MOST_COMMAND_BYTES: Final = 63  # as the activity page has it


NO_PEER: Final = Peer(Process(0, 0), -1, frozenset())


@dataclass(slots=True)
class Pages:
    """The mapped pages of the vGPU, and the thread that works on them. ``grants`` changes with every server.

    The broker keeps the descriptors of the grants page and the activity page, to hand them to processes and to the next
    server. If the vGPU is swapped, the broker keeps the store's descriptor too (−1: the vGPU is not swapped).
    ``view_fd``: the activity page for observers, read-only.
    """

    grants: GrantsPage
    grants_fd: int
    activity: ActivityPage
    activity_fd: int
    view_fd: int
    relay_page: RelayPage
    relay: Relay
    store_fd: int


class Broker:
    """One vGPU's broker. ``run`` returns when the vGPU was removed, or when the broker is needed no more."""

    def __init__(
        self, vgpu_id: str, server: Path, door: Path, alive: Path | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        """``server``: where the GPU Server listens. ``door``: where processes attach. ``alive``: a socket beside
        ``server`` by which the next GPU Server finds this broker."""
        self._vgpu_id = vgpu_id
        self._server = server
        self._door = door
        self._alive = alive
        self._limits = limits
        self._admissions = Admissions(limits.processes_per_vgpu)
        self._damaged = False
        """A process has written into the broker's own words of the page, and the page was not begun anew since."""
        self._vgpu: Adopt | None = None
        self._described = trio.Event()
        """Set, and replaced, with each description of the vGPU."""
        self._awaited: Counter[str] = Counter()
        """How many processes wait, by the pod that the vGPU's claim does not name."""
        self._pages: Pages | None = None
        self._link: MessageStream | None = None
        self._version = OLDEST_VERSION
        """What the server at the other end of the link understands."""
        self._stopped = False
        self._visitors: Counter[int] = Counter()
        self._closed: Pace[str] = Pace(limits.peer_event_pause_ms / 1000)
        self._left_out: dict[str, Closed] = {}
        """The last report that was left out, by its key."""
        self._complaints: Pace[str] = Pace(limits.peer_event_pause_ms / 1000)
        self._reports: dict[int, Attached] = {}
        """By slot: the report about its process that the broker sent to the server at the admission."""
        self._noted: dict[tuple[int, Process], trio.Event] = {}
        self._confirmed: set[int] = set()
        """Slots whose processes have the current pages."""
        self._starting = 0
        """How many new processes wait until the vGPU is resumed."""
        self._own_sockets = OwnSockets(door, self._waiting, self._may_attach, self._receive, self._say)
        self._epoch = 0

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._leave_on_signal)
            nursery.start_soon(self._keep_link)

    # --- the link to the GPU Server

    async def _leave_on_signal(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                self._nursery.cancel_scope.cancel()

    async def _keep_link(self) -> None:
        pause, alone_since = RECONNECT_S[0], trio.current_time()
        while True:
            try:
                async with await connect(self._server, takes_descriptors=True) as link:
                    await self._converse(link)
                    pause, alone_since = RECONNECT_S[0], trio.current_time()
            except (*LINK_ENDED, VgpuError, ValidationError) as error:
                if pause == RECONNECT_S[0]:  # once per loss, not once per attempt
                    self._say("no link to the GPU Server", error)
            finally:
                self._link = None
            alone_s = trio.current_time() - alone_since
            if not self._admissions.alive and alone_s > LONELY_S:
                self._nursery.cancel_scope.cancel()
            await trio.sleep(pause)
            pause = min(2 * pause, RECONNECT_S[1] if alone_s < RESTART_S else RECONNECT_S[2])

    async def _converse(self, link: MessageStream) -> None:
        server = peer_of(link.socket)
        if server.uid != os.geteuid():
            raise ProtocolError(f"process {server.process.pid} of uid {server.uid} listens where the GPU Server should")
        await link.send(Hello(role="broker").model_dump())
        answer = await link.receive()
        if answer is None:
            return
        self._version = agreed(answer[0])
        held = () if self._pages is None else known(self._pages.activity_fd, self._pages.store_fd)
        register = Register(vgpu_id=self._vgpu_id, holds_page=bool(held), processes=self._list())
        try:
            await link.send(register.model_dump(), held)
        except PermissionError:  # this server knows no vGPU of this broker, and will answer with Stop
            await link.send(register.model_copy(update={"holds_page": False}).model_dump())
        while (received := await link.receive()) is not None:
            message, descriptors = received
            match TO_BROKER.validate_python(message):
                case Adopt() as vgpu:
                    await self._adopt(vgpu, descriptors, link)
                case Noted(slot=slot, pid=pid, start_time=started):
                    noted = self._noted.get((slot, Process(pid, started)))
                    if noted is not None:
                        noted.set()
                case Gone(slot=slot, pid=pid, start_time=started, keeps_shared=keeps_shared):
                    await self._gone(slot, Process(pid, started), keeps_shared)
                case Stop(removed=removed):
                    self._admissions.removed = removed
                    self._stopped = True
                    self._leave_if_alone()

    def _leave_if_alone(self) -> None:
        """After an orderly stop there is no server to wait for: the broker ends with the last process."""
        if self._stopped and (self._admissions.removed or not self._admissions.alive):
            self._nursery.cancel_scope.cancel()

    async def _adopt(self, vgpu: Adopt, descriptors: list[int], link: MessageStream) -> None:
        """Take the vGPU's description, and its pages if the server hands them over."""
        if descriptors:
            self._map(vgpu, descriptors)
        self._stopped = False
        first, self._vgpu = self._vgpu is None, vgpu
        self._described.set()
        self._described = trio.Event()
        if first:
            if self._alive is not None:
                self._nursery.start_soon(_be_found, listen(self._alive, mode=0o600))
            self._nursery.start_soon(self._own_sockets.run)
            self._serve(listen(self._door, **_door_permissions(vgpu)), self._receive)
            if vgpu.mount_door:
                self._serve(listen(Path(vgpu.mount_door), mode=0o666), partial(self._receive, mounted=True))
        if self._link is None:
            self._link = link
            await link.send(Listening().model_dump())
            await self._tell_awaited()
            await self._tell(Starting(processes=self._starting))
            for slot, _ in self._admissions.held():
                await self._tell(self._reports[slot])
            for slot, process in self._admissions.dead():
                await self._tell(_died(slot, process))

    def _serve(self, listener: trio.socket.SocketType, receive: Serve) -> None:
        most = self._limits.visitors_per_broker
        self._nursery.start_soon(partial(serve_links, listener, receive, self._cannot_accept, most=most))

    def _map(self, vgpu: Adopt, descriptors: list[int]) -> None:
        grants_fd, activity_fd, relay_fd, store_fd = [*descriptors, -1][:4]
        self._confirmed.clear()
        grants, relay_page = GrantsPage.map_readonly(grants_fd), RelayPage.map(relay_fd)
        os.close(relay_fd)
        kept = self._pages
        if kept is not None:
            # The server is new: its grants page is another one, and the activity page is the one that we kept.
            os.close(activity_fd)
            kept.relay.rebind(grants, relay_page, vgpu.key)
            os.close(kept.grants_fd)
            if kept.store_fd >= 0:
                os.close(kept.store_fd)
            kept.store_fd = store_fd
            kept.grants.close()
            kept.relay_page.close()
            kept.grants, kept.grants_fd, kept.relay_page = grants, grants_fd, relay_page
            # Leases of the old server end here: no gate passes on a page of another generation.
            kept.activity.generation = vgpu.generation
            kept.activity.ring()
            return
        activity = ActivityPage.map(activity_fd, repair=True)
        self._epoch = activity.bump_broker_epoch()
        found = self._take_over(vgpu, activity)
        relay = Relay(activity, grants, relay_page, vgpu.key, found)
        view_fd = read_only(activity_fd)
        self._pages = Pages(grants, grants_fd, activity, activity_fd, view_fd, relay_page, relay, store_fd)
        self._nursery.start_soon(self._read_relay)
        self._nursery.start_soon(self._clear_aside)
        for slot, process in found.items():
            self._nursery.start_soon(self._watch_pid, slot, process)

    def _take_over(self, vgpu: Adopt, activity: ActivityPage) -> dict[int, Process]:
        """Take over the processes on the server's list, which earlier brokers have admitted. Returns those that live,
        by slot."""
        for report in vgpu.processes:
            process = Process(report.pid, report.start_time)
            self._admissions.adopt(report.slot, process, dead=not report.alive)
            self._reports[report.slot] = report.model_copy(update={"alive": True})
        self._admissions.set_aside(slot.index for slot in activity.slots())
        self._admissions.expect({Process(each.pid, each.start_time): each.slot for each in vgpu.returning})
        return dict(self._admissions.held())

    async def _clear_aside(self) -> None:
        """Clear slots of no known process. By then, processes that knock have come back for their slots."""
        await trio.sleep(ASIDE_S)
        clears = True
        for slot in sorted(self._admissions.aside):
            if clears:
                try:
                    await trio.to_thread.run_sync(self._activity.clear_slot, slot)
                except TimeoutError as error:  # the next process in the slot finds it empty all the same
                    clears = False
                    self._say("slots of no known process stay charged: the memory ledger is locked", error)
            self._admissions.give_up(slot)

    def _list(self) -> tuple[Attached, ...]:
        """The reports of all processes that have a slot."""
        living = [self._reports[slot] for slot, _ in self._admissions.held()]
        reported = [self._reports[slot] for slot, _ in self._admissions.dead() if slot in self._reports]
        return (*living, *(report.model_copy(update={"alive": False}) for report in reported))

    async def _gone(self, slot: int, process: Process, keeps_shared: bool) -> None:
        if not self._admissions.awaits_release(slot, process):
            return
        if self._vgpu is not None:
            # The words by which the ledger's lock names processes.
            self._damaged |= self._activity.assert_words(self._vgpu.generation)
        try:
            released = await trio.to_thread.run_sync(self._activity.reap_slot, slot, keeps_shared)
        except TimeoutError as error:  # the ledger's lock: the server will ask again
            await self._report_closed(process.pid, -1, f"its memory is not released yet: {error}")
            return
        if not keeps_shared and self._admissions.gone(slot, process):
            self._reports.pop(slot, None)
            await self._tell(Reaped(slot=slot, pid=process.pid, released_bytes=released))

    async def _tell(self, message: Message) -> None:
        """Send ``message`` to the server, if possible. Without a link the broker drops it, since a new link begins with
        the whole state. The broker also drops it if the server is an older one, which does not know it."""
        if self._link is None or message.since > self._version:
            return
        link = self._link
        try:
            await link.send(message.model_dump())
        except (*LINK_ENDED, VgpuError):
            link.close()

    # --- processes

    @property
    def _activity(self) -> ActivityPage:
        assert self._pages is not None
        return self._pages.activity

    def _cannot_accept(self, error: OSError) -> None:
        missed = self._complaints.due("", time.monotonic())
        if missed is not None:
            self._say("cannot accept a process" + and_more(missed), error)

    def _say(self, text: str, error: Exception) -> None:
        """A broker reports through its link; only what concerns links themselves goes to stderr (the server's log)."""
        tell("warning", text, "broker", vgpu=self._vgpu_id, reason=str(error))

    async def _receive(self, sock: trio.socket.SocketType, *, mounted: bool = False) -> None:
        """Serve one process. ``mounted``: it came through the socket that only a mount leads to."""
        peer = NO_PEER
        visitor: int | None = None
        try:
            async with MessageStream(
                sock,
                MAX_HOOK_BYTES,
                MAX_HOOK_BYTES,
                takes_descriptors=False,
                first_bytes=self._limits.first_message_bytes,
                most_items=MAX_REQUEST_ITEMS,
            ) as stream:
                peer = peer_of(sock)
                if not mounted and not self._may_visit(peer.uid):
                    text = "users of the share group have all places at the broker but the owner's"
                    await stream.send(Refused(code="unavailable", error=f"{self._vgpu_id}: {text}").model_dump())
                    raise ProtocolError(text)
                visitor = peer.uid
                self._visitors[visitor] += 1
                with trio.move_on_after(ATTACH_S) as patience:
                    await self._attach(stream, peer, patience, mounted=mounted)
                if patience.cancelled_caught:
                    raise ProtocolError(f"it did not attach within {ATTACH_S:g} s")
        except (*LINK_ENDED, VgpuError, ValidationError) as error:
            reason = "its attach request is malformed" if isinstance(error, ValidationError) else cleaned(str(error))
            await self._report_closed(peer.process.pid, peer.uid, reason)
        except Exception as error:
            # Our own fault, but one visitor's: the vGPU's programs must not lose their broker with it.
            self._say(f"an error of st-vgpu: {error!r}, with process {peer.process.pid}", error)
        finally:
            if visitor is not None:
                self._visitors[visitor] -= 1

    def _may_visit(self, uid: int) -> bool:
        """Half of the places are for the owner and root. Users of the share group must not keep these out."""
        first = {0} if self._vgpu is None else {0, self._vgpu.owner_uid}
        others = sum(count for visitor, count in self._visitors.items() if visitor not in first)
        return uid in first or others < self._limits.visitors_per_broker // 2

    async def _report_closed(self, pid: int, uid: int, reason: str, *, foreign: bool = False) -> None:
        """Report at most one closed link per pause, whatever peers do. After the pause, the broker reports the last one
        that it left out, with the number of all of these."""
        key = "foreign" if foreign else ""  # other links that a peer closes hide no refusal
        missed = self._closed.due(key, trio.current_time())
        if missed is not None:
            await self._tell(Closed(pid=pid, uid=uid, reason=reason + and_more(missed), foreign=foreign))
            return
        is_due = key in self._left_out
        self._left_out[key] = Closed(pid=pid, uid=uid, reason=reason, foreign=foreign)
        if not is_due:
            self._nursery.start_soon(self._report_left_out, key)

    async def _report_left_out(self, key: str) -> None:
        await trio.sleep(self._closed.pause_s)
        last = self._left_out.pop(key)
        missed = self._closed.left_out(key)
        if missed:
            self._closed.due(key, trio.current_time())
            await self._tell(last.model_copy(update={"reason": last.reason + and_more(missed - 1)}))

    async def _foreign(self, peer: Peer, until: float, patience: trio.CancelScope) -> Refused | None:
        """The refusal of a process that is in no pod of the vGPU's claim. A pod may have got the claim lately: its
        process waits until the claim names it, or it is ``until``."""
        assert self._vgpu is not None
        place = _place_of(peer.process)
        if place.pod and is_foreign(place, self._vgpu):
            patience.deadline = until + ATTACH_S
            self._awaited[place.pod] += 1
            try:
                await self._tell_awaited()
                with trio.move_on_at(until):
                    while is_foreign(place, self._vgpu):
                        await self._described.wait()
            finally:
                self._awaited[place.pod] -= 1
                if not self._awaited[place.pod]:
                    del self._awaited[place.pod]
            await self._tell_awaited()
        return foreign(place, self._vgpu) if is_foreign(place, self._vgpu) else None

    async def _be_resumed(self, peer: Peer, until: float, patience: trio.CancelScope) -> None:
        """A new process waits until the server has resumed the vGPU, or it is ``until``. A process that has ended
        resumes nothing."""
        if not is_running(peer.process):
            return
        patience.deadline = until + ATTACH_S
        self._starting += 1
        try:
            await self._tell(Starting(processes=self._starting))
            with trio.move_on_at(until):
                while self._vgpu is not None and self._vgpu.suspended and is_running(peer.process):
                    with trio.move_on_after(RUNS_S):
                        await self._described.wait()
        finally:
            self._starting -= 1
        await self._tell(Starting(processes=self._starting))

    async def _tell_awaited(self) -> None:
        await self._tell(Awaits(pods=tuple(sorted(self._awaited))))

    async def _attach(self, stream: MessageStream, peer: Peer, patience: trio.CancelScope, *, mounted: bool) -> None:
        received = await stream.receive()
        if received is None:
            return
        try:
            attach = Attach.model_validate(received[0])
        except ValidationError:
            await stream.send(Refused(code="protocol", error=f"{self._vgpu_id}: malformed attach request").model_dump())
            raise
        assert self._vgpu is not None
        assert self._pages is not None
        until = trio.current_time() + WAIT_S
        if mounted and peer.process.start_time and not self._admissions.knows(peer.process):
            refused = await self._foreign(peer, until, patience)
            if refused is not None:
                await stream.send(refused.model_dump())
                await self._report_closed(peer.process.pid, peer.uid, refused.error, foreign=True)
                return
        decision = await self._decide(attach, peer, self._vgpu, mounted=mounted)
        if isinstance(decision, Asleep) and self._vgpu.wakes:
            await self._be_resumed(peer, until, patience)
            decision = await self._decide(attach, peer, self._vgpu, mounted=mounted)
        if isinstance(decision, Refused):
            await stream.send(decision.model_dump())
            return
        if decision.slot == OBSERVER_SLOT:
            view = (self._pages.grants_fd, self._pages.view_fd)
            await stream.send(self._admitted(decision, self._vgpu).model_dump(), view)
            return
        alone = not decision.known and self._admissions.alive == 1
        await self._mend_page(self._vgpu, self._pages, alone=alone)
        if not decision.known:
            if not decision.found:
                self._activity.reserve_slot(
                    peer.process.pid, peer.process.start_time, attach.command, decision.slot, self._vgpu.sm_planned
                )
            self._pages.relay.watch(decision.slot)
            # Every broker of the GPU counts this process already. Of two that come at once for one place, at least one
            # is refused, and perhaps both.
            if not self._has_place(self._vgpu, self._pages.relay_page):
                full = gpu_full(self._vgpu, self._pages.relay_page.processes)
                self._turn_away(decision.slot, peer.process)
                await stream.send(full.model_dump())
                return
            self._nursery.start_soon(self._watch_pid, decision.slot, peer.process)
            self._nursery.start_soon(self._expect_use, decision.slot, peer.process)
        await self._report(decision.slot, self._attached(decision, peer, attach, self._vgpu))
        pages = known(self._pages.grants_fd, self._pages.activity_fd, self._pages.store_fd)
        await stream.send(self._admitted(decision, self._vgpu).model_dump(), pages)
        self._confirmed.add(decision.slot)
        self._own_sockets.close(decision.slot)

    async def _mend_page(self, vgpu: Adopt, pages: Pages, *, alone: bool) -> None:
        """Repair the broker's own words of the page, since a process of the vGPU may have written there. The next
        process then begins with a page that its hook accepts. If it is ``alone`` in the vGPU, it can also get leases
        again."""
        plan = pages.grants.plan()
        last_epoch = max(plan.open_epoch, plan.go_epoch, plan.current.epoch if plan.current else 0)
        self._damaged |= pages.activity.assert_words(vgpu.generation)
        if alone and (self._damaged or pages.activity.returned_epoch > last_epoch):
            self._damaged = False
            taken = self._admissions.aside | {slot for slot, _ in (*self._admissions.held(), *self._admissions.dead())}
            try:
                await trio.to_thread.run_sync(pages.activity.begin_anew, last_epoch, taken)
            except TimeoutError as error:
                self._say("the page was damaged, and its memory ledger is locked", error)

    def _has_place(self, vgpu: Adopt, relay_page: RelayPage) -> bool:
        """Whether the GPU's MPS server has a place for a process that is counted already."""
        if not vgpu.most_processes:
            return True
        return has_place(vgpu.key, relay_page.processes_by_key(), dict(vgpu.places), vgpu.most_processes)

    async def _decide(self, attach: Attach, peer: Peer, vgpu: Adopt, *, mounted: bool) -> Admission | Refused:
        """The core's decision. The shell adds what the page says of slots that this very process has or asks for."""
        unused = False
        mine = self._admissions.slot_of(peer.process) if attach.role == "process" else None
        if mine is not None and mine != attach.slot:
            unused = self._activity.is_reserved(mine)
            if self._activity.is_left(mine):  # exec: the new program knocks before the end of the old one is known
                await self._died(mine, peer.process)
        names = attach.slot >= 0 and self._activity.names(attach.slot, peer.process.pid, peer.process.start_time)
        now_ns = time.monotonic_ns()
        return self._admissions.knock(attach, peer, vgpu, now_ns, unused=unused, names=names, mounted=mounted)

    def _attached(self, decision: Admission, peer: Peer, attach: Attach, vgpu: Adopt) -> Attached:
        """The report about a process for the server. A process keeps for life what it was started with."""
        before = self._reports.get(decision.slot) if decision.known else None
        planned = before or vgpu
        return Attached(
            slot=decision.slot,
            pid=peer.process.pid,
            start_time=peer.process.start_time,
            uid=before.uid if before else peer.uid,
            command=attach.command[:MOST_COMMAND_BYTES],
            vgpus=company(attach.vgpus, self._vgpu_id),
            sm_planned=planned.sm_planned,
            memory_planned_bytes=planned.memory_planned_bytes,
            mps_client_priority=planned.mps_client_priority,
            counts=attach.counts,
        )

    async def _report(self, slot: int, report: Attached) -> None:
        """Send ``report`` to the server, and wait until the server has noted it. Reason: another broker of the vGPU
        then knows the process before the process has a page. Without a server, only this broker knows the process, and
        reports it to the next server."""
        process = Process(report.pid, report.start_time)
        self._reports[slot] = report
        noted = self._noted[slot, process] = trio.Event()
        try:
            await self._tell(report)
            if self._link is not None and self._version >= Noted.since:
                with trio.move_on_after(NOTED_S):
                    await noted.wait()
        finally:
            self._noted.pop((slot, process), None)

    async def _expect_use(self, slot: int, process: Process) -> None:
        """Give back a slot that its process never takes, since other processes may need it."""
        await trio.sleep(UNUSED_S)
        if self._admissions.slot_of(process) == slot and self._activity.is_reserved(slot):
            await self._died(slot, process)

    def _waiting(self) -> Iterator[tuple[int, Process]]:
        """Processes that have not asked for the current pages."""
        yield from (one for one in self._admissions.held() if one[0] not in self._confirmed)
        yield from self._admissions.returning()

    def _may_attach(self, peer: Peer) -> bool:
        return self._vgpu is not None and (bool(self._vgpu.mount_door) or may_attach(peer, self._vgpu))

    def _admitted(self, decision: Admission, vgpu: Adopt) -> Admitted:
        fields = set(Admitted.model_fields) - {"ok", "slot", "now_ns", "broker_epoch"}
        return Admitted(
            slot=decision.slot,
            now_ns=time.monotonic_ns(),
            broker_epoch=self._epoch,
            **vgpu.model_dump(include=fields),
        )

    def _turn_away(self, slot: int, process: Process) -> None:
        """Free the slot that was taken for a process that is refused."""
        assert self._pages is not None
        self._pages.relay.mark_dead(slot)
        self._admissions.died(slot, process)
        self._nursery.start_soon(self._free, slot, process)

    async def _free(self, slot: int, process: Process) -> None:
        """Free a slot whose process was never reported to the server. It needs the ledger's lock, which a stopped
        process may keep for long."""
        while self._admissions.awaits_release(slot, process):
            with suppress(TimeoutError):
                await trio.to_thread.run_sync(self._activity.reap_slot, slot)
                self._admissions.gone(slot, process)

    async def _watch_pid(self, slot: int, process: Process) -> None:
        """The slot's mutex reports a death within 0.1 ms. The pidfd also reports that of a process that never took the
        mutex."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            await self._died(slot, process)
            return
        except OSError as error:  # no descriptor is left: the broker polls the kernel instead
            self._say(f"process {process.pid} is watched without a pidfd", error)
            while is_alive(process):  # noqa: ASYNC110
                await trio.sleep(LOOK_S)
            await self._died(slot, process)
            return
        try:
            if is_alive(process):
                await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        await self._died(slot, process)

    async def _read_relay(self) -> None:
        assert self._pages is not None
        while True:
            await trio.lowlevel.wait_readable(self._pages.relay.fileno())
            deaths = self._pages.relay.deaths()
            if self._pages.relay.look_wanted():
                await self._tell(Look())
            for death in deaths:
                process = self._admissions.process_in(death.slot)
                if process is not None:
                    await self._died(death.slot, process)

    async def _died(self, slot: int, process: Process) -> None:
        if self._admissions.died(slot, process):
            assert self._pages is not None
            self._pages.relay.mark_dead(slot)
            await self._tell(_died(slot, process))
            self._leave_if_alone()


def _door_permissions(vgpu: Adopt) -> dict[str, int]:
    """The owner may connect, and the group that the vGPU is shared with. The broker also checks each peer."""
    mode = 0o660 if vgpu.share_gid >= 0 else 0o600
    if os.geteuid() != 0:
        return {"mode": mode}
    return {"mode": mode, "uid": vgpu.owner_uid, "gid": vgpu.share_gid}


def _place_of(process: Process) -> Place:
    """Where this very process runs."""
    place = cgroups.of_process(process.pid)
    return place if is_alive(process) else NOWHERE


def agreed(answer: dict[str, object]) -> int:
    """The protocol version that both ends understand. ``ProtocolError``: there is none, with the server's reason."""
    if answer.get("ok") is not True:
        raise ProtocolError(str(answer.get("error")))
    return Welcome.model_validate(answer.get("result")).version


def known(*descriptors: int) -> tuple[int, ...]:
    """Those that are open; −1: there is none."""
    return tuple(descriptor for descriptor in descriptors if descriptor >= 0)


def read_only(descriptor: int) -> int:
    """Another descriptor of a page, for processes that may read it. It gives no writable mapping. Only our own user can
    open it for writing through /proc, because the page's permissions are 0600."""
    with suppress(OSError):  # an older release made the page accessible to every user
        os.fchmod(descriptor, 0o600)
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


async def _be_found(listener: trio.socket.SocketType) -> None:
    """Serve a socket on which nothing is sent. A server that connects asks the kernel which process listens."""
    with listener:
        while True:
            try:
                sock, _ = await listener.accept()
                sock.close()
            except OSError:
                await trio.sleep(LOOK_S)


def _died(slot: int, process: Process) -> Died:
    return Died(slot=slot, pid=process.pid, start_time=process.start_time)
