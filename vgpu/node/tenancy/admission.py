"""The node's part in a creation: whose vGPU it is, whether the quotas allow it, and which GPU takes it.

The GPU Servers admit. The node asks one after the other, in the order of its placement.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from uuid import uuid4

import trio

from vgpu.enums import PlacementName
from vgpu.errors import ErrorCode, VgpuError, not_yours
from vgpu.groups import Groups
from vgpu.identity import Peer, Process
from vgpu.node.autoscaling import Autoscaling
from vgpu.node.creation import Creation
from vgpu.node.database import NodeDatabase
from vgpu.node.feed import EventFeed
from vgpu.node.forwarding import Forwarder
from vgpu.node.routing import candidates, find_gpu
from vgpu.node.survey import StatusCollector
from vgpu.node.tenancy.entry import Entry
from vgpu.node.tenancy.places import PlaceKeeper
from vgpu.node.tenancy.queue import Queue
from vgpu.node.tenancy.quotas import NodeQuotas
from vgpu.placement.box import request as room_for
from vgpu.placement.box import scarcer
from vgpu.protocol.messages import Confirm, Confirmed, Create, GpuStatus, Set, Snapshot, VgpuStatus
from vgpu.protocol.requests import CHANGE_S
from vgpu.protocol.stream import LINK_ENDED
from vgpu.queueing.rules import QueueRules
from vgpu.quotas.quota import Allowance
from vgpu.share import PPM
from vgpu.spec import VgpuSpec


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


class Admission:
    """Makes vGPUs for clients. Admissions run one after the other, so that no name is given twice and no quota is
    exceeded. What follows an admission runs in parallel."""

    def __init__(
        self,
        forwarder: Forwarder,
        survey: StatusCollector,
        quotas: NodeQuotas,
        placement: PlacementName,
        autoscaling: Autoscaling,
        *,
        feed: EventFeed,
        database: NodeDatabase,
        rules: QueueRules,
    ) -> None:
        self._forwarder = forwarder
        self._survey = survey
        self._quotas = quotas
        self._placement = placement
        self._one = trio.Lock()
        self._groups = Groups()
        self._autoscaling = autoscaling
        self.queue = Queue(
            survey,
            feed,
            PlaceKeeper(database),
            quotas,
            self._admit_waiting,
            forwarder,
            placement=placement,
            rules=rules,
        )

    async def create(self, request: Create, client: Client) -> VgpuStatus:
        """Create it on the first GPU that takes it. If none does, raise the refusal of the one with most room."""
        group = request.spec.share_group
        # Before the lock: while the name service is slow, others make vGPUs.
        share_gid = -1 if group is None else await self._groups.id_of(group)
        request_id = request.request_id or uuid4().hex
        owner_uid = _owner_of(request, client.uid)
        allowance = await self._quotas.allowance(owner_uid)
        exact = request.model_copy(
            update={
                "request_id": request_id,
                "wait": False,
                "share_gid": share_gid,
                "owner_uid": None,
                "queue_ns": None,
            }
        )
        creation: Creation | None = None
        try:
            if request.queue_ns is None:
                async with self._one:
                    creation = await self._admit(exact, allowance, owner_uid, client.peer.process)
            else:
                creation = await self._wait(exact, allowance, owner_uid, client.peer.process, request.queue_ns / 1e9)
            reading = await creation.finish()
        except BaseException:
            if creation is not None:
                creation.close()
            raise
        if request_id in client.pending:  # asked again on the same link
            client.pending[request_id].close()
        client.pending[request_id] = creation
        return reading

    async def confirm(self, request: Confirm, client: Client) -> Confirmed:
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

    async def change(self, request: Set, vgpu: VgpuStatus, uid: int) -> VgpuStatus:
        """Resize a vGPU, if its name is free and the quota of its owner allows the new size."""
        if request.changes.name is not None:
            await self._refuse_taken_name(request.changes.name, vgpu.owner_uid, but=vgpu.vgpu_id)
        if uid not in {0, os.geteuid(), vgpu.owner_uid}:
            raise not_yours(vgpu.vgpu_id, vgpu.owner_uid, uid)
        grows = _grows(request.changes.applied_to(vgpu.spec), vgpu.spec)
        if grows and vgpu.gpu_index in self.queue.kept:
            raise _is_kept(vgpu.gpu_index)
        if self._quotas.is_trivial or not (grows or request.changes.ttl_ns is not None):
            return await self._forwarder.to_vgpu(vgpu, request, uid, VgpuStatus)
        allowance = await self._quotas.allowance(vgpu.owner_uid)
        async with self._one:
            snapshot = await self._survey.snapshot()
            gpu = next((gpu for gpu in snapshot.gpus if gpu.index == vgpu.gpu_index), None)
            now = next((one for one in snapshot.vgpus if one.vgpu_id == vgpu.vgpu_id), vgpu)
            if gpu is not None:
                claim = "" if now.claim is None else now.claim.kind
                spec = request.changes.applied_to(now.spec)
                self._quotas.check(spec, gpu, allowance, snapshot, claim=claim, before=now)
            with trio.move_on_after(CHANGE_S):
                changed = await self._forwarder.to_vgpu(now, request, uid, VgpuStatus)
                self._survey.note(changed)
                return changed
        raise VgpuError(ErrorCode.TIMEOUT, f"{vgpu.vgpu_id} did not change within {CHANGE_S:g} s", "see: vgpuctl logs")

    async def scale(self, request: Set, vgpu: VgpuStatus) -> VgpuStatus:
        """What the node sets by itself. A larger size has to fit the owner's quota. A smaller one needs no check: room
        is made for a vGPU while that one is admitted."""
        if not _grows(request.changes.applied_to(vgpu.spec), vgpu.spec):
            changed = await self._forwarder.to_vgpu(vgpu, request, vgpu.owner_uid, VgpuStatus)
            self._survey.note(changed)
            return changed
        return await self.change(request, vgpu, vgpu.owner_uid)

    async def _wait(
        self, request: Create, allowance: Allowance, owner_uid: int, asker: Process, limit_s: float
    ) -> Creation:
        """In the queue, unless the vGPU is there already. What never fits is refused at once."""
        async with self._one:
            snapshot = await self._survey.snapshot()
            if any(_answers(vgpu, request, owner_uid) for vgpu in snapshot.vgpus):
                return await self._admit(request, allowance, owner_uid, asker)
            spec = self._quotas.filled(request.spec, allowance, None)
            if spec.name is not None:
                await self._refuse_taken_name(spec.name, owner_uid)
            gpus = snapshot.gpus if request.gpu.lower() == "auto" else [find_gpu(request.gpu, snapshot.gpus)]
            claim = "" if request.claim is None else request.claim.kind
            never = self._quotas.refusal(spec, gpus, allowance, claim)
            if never is not None:
                raise never
        request = request.model_copy(update={"spec": spec})
        user = self._quotas.source(owner_uid)
        entry = Entry(request, spec, allowance, owner_uid, asker, user, time.time())
        return await self.queue.wait(entry, limit_s)

    async def _admit_waiting(self, entry: Entry, gpus: tuple[int, ...]) -> Creation:
        """Admit a request of the queue on the first of ``gpus`` that takes it."""
        allowance = await self._quotas.allowance(entry.owner_uid)  # the quotas may be others than at its arrival
        async with self._one:
            snapshot = await self._survey.snapshot()
            if any(_answers(vgpu, entry.request, entry.owner_uid) for vgpu in snapshot.vgpus):
                # Another link has the vGPU of the same request, or of the same claim, meanwhile.
                entry.allowance = allowance
                return await self._admit(entry.request, allowance, entry.owner_uid, entry.asker)
            if entry.spec.name is not None:
                await self._refuse_taken_name(entry.spec.name, entry.owner_uid)
            by_index = {gpu.index: gpu for gpu in snapshot.gpus if gpu.state == "serving"}
            found = [by_index[index] for index in gpus if index in by_index]
            if not found:
                raise VgpuError(ErrorCode.UNAVAILABLE, "no GPU that it may have is served", "see: vgpuctl gpu ls")
            entry.allowance = allowance
            found = self._within_quota(found, entry.request, entry.spec, allowance, snapshot)
            return await self._first_that_admits(found, snapshot, entry.request, entry.owner_uid, entry.asker)

    async def _admit(self, request: Create, allowance: Allowance, owner_uid: int, asker: Process) -> Creation:
        snapshot = await self._survey.snapshot()
        existing = next((vgpu for vgpu in snapshot.vgpus if _answers(vgpu, request, owner_uid)), None)
        spec = self._quotas.filled(request.spec, allowance, existing)
        request = request.model_copy(update={"spec": spec})
        if existing is not None:
            going = existing.state in {"removing", "moving"} or existing.leaving_to is not None
            if going and not self._quotas.is_trivial:
                text = f"{existing.vgpu_id} of the same request is {existing.state}"
                raise VgpuError(ErrorCode.UNAVAILABLE, text, "ask again in a moment")
            found = [gpu for gpu in snapshot.gpus if gpu.index == existing.gpu_index]
            claim = "" if request.claim is None else request.claim.kind
            for gpu in found:  # if that vGPU goes meanwhile, the GPU Server makes this one
                self._quotas.check(spec, gpu, allowance, snapshot, claim=claim, before=existing)
        else:
            if spec.name is not None:
                await self._refuse_taken_name(spec.name, owner_uid)
            found = candidates(request.gpu, snapshot.gpus, snapshot.vgpus, spec, self._placement)
            found = self._within_quota(self._not_kept(found), request, spec, allowance, snapshot)
        return await self._first_that_admits(found, snapshot, request, owner_uid, asker)

    def _within_quota(
        self, gpus: list[GpuStatus], request: Create, spec: VgpuSpec, allowance: Allowance, snapshot: Snapshot
    ) -> list[GpuStatus]:
        """Those of the GPUs on which the vGPU fits the quota. By default its memory depends on the card's."""
        fitting, refusal = [], None
        for gpu in gpus:
            try:
                claim = "" if request.claim is None else request.claim.kind
                self._quotas.check(spec, gpu, allowance, snapshot, claim=claim)
            except VgpuError as error:
                refusal = refusal or error
            else:
                fitting.append(gpu)
        if refusal is not None and not fitting:
            raise refusal
        return fitting

    def _not_kept(self, gpus: list[GpuStatus]) -> list[GpuStatus]:
        """The GPUs that are not kept for a request which has waited for long."""
        kept = self.queue.kept
        free = [gpu for gpu in gpus if gpu.index not in kept]
        if gpus and not free:
            raise _is_kept(gpus[0].index, len(gpus))
        return free

    async def _first_that_admits(
        self, gpus: list[GpuStatus], snapshot: Snapshot, request: Create, owner_uid: int, asker: Process
    ) -> Creation:
        refusals = []
        for gpu in gpus:
            begun = await self._begin(gpu, request, owner_uid, asker)
            if isinstance(begun, Creation):
                return begun
            refusals.append(begun)
        for gpu in gpus:
            if gpu.draining:  # it was not refused for want of room
                continue
            wanted = room_for(request.spec, gpu)
            if await self._autoscaling.make_room(gpu.index, wanted.time_ppm / PPM * 100, wanted.memory_bytes):
                begun = await self._begin(gpu, request, owner_uid, asker)
                if isinstance(begun, Creation):
                    return begun
        emptiest = max(gpus, key=scarcer)
        refusal = refusals[gpus.index(emptiest)]
        where = (
            f"GPU {emptiest.index}"
            if len(gpus) == 1
            else f"none of {len(gpus)} GPUs; GPU {emptiest.index}, the emptiest"
        )
        raise VgpuError(refusal.code, f"{where}: {refusal.message}", refusal.hint)

    async def _begin(self, gpu: GpuStatus, request: Create, owner_uid: int, asker: Process) -> Creation | VgpuError:
        """A creation that the GPU admits, or why it does not fit there."""
        creation = Creation(await self._forwarder.served(gpu.index), request, owner_uid, asker)
        try:
            self._survey.note(await creation.begin())
        except BaseException as error:
            creation.close()
            if isinstance(error, VgpuError) and error.code in {ErrorCode.NO_ROOM, ErrorCode.MODE}:
                return error
            if isinstance(error, LINK_ENDED):  # the server has died meanwhile
                text = f"the server of GPU {gpu.index} has ended: {error or type(error).__name__}"
                raise VgpuError(ErrorCode.UNAVAILABLE, text, "ask again") from error
            raise
        return creation

    async def _refuse_taken_name(self, name: str, owner_uid: int, but: str = "") -> None:
        """Names are unique per owner. Another owner may use the same name."""
        for vgpu in (await self._survey.snapshot()).vgpus:
            if vgpu.name == name and vgpu.owner_uid == owner_uid and vgpu.vgpu_id != but:
                hint = f"choose another --name; vgpuctl rm {name} removes that one"
                raise VgpuError(ErrorCode.EXISTS, f"{vgpu.vgpu_id} has the name {name!r} already", hint)


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


def _grows(new: VgpuSpec, old: VgpuSpec) -> bool:
    """Whether more is promised to it, or may be used by it. A memory that is not said goes with the compute."""
    if new.compute_ratio * new.quota_request_ratio > old.compute_ratio * old.quota_request_ratio:
        return True
    return new.compute_ratio > old.compute_ratio or any(
        (after or 0) > (before or 0)
        for after, before in (
            (new.memory_bytes, old.memory_bytes),
            (new.memory_limit_bytes, old.memory_limit_bytes),
        )
    )


def _is_kept(index: int, number: int = 1) -> VgpuError:
    which = f"GPU {index}" if number == 1 else f"each of {number} GPUs"
    return VgpuError(
        ErrorCode.NO_ROOM, f"{which} is kept for a request that has waited for long", "wait for room: --wait"
    )


def _answers(vgpu: VgpuStatus, request: Create, uid: int) -> bool:
    """Whether ``vgpu`` was made for this request, or for the same claim, of this user."""
    same_claim = request.claim is not None and vgpu.owner_uid == uid and request.claim.is_same(vgpu.claim)
    return same_claim or _was_made_for(vgpu, request.request_id, uid)


def _was_made_for(vgpu: VgpuStatus, request_id: str, uid: int) -> bool:
    return bool(request_id) and (vgpu.request_id, vgpu.owner_uid) == (request_id, uid)
