"""The broker process: the core's shell on trio. Admits processes, watches them, keeps its link to the GPU Server.

What outlives what: the pages outlive everybody who maps them; a broker outlives its GPU Server, for the processes'
sake, and reconnects; a broker that dies is started again and reads the pages. Grants never pass through here: the
native relay merges wants, and leases are written by the server into the page that the processes have mapped.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio
from pydantic import ValidationError

from cython_ext.activitypage import ActivityPage
from cython_ext.grantspage import GrantsPage
from cython_ext.readings import SlotState
from cython_ext.relay import Relay
from cython_ext.relaypage import RelayPage
from vgpu.broker.core import Admission, Admissions, company, gpu_full
from vgpu.errors import VgpuError, cleaned
from vgpu.identity import Peer, Process
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
    Closed,
    Died,
    Gone,
    Listening,
    Look,
    Message,
    Reaped,
    Refused,
    Register,
    Stop,
)
from vgpu.protocol.codec import MAX_HOOK_BYTES, MAX_REQUEST_ITEMS, ProtocolError
from vgpu.protocol.hello import OLDEST_VERSION, Hello, Welcome
from vgpu.protocol.peer import is_alive, peer_of
from vgpu.protocol.stream import MessageStream, connect, listen, serve_links

ATTACH_S: Final = 3.0  # a hook says one thing; who takes longer holds the link for no good
RECONNECT_S: Final = (0.02, 0.1, 1.0)  # first pause; longest while the server is likely to be restarting; longest
RESTART_S: Final = 10.0
LONELY_S: Final = 30.0  # without a server and without a process there is nothing left to keep


@dataclass(slots=True)
class Pages:
    """The mapped pages of the vGPU, and the thread that works on them. ``grants`` changes with every server.

    The descriptors of grants and activity page are kept, to be handed to processes and to the next server; so is that
    of the store, if the vGPU is swapped (−1: it is not).
    """

    grants: GrantsPage
    grants_fd: int
    activity: ActivityPage
    activity_fd: int
    relay_page: RelayPage
    relay: Relay
    store_fd: int


class Broker:
    """One vGPU's broker. ``run`` returns when the vGPU was removed or nobody needs the broker any more."""

    def __init__(self, vgpu_id: str, server: Path, door: Path, limits: Limits = DEFAULT_LIMITS) -> None:
        self._vgpu_id = vgpu_id
        self._server = server
        self._door = door
        self._limits = limits
        self._admissions = Admissions(limits.processes_per_vgpu)
        self._companies: dict[int, tuple[str, ...]] = {}
        self._vgpu: Adopt | None = None
        self._pages: Pages | None = None
        self._link: MessageStream | None = None
        self._version = OLDEST_VERSION
        """What the server at the other end of the link understands."""
        self._stopped = False
        self._visitors: Counter[int] = Counter()
        self._closed: Pace[str] = Pace(limits.peer_event_pause_ms / 1000)
        self._left_out = Closed(pid=0, uid=-1, reason="")
        self._tells_later = False
        self._complaints: Pace[str] = Pace(limits.peer_event_pause_ms / 1000)
        self._planned: dict[
            int, Adopt
        ] = {}  # by slot: as it was when its process came. In the page a tenant could write

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
            except (OSError, VgpuError, ValidationError) as error:
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
        await link.send(Hello(role="broker").model_dump())
        answer = await link.receive()
        if answer is None:
            return
        self._version = agreed(answer[0])
        held = () if self._pages is None else known(self._pages.activity_fd, self._pages.store_fd)
        try:
            await link.send(Register(vgpu_id=self._vgpu_id, holds_page=bool(held)).model_dump(), held)
        except PermissionError:  # to this server it is no vGPU's broker, and is told to leave
            await link.send(Register(vgpu_id=self._vgpu_id, holds_page=False).model_dump())
        while (received := await link.receive()) is not None:
            message, descriptors = received
            match TO_BROKER.validate_python(message):
                case Adopt() as vgpu:
                    await self._adopt(vgpu, descriptors, link)
                case Gone(slot=slot, pid=pid, start_time=started):
                    await self._gone(slot, Process(pid, started))
                case Stop(removed=removed):
                    self._admissions.removed = removed
                    self._stopped = True
                    self._leave_if_alone()

    def _leave_if_alone(self) -> None:
        """After an orderly stop there is no server to wait for: the last process takes the broker along."""
        if self._stopped and (self._admissions.removed or not self._admissions.alive):
            self._nursery.cancel_scope.cancel()

    async def _adopt(self, vgpu: Adopt, descriptors: list[int], link: MessageStream) -> None:
        """Take the vGPU's description, and its pages where a server hands them over."""
        if descriptors:
            self._map(vgpu, descriptors)
        self._stopped = False
        first, self._vgpu = self._vgpu is None, vgpu
        if first:
            listener = listen(self._door, **_door_permissions(vgpu))
            self._nursery.start_soon(
                partial(
                    serve_links, listener, self._receive, self._cannot_accept, most=self._limits.visitors_per_broker
                )
            )
        if self._link is None:
            self._link = link
            await link.send(Listening().model_dump())
            for reading in self._activity.slots():
                process = self._admissions.process_in(reading.index)
                if process is not None:
                    await self._tell(self._attached(reading.index, process, reading.command))
            for slot, process in self._admissions.dead():
                await self._tell(_died(slot, process))

    def _map(self, vgpu: Adopt, descriptors: list[int]) -> None:
        grants_fd, activity_fd, relay_fd, store_fd = [*descriptors, -1][:4]
        grants, relay_page = GrantsPage.map_readonly(grants_fd), RelayPage.map(relay_fd)
        os.close(relay_fd)
        kept = self._pages
        if kept is not None:
            # A new server: its grants page is another one, the activity page is the one that we kept.
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
        activity = ActivityPage.map(activity_fd)
        activity.bump_broker_epoch()
        found = self._find_processes(activity)
        relay = Relay(activity, grants, relay_page, vgpu.key, found)
        self._pages = Pages(grants, grants_fd, activity, activity_fd, relay_page, relay, store_fd)
        self._nursery.start_soon(self._hear_relay)
        for slot, process in found.items():
            self._nursery.start_soon(self._watch_pid, slot, process)

    def _find_processes(self, activity: ActivityPage) -> dict[int, Process]:
        """A broker before us may have admitted processes. Who is not known to be dead, by slot."""
        found = {}
        for reading in activity.slots():
            process = Process(reading.pid, reading.start_time)
            dead = reading.state is SlotState.DEAD
            self._admissions.adopt(reading.index, process, dead=dead)
            if not dead:
                found[reading.index] = process
        return found

    async def _gone(self, slot: int, process: Process) -> None:
        if not self._admissions.awaits_release(slot, process):
            return
        try:
            released = await trio.to_thread.run_sync(self._activity.reap_slot, slot)
        except TimeoutError as error:  # the ledger's lock: the server will ask again
            await self._report_closed(process.pid, -1, f"its memory is not released yet: {error}")
            return
        if self._admissions.gone(slot, process):
            self._companies.pop(slot, None)
            await self._tell(Reaped(slot=slot, pid=process.pid, released_bytes=released))

    async def _tell(self, message: Message) -> None:
        """Best effort: without a link it is dropped, since a new link begins with the whole state; and so it is where
        the server is an older one, which does not know it."""
        if self._link is None or message.since > self._version:
            return
        try:
            await self._link.send(message.model_dump())
        except (OSError, VgpuError):
            self._link.close()

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

    async def _receive(self, sock: trio.socket.SocketType) -> None:
        peer: Peer | None = None
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
                if not self._may_visit(peer.uid):
                    text = "users of the share group have all places at the broker but the owner's"
                    await stream.send(Refused(code="unavailable", error=f"{self._vgpu_id}: {text}").model_dump())
                    raise ProtocolError(text)
                visitor = peer.uid
                self._visitors[visitor] += 1
                with trio.move_on_after(ATTACH_S) as patience:
                    await self._attach(stream, peer)
                if patience.cancelled_caught:
                    raise ProtocolError(f"it did not attach within {ATTACH_S:g} s")
        except (OSError, VgpuError, ValidationError) as error:
            reason = "its attach request is malformed" if isinstance(error, ValidationError) else cleaned(str(error))
            pid, uid = (peer.process.pid, peer.uid) if peer else (0, -1)
            await self._report_closed(pid, uid, reason)
        finally:
            if visitor is not None:
                self._visitors[visitor] -= 1

    def _may_visit(self, uid: int) -> bool:
        """Half of the places are for the owner and root: who else may attach must not keep these out."""
        first = {0} if self._vgpu is None else {0, self._vgpu.owner_uid}
        others = sum(count for visitor, count in self._visitors.items() if visitor not in first)
        return uid in first or others < self._limits.visitors_per_broker // 2

    async def _report_closed(self, pid: int, uid: int, reason: str) -> None:
        """One in a while, whatever peers do; the last of those between is told when that while is over, with how many
        there were."""
        missed = self._closed.due("", trio.current_time())
        if missed is not None:
            await self._tell(Closed(pid=pid, uid=uid, reason=reason + and_more(missed)))
            return
        self._left_out = Closed(pid=pid, uid=uid, reason=reason)
        if not self._tells_later:
            self._tells_later = True
            self._nursery.start_soon(self._report_left_out)

    async def _report_left_out(self) -> None:
        await trio.sleep(self._closed.pause_s)
        self._tells_later = False
        missed = self._closed.left_out("")
        if missed:
            self._closed.due("", trio.current_time())
            reason = self._left_out.reason + and_more(missed - 1)
            await self._tell(self._left_out.model_copy(update={"reason": reason}))

    async def _attach(self, stream: MessageStream, peer: Peer) -> None:
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
        decision = self._admissions.knock(attach, peer, self._vgpu, time.monotonic_ns())
        if isinstance(decision, Refused):
            await stream.send(decision.model_dump())
            return
        if not decision.known and decision.slot != OBSERVER_SLOT:
            self._activity.reserve_slot(
                peer.process.pid, peer.process.start_time, attach.command, decision.slot, self._vgpu.sm_planned
            )
            self._planned[decision.slot] = self._vgpu
            self._pages.relay.watch(decision.slot)
            # It counts already, for every broker of the GPU: of two that come at once, both may be refused, never none.
            if 0 < self._vgpu.most_processes < self._pages.relay_page.processes:
                self._turn_away(decision.slot, peer.process)
                await stream.send(gpu_full(self._vgpu).model_dump())
                return
            self._nursery.start_soon(self._watch_pid, decision.slot, peer.process)
        store_fd = self._pages.store_fd if decision.slot != OBSERVER_SLOT else -1
        pages = known(self._pages.grants_fd, self._pages.activity_fd, store_fd)
        await stream.send(_admitted(decision, self._vgpu).model_dump(), pages)
        if decision.slot != OBSERVER_SLOT:
            self._companies[decision.slot] = company(attach.vgpus, self._vgpu_id)
            await self._tell(self._attached(decision.slot, peer.process, attach.command))

    def _attached(self, slot: int, process: Process, command: str) -> Attached:
        planned = self._planned.get(slot)
        return Attached(
            slot=slot,
            pid=process.pid,
            start_time=process.start_time,
            command=command,
            vgpus=self._companies.get(slot, ()),
            sm_planned=planned.sm_planned if planned else 0,
            memory_planned_bytes=planned.memory_planned_bytes if planned else 0,
            mps_client_priority=planned.mps_client_priority if planned else "",
        )

    def _turn_away(self, slot: int, process: Process) -> None:
        """It never had the slot that was taken for it."""
        assert self._pages is not None
        self._pages.relay.mark_dead(slot)
        self._admissions.died(slot, process)
        self._nursery.start_soon(self._free, slot, process)

    async def _free(self, slot: int, process: Process) -> None:
        """A slot whose process the server never heard of: as soon as the ledger's lock can be had, which a process that
        was stopped may keep for long."""
        while self._admissions.awaits_release(slot, process):
            with suppress(TimeoutError):
                await trio.to_thread.run_sync(self._activity.reap_slot, slot)
                self._admissions.gone(slot, process)

    async def _watch_pid(self, slot: int, process: Process) -> None:
        """The mutex of the slot tells of a death within 0.1 ms; the pidfd also of a process that never took it."""
        while True:
            try:
                pidfd = os.pidfd_open(process.pid)
                break
            except ProcessLookupError:
                await self._died(slot, process)
                return
            except OSError:  # no descriptor is left: the mutex of the slot tells meanwhile
                await trio.sleep(RECONNECT_S[2])
        try:
            if is_alive(process):
                await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        await self._died(slot, process)

    async def _hear_relay(self) -> None:
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
    """The owner may connect, and the group it was shared with; the broker looks at each peer besides."""
    mode = 0o660 if vgpu.share_gid >= 0 else 0o600
    if os.geteuid() != 0:
        return {"mode": mode}
    return {"mode": mode, "uid": vgpu.owner_uid, "gid": vgpu.share_gid}


def agreed(answer: dict[str, object]) -> int:
    """The protocol version that both ends understand. ``ProtocolError``: there is none, with the server's reason."""
    if answer.get("ok") is not True:
        raise ProtocolError(str(answer.get("error")))
    return Welcome.model_validate(answer.get("result")).version


def known(*descriptors: int) -> tuple[int, ...]:
    """Those that are open; −1: there is none."""
    return tuple(descriptor for descriptor in descriptors if descriptor >= 0)


def _admitted(decision: Admission, vgpu: Adopt) -> Admitted:
    return Admitted(
        slot=decision.slot,
        now_ns=time.monotonic_ns(),
        **vgpu.model_dump(include=set(Admitted.model_fields) - {"ok", "slot", "now_ns"}),
    )


def _died(slot: int, process: Process) -> Died:
    return Died(slot=slot, pid=process.pid, start_time=process.start_time)
