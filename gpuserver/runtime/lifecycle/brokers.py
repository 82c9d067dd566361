"""The brokers of one GPU: this module starts them, finds them again, restarts them, and serves their links.

A broker is a process of its own session, and outlives the GPU Server. After a restart of the server, the process that
listens on a vGPU's socket is its broker. It connects within a second and brings the activity page.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from cython_ext.pages.page import PageError
from gpuserver.device.pidfd import send
from gpuserver.runtime.lifecycle.containers import Containers
from gpuserver.runtime.lifecycle.description import describe, kept_places
from gpuserver.runtime.lifecycle.reports import BrokerReports
from gpuserver.runtime.lifecycle.template import BrokerTemplate, Order, start_broker
from gpuserver.runtime.memory.stores import Stores
from gpuserver.runtime.memory.watch import MemoryWatch
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import NO_PROCESS, NOT_PLANNED, Vgpu
from vgpu.errors import VgpuError
from vgpu.event_types import EventType
from vgpu.identity import Member, Process
from vgpu.loggers import get_logger
from vgpu.paths import NodePaths
from vgpu.protocol.broker import (
    FROM_BROKER,
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
    Register,
    Starting,
    Stop,
)
from vgpu.protocol.codec import ProtocolError
from vgpu.protocol.descriptors import close_aside
from vgpu.protocol.peer import is_alive, listener_at
from vgpu.protocol.stream import MessageStream
from vgpu.share import Mode

log = get_logger(__name__)

ADMIT_S: Final = 30.0
"""A broker that has not opened its socket by then will not."""
RETURN_S: Final = 10.0
"""A broker of the last server reconnects within 0.1 s (vgpu/broker/runtime.py, RECONNECT_S)."""
LONGEST_PAUSE_S: Final = 5.0
AWAY_S: Final = 0.05
NO_MEANS_S: Final = 1.0
SETTLED_S: Final = 10.0  # a broker that lived that long did not die of its own start
MOST_FAILS: Final = 3
"""So often in a row a broker ends at its start; then its vGPU has failed, and another one starts seldom."""
FAILED_PAUSE_S: Final = 60.0


class Brokers:
    """``keep`` runs as long as a vGPU exists; ``serve_link`` as long as a broker's link does."""

    def __init__(self, state: GpuState, stores: Stores, reports: BrokerReports, memory: MemoryWatch) -> None:
        self._state = state
        self._paths = state.settings.paths
        self._stores = stores
        self._reports = reports
        self._memory = memory
        self._stopping = False
        self.template = BrokerTemplate()
        self.containers = Containers(state)
        state.at_shares.append(self._update_places)

    # --- processes

    async def keep(self, vgpu: Vgpu) -> None:
        """See to it that the vGPU has a broker until it is removed or the server stops; then ``left`` is set. Or until
        it is to be another server's."""
        with trio.CancelScope() as vgpu.keeper_scope:
            await self._keep(vgpu)

    async def _keep(self, vgpu: Vgpu) -> None:
        pause, fails = 0.0, 0
        while not vgpu.removed.is_set() and not self._stopping:
            started = trio.current_time()
            vgpu.listens = False
            try:
                if vgpu.broker == NO_PROCESS or not is_alive(vgpu.broker):
                    await self._start(vgpu)
                await self._until_gone(vgpu)
            except OSError as error:  # no descriptors, no processes: of this machine, and for a while
                log.error("the broker cannot be started or watched", vgpu=vgpu.record.vgpu_id, reason=str(error))
                await trio.sleep(NO_MEANS_S)
                continue
            vgpu.broker = NO_PROCESS
            if vgpu.registered.is_set():
                vgpu.registered = trio.Event()  # by the next one
            if not vgpu.removed.is_set() and not self._stopping:
                pause = 0.0 if trio.current_time() - started > SETTLED_S else min(LONGEST_PAUSE_S, 2 * pause + 0.05)
                fails = 0 if vgpu.listens else fails + 1
                text = f"the broker of {vgpu.record.vgpu_id} ended, another starts"
                if fails >= MOST_FAILS:
                    pause = FAILED_PAUSE_S
                    vgpu_id = vgpu.record.vgpu_id
                    vgpu.failure = (
                        f"its broker has ended {fails} times before it could admit a process; why: vgpuctl logs "
                        f"{vgpu_id}; remove it: vgpuctl rm -f {vgpu_id}"
                    )
                    text = f"{vgpu.record.vgpu_id} has failed: {vgpu.failure}"
                self._state.record_event(EventType.BROKER_RESTARTED, vgpu, text)
                with trio.move_on_after(pause):
                    await vgpu.removed.wait()
        vgpu.left.set()

    async def _start(self, vgpu: Vgpu) -> None:
        if vgpu.activity is None:
            # The last broker took the page with it. Processes that are left attach anew.
            vgpu.make_activity()
        vgpu_id = vgpu.record.vgpu_id
        door = self._paths.broker_socket(vgpu_id)
        door.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        door.parent.chmod(0o711)  # a server of before may have had another umask
        with suppress(OSError):  # its broker uses another path; root in a container may have put anything there
            self._paths.old_vgpu_server(vgpu_id).unlink(missing_ok=True)
        self.claim(vgpu)
        order = Order(
            vgpu_id,
            str(self._paths.vgpu_server(vgpu_id)),
            str(door),
            str(self._paths.broker_alive(vgpu_id)),
            self._state.settings.limits.as_option(),
        )
        # It does nothing until its name is known here: only a broker whose name is known may register.
        with trio.CancelScope(shield=True):
            vgpu.broker, goes = await start_broker(self.template, order)
        if goes >= 0:
            if not vgpu.removed.is_set():  # else it ends
                with suppress(BrokenPipeError):  # it was killed meanwhile
                    os.write(goes, b".")
            os.close(goes)

    def claim(self, vgpu: Vgpu) -> None:
        """Its broker finds this server from now on, whatever server it has a link to."""
        link = self._paths.vgpu_server(vgpu.record.vgpu_id)
        self.containers.offer(vgpu)
        link.parent.parent.mkdir(mode=0o700, exist_ok=True)
        link.parent.mkdir(mode=0o700, exist_ok=True)
        self._place(link)
        old = self._paths.old_vgpu_server(vgpu.record.vgpu_id)
        with suppress(OSError):
            if old.is_symlink():  # of a broker that an older release started, and that knows no other path
                self._place(old)

    def _place(self, link: Path) -> None:
        gpu_index = self._state.facts.index
        new = link.with_name(f".server.{gpu_index}")
        new.unlink(missing_ok=True)
        new.symlink_to(self._paths.server_socket(gpu_index))
        new.replace(link)

    def release(self, vgpu: Vgpu) -> None:
        """Leave the vGPU's broker to another server: end its link and the task that keeps it alive."""
        if vgpu.keeper_scope is not None:
            vgpu.keeper_scope.cancel()
        if vgpu.link is not None:
            vgpu.link.close()

    async def reap(self, broker: Process) -> None:
        """Wait for the end of a broker that another server has, and that may be a child of this one."""
        with suppress(ProcessLookupError, ChildProcessError):
            pidfd = os.pidfd_open(broker.pid)
            try:
                await trio.lowlevel.wait_readable(pidfd)
                os.waitpid(broker.pid, os.WNOHANG)  # noqa: ASYNC222 - it has ended: the pidfd said so
            finally:
                os.close(pidfd)

    async def _until_gone(self, vgpu: Vgpu) -> None:
        try:
            pidfd = os.pidfd_open(vgpu.broker.pid)
        except ProcessLookupError:
            return
        try:
            if not is_alive(vgpu.broker):
                return
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._expect, vgpu, pidfd)
                await trio.lowlevel.wait_readable(pidfd)
                nursery.cancel_scope.cancel()
            with suppress(ChildProcessError):  # a broker that an earlier server started is no child of ours
                os.waitpid(vgpu.broker.pid, os.WNOHANG)  # noqa: ASYNC222 - it has ended: the pidfd said so
        finally:
            os.close(pidfd)

    async def _expect(self, vgpu: Vgpu, pidfd: int) -> None:
        """A broker that does not register is of no use: kill it, and let the next one try."""
        with trio.move_on_after(RETURN_S) as patience:
            await vgpu.registered.wait()
        if patience.cancelled_caught:
            log.warning("broker did not register", vgpu=vgpu.record.vgpu_id, pid=vgpu.broker.pid)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    # --- links

    async def serve_link(self, link: MessageStream, process: Process) -> None:
        """The conversation with one broker, from its registration on. Returns when the link ends."""
        received = await link.receive()
        if received is None:
            return
        message, descriptors = received
        register = FROM_BROKER.validate_python(message)
        if not isinstance(register, Register):
            raise ProtocolError("a broker has to register first")
        vgpu = self._state.vgpus.get(register.vgpu_id)
        if vgpu is not None and vgpu.passage.leaving is not None:
            close_aside(descriptors)
            await trio.sleep(AWAY_S)  # the broker connects again, then perhaps to the other server
            return
        if vgpu is None or vgpu.broker != process:
            # Of a vGPU that is gone, or started by a server that died before it had a door: another took its place.
            close_aside(descriptors)
            await link.send(Stop(removed=True).model_dump())
            return
        is_new = self._take_pages(vgpu, descriptors)
        if register.holds_page and register.processes is not None:
            self._take_list(vgpu, register.processes, page_is_new=is_new)
        vgpu.lists = register.processes is not None
        if vgpu.link is not None:
            vgpu.link.close()
        vgpu.link = link
        vgpu.registered.set()
        try:
            await self._hand_over(vgpu)
            while (received := await link.receive()) is not None:
                close_aside(received[1])
                await self._receive(vgpu, received[0])
        except (OSError, trio.ClosedResourceError) as error:
            log.info("broker link ended", vgpu=vgpu.record.vgpu_id, reason=str(error))
        finally:
            if vgpu.link is link:
                vgpu.link = None
                vgpu.awaited_pods = ()
                vgpu.starting = 0

    def _take_list(self, vgpu: Vgpu, processes: Sequence[Attached], *, page_is_new: bool) -> None:
        """The broker lived on, with or without this server: its list is the truth. ``page_is_new``: the server before
        this one has reported the refusals that the page has."""
        for report in processes:
            self._reports.attached(vgpu, report)
        if page_is_new:
            vgpu.new_refusals()
        for report in processes:
            if not report.alive:
                self._reports.died(vgpu, Died(slot=report.slot, pid=report.pid, start_time=report.start_time))
        vgpu.returning = ()
        here = {report.slot: report.pid for report in processes}
        for slot, member in list(vgpu.members.items()):
            if here.get(slot) != member.process.pid:
                name = {"pid": member.process.pid, "start_time": member.process.start_time}
                self._reports.died(vgpu, Died(slot=slot, **name))
                self._reports.reaped(vgpu, Reaped(slot=slot, pid=member.process.pid, released_bytes=0))

    def _take_pages(self, vgpu: Vgpu, descriptors: list[int]) -> bool:
        """Keep the pages that the broker brings, unless they are those that we have: activity page, and store. Whether
        the activity page is one that this server did not have."""
        activity, store = [*descriptors, -1, -1][:2]
        is_new = activity >= 0 and not (vgpu.activity and os.path.sameopenfile(activity, vgpu.activity_fd))
        try:
            if is_new:
                vgpu.take_activity(os.dup(activity))
            if store >= 0 and vgpu.swaps:
                self._stores.take(vgpu.tenant, store)
        except PageError as error:
            raise ProtocolError(f"the broker of {vgpu.record.vgpu_id} brought a page that is none: {error}") from error
        finally:
            close_aside(descriptors)
        if vgpu.activity is None:
            vgpu.make_activity()
        return is_new

    async def _hand_over(self, vgpu: Vgpu) -> None:
        assert vgpu.link is not None
        pages: tuple[int, ...] = (vgpu.grants.fileno(), vgpu.activity_fd, self._state.relay_page.fileno())
        if vgpu.swaps:
            pages = (*pages, self._stores.of(vgpu.tenant).fileno())
        members = [self._report(vgpu, member) for member in vgpu.members.values()]
        returning = [self._report(vgpu, member) for member in vgpu.returning if member.alive]
        lists = {"processes": tuple(members), "returning": tuple(returning)}
        await vgpu.link.send(describe(self._state, vgpu).model_copy(update=lists).model_dump(), pages)

    @staticmethod
    def _report(vgpu: Vgpu, member: Member) -> Attached:
        """The process as its broker reported it, or as the server reported it to the broker."""
        planned = vgpu.planned.get(member.slot, NOT_PLANNED)
        return Attached(
            slot=member.slot,
            pid=member.process.pid,
            start_time=member.process.start_time,
            uid=member.uid,
            command=member.command,
            alive=member.alive,
            counts=member.counts,
            vgpus=vgpu.coattached.get(member.slot, ()),
            sm_planned=planned.sms,
            memory_planned_bytes=planned.memory_bytes,
            mps_client_priority=planned.client_priority,
        )

    async def _receive(self, vgpu: Vgpu, raw: dict[str, object]) -> None:
        match FROM_BROKER.validate_python(raw):
            case Listening():
                vgpu.listens, vgpu.failure = True, ""
                vgpu.admits.set()
            case Attached(slot=slot, pid=pid, start_time=started) as message:
                self._reports.attached(vgpu, message)
                if vgpu.lists:  # an older broker does not know the answer
                    await self.tell(vgpu, Noted(slot=slot, pid=pid, start_time=started))
            case Died() as message:
                self._reports.died(vgpu, message)
            case Reaped() as message:
                self._reports.reaped(vgpu, message)
            case Look():
                self._memory.look()
            case Awaits(pods=pods):
                vgpu.awaited_pods = pods
            case Starting(processes=processes):
                vgpu.starting = processes
            case Closed(pid=pid, uid=uid, reason=reason, foreign=True):
                text = f"process {pid} (uid {uid}) was refused: {reason}"
                self._state.record_event(EventType.FOREIGN, vgpu, text, pid=pid)
            case Closed(pid=pid, uid=uid, reason=reason):
                self._state.record_event(
                    EventType.LINK_CLOSED, vgpu, f"link of process {pid} (uid {uid}) closed: {reason}"
                )
            case Register():
                raise ProtocolError("a broker registered twice on one link")

    async def tell(self, vgpu: Vgpu, message: Message) -> bool:
        """Send ``message`` to the vGPU's broker. False: there is no link. A new link begins with the whole state."""
        if vgpu.link is None:
            return False
        try:
            await vgpu.link.send(message.model_dump())
        except (OSError, VgpuError, trio.ClosedResourceError):
            return False
        return True

    async def gone(self, vgpu: Vgpu, slot: int, process: Process, keeps_shared: bool) -> bool:
        message = Gone(slot=slot, pid=process.pid, start_time=process.start_time, keeps_shared=keeps_shared)
        return await self.tell(vgpu, message)

    async def changed(self, vgpu: Vgpu) -> None:
        """Send the broker its new description, after mode, owner's group or partition changed."""
        self.containers.offer(vgpu)
        await self.tell(vgpu, describe(self._state, vgpu))

    def _update_places(self) -> None:
        """Shares changed. In spatial mode each broker counts with the MPS places that are kept for other vGPUs."""
        if self._state.mode is Mode.SPATIAL:
            self._state.nursery.start_soon(self._send_places)

    async def _send_places(self) -> None:
        places = kept_places(self._state)
        for vgpu in list(self._state.vgpus.values()):
            if vgpu.record.partition is not None and vgpu.published_places != places:
                await self.changed(vgpu)

    async def stop(self, vgpus: Iterable[Vgpu]) -> None:
        """The server ends: none is started any more, and each leaves that has no processes to stay for."""
        self._stopping = True
        for vgpu in vgpus:
            await self.dismiss(vgpu, removed=False)

    async def dismiss(self, vgpu: Vgpu, *, removed: bool) -> None:
        """``removed``: the broker leaves at once. Else it leaves unless processes are attached, and stays for them."""
        sent = await self.tell(vgpu, Stop(removed=removed))
        if removed and not sent:
            send(vgpu.broker, signal.SIGTERM)


def find_broker(paths: NodePaths, vgpu_id: str) -> Process | None:
    """The broker that another server has started: the process that listens in the directory that brokers alone have.
    A broker of the first releases listens only where processes attach."""
    private = paths.broker_alive(vgpu_id)
    is_old = not private.exists() and paths.old_vgpu_server(vgpu_id).is_symlink()
    return listener_at(paths.broker_socket(vgpu_id) if is_old else private)
