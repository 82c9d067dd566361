"""Gangs across GPU Servers: their members, and the links on which servers send each other the status of their members.

A server with a member of any gang dials the servers of all lower GPUs; both ends then send the same kind of message.
``gpuserver/core/scheduler/gangs.py`` decides what follows from it for leases, ``gpuserver/core/states/together.py`` for
memory that is swapped. A server that is slow, stopped or dead delays no
other: sends and handshakes are bounded in time, and its last message lapses in the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Final, TypeAlias

import trio

from gpuserver.core.scheduler.gangs import GangName, Gangs
from gpuserver.core.scheduler.leases import GangCalled, GangMemberStatus, VgpuIndex
from gpuserver.core.states.together import MemberResidence, Members
from gpuserver.runtime.leases.tokens import TokenLoop
from gpuserver.runtime.links import LinkErrors
from gpuserver.runtime.vgpus import Vgpu
from vgpu.loggers import get_logger
from vgpu.paths import NodePaths
from vgpu.protocol.codec import ProtocolError
from vgpu.protocol.gangs import BEAT_S, MemberOutlook, Outlooks, Residence
from vgpu.protocol.hello import Hello
from vgpu.protocol.service import open_link
from vgpu.protocol.stream import MessageStream
from vgpu.share import Mode

log = get_logger(__name__)

_Told: TypeAlias = dict[GangName, tuple[GangMemberStatus, MemberResidence | None]]
REDIAL_S: Final = 0.2
REST_S: Final = 0.0005
"""At least so long between two messages: one message carries changes that come faster."""


def gang_of(vgpu: Vgpu, mode: Mode) -> GangName | None:
    """The gang of ``vgpu``: its group's, else that of the process that attached first of those with several vGPUs.

    Both carry the owner's uid, so no vGPU joins the gang of another user. A process's claim binds only a vGPU that
    admitted the process. It binds that vGPU only to vGPUs that admitted a process with the same claim.
    """
    if mode is Mode.SPATIAL or vgpu.removed.is_set():
        return None
    uid, group = vgpu.record.owner.uid, vgpu.record.spec.group
    if group is not None:
        return f"{uid}/{group}"
    company = next(iter(vgpu.coattached.values()), None)
    return None if company is None else f"{uid}:{','.join(company)}"


def swapped_gang_of(vgpu: Vgpu, mode: Mode) -> GangName | None:
    """The gang with which ``vgpu`` is swapped. Programs with several vGPUs keep their memory on the GPUs, so such a
    gang is a group."""
    return gang_of(vgpu, mode) if vgpu.swaps and vgpu.record.spec.group is not None else None


class GangLinks:
    """``run`` for as long as the server does; ``enroll`` whenever a vGPU or a process came or left."""

    def __init__(self, paths: NodePaths, gpu_index: int, tokens: TokenLoop) -> None:
        self._paths = paths
        self._gpu_index = gpu_index
        self._tokens = tokens
        self._gangs = Gangs(gpu_index)
        self._swapped: dict[GangName, VgpuIndex] = {}
        self._residences: Mapping[VgpuIndex, MemberResidence] = {}
        self._residents = Members()
        self._told: _Told = {}
        self._moved = trio.Event()
        self._on_residents: Callable[[], None] = lambda: None
        tokens.on_decision(self._publish)

    def on_residents(self, call: Callable[[], None]) -> None:
        """``call`` is called after another server has reported where the memory of its members is now."""
        self._on_residents = call

    def enroll(self, vgpus: Iterable[Vgpu], mode: Mode) -> None:
        """These are the vGPUs here. Of two vGPUs of one gang the older is its member; the other is in no gang. A vGPU
        that stands still has no leases, and its gang's memory is swapped with its own all the same."""
        members: dict[GangName, VgpuIndex] = {}
        swapped: dict[GangName, VgpuIndex] = {}
        for vgpu in vgpus:
            gang, swapped_gang = gang_of(vgpu, mode), swapped_gang_of(vgpu, mode)
            if gang is not None and not vgpu.quiesced:
                members.setdefault(gang, vgpu.record.key)
            if swapped_gang is not None:
                swapped.setdefault(swapped_gang, vgpu.record.key)
        if members != self._gangs.members or swapped != self._swapped:
            log.info("gangs", members=members, swapped=swapped)
            self._swapped = swapped
            self._forward(self._gangs.enroll(members, time.monotonic_ns()))
            self._publish()

    def tell(self, residences: Mapping[VgpuIndex, MemberResidence]) -> None:
        """Where the memory of the swapped members here is now; the other servers get it."""
        if residences != self._residences:
            self._residences = residences
            self._publish()

    def residents(self, key: VgpuIndex) -> dict[int, MemberResidence]:
        """The other swapped members of the vGPU's gang, by GPU, as far as their servers are known to live."""
        gang = next((gang for gang, member in self._swapped.items() if member == key), None)
        return {} if gang is None else self._residents.of(gang, time.monotonic_ns())

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for lower in range(self._gpu_index):
                nursery.start_soon(self._dial, lower)

    async def _dial(self, gpu_index: int) -> None:
        while True:
            while not (self._gangs.members or self._swapped):
                await self._moved.wait()
            try:
                link, _ = await open_link(self._paths.server_socket(gpu_index), Hello(role="server"))
                async with link:
                    await self.serve_link(link)
            except LinkErrors as error:
                log.debug("no link to another GPU's server", gpu=gpu_index, reason=str(error))
            await trio.sleep(REDIAL_S)

    async def serve_link(self, link: MessageStream) -> None:
        """Both ends of a link: send and receive, until it ends. An error of the link ends this link only."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, link, nursery.cancel_scope)
            try:
                await self._receive(link)
            except LinkErrors as error:
                log.info("link to another GPU's server ended", reason=str(error))
            nursery.cancel_scope.cancel()

    async def _receive(self, link: MessageStream) -> None:
        peer: int | None = None
        before: dict[GangName, MemberResidence] = {}
        try:
            while (received := await link.receive()) is not None:
                outlooks = Outlooks.model_validate(received[0])
                if outlooks.gpu_index == self._gpu_index or peer not in {None, outlooks.gpu_index}:
                    raise ProtocolError(f"the server of another GPU calls itself GPU {outlooks.gpu_index}")
                peer = outlooks.gpu_index
                now_ns = time.monotonic_ns()
                residences = _residences(outlooks)
                self._residents.receive(peer, residences, now_ns)
                self._forward(self._gangs.receive(peer, _parsed(outlooks), now_ns))
                if residences != before:
                    before = residences
                    self._on_residents()
        finally:
            if peer is not None:
                self._forward(self._gangs.lose(peer, time.monotonic_ns()))

    async def _send(self, link: MessageStream, ended: trio.CancelScope) -> None:
        while True:
            moved = self._moved
            try:
                await link.send(_message(self._gpu_index, self._outlooks()).model_dump())
            except LinkErrors as error:
                log.info("link to another GPU's server ended", reason=str(error))
                ended.cancel()
                return
            await trio.sleep(REST_S)
            with trio.move_on_after(BEAT_S):
                await moved.wait()

    def _outlooks(self) -> _Told:
        leases = {gang: self._tokens.outlook(key) for gang, key in self._gangs.members.items()}
        places = {gang: self._residences.get(key) for gang, key in self._swapped.items()}
        return {gang: (leases.get(gang, GangMemberStatus()), places.get(gang)) for gang in leases | places}

    def _publish(self) -> None:
        """Called after every decision: if a status has changed, wake the senders."""
        outlooks = self._outlooks()
        if outlooks != self._told:
            self._told = outlooks
            self._moved.set()
            self._moved = trio.Event()

    def _forward(self, events: Iterable[GangCalled]) -> None:
        for event in events:
            self._tokens.gang_window(event)


def _message(gpu_index: int, told: _Told) -> Outlooks:
    members = tuple(
        MemberOutlook(
            gang=gang,
            bound=outlook.bound,
            start_ns=outlook.start_ns,
            end_ns=outlook.end_ns,
            late=outlook.late,
            ready=outlook.ready,
            residence=None if place is None else Residence(**asdict(place)),
        )
        for gang, (outlook, place) in told.items()
    )
    return Outlooks(gpu_index=gpu_index, members=members)


def _parsed(outlooks: Outlooks) -> dict[GangName, GangMemberStatus]:
    return {m.gang: GangMemberStatus(m.bound, m.start_ns, m.end_ns, m.late, m.ready) for m in outlooks.members}


def _residences(outlooks: Outlooks) -> dict[GangName, MemberResidence]:
    """Of the members that are swapped."""
    return {m.gang: MemberResidence(**m.residence.model_dump()) for m in outlooks.members if m.residence is not None}
