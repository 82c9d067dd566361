"""The requests that wait for room (``create --wait``), and the task that places them.

A request waits for as long as its client's link is there. The node's database has the time since when it waits. So a
client that comes back after a restart of the node has its old place. Whatever the database says, only a client that is
there has a place in the queue.

A preempted vGPU waits in the queue, too: for room on its GPU (``vgpu.node.tenancy.preemption``).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn, TypeAlias

import trio

from vgpu.autoscale.readings import readings_of
from vgpu.errors import ErrorCode, VgpuError
from vgpu.loggers import get_logger
from vgpu.node.creation import Creation
from vgpu.node.feed import EventFeed
from vgpu.node.forwarding import Forwarder
from vgpu.node.survey import StatusCollector
from vgpu.node.tenancy import figures
from vgpu.node.tenancy.entry import Entry
from vgpu.node.tenancy.places import Place, PlaceKeeper
from vgpu.node.tenancy.preemption import PRIORITIES, Preemption, preempted
from vgpu.node.tenancy.quotas import NodeQuotas
from vgpu.placement.box import ranked, request
from vgpu.protocol.messages import EventReading, GpuStatus, Snapshot, VgpuStatus
from vgpu.protocol.tenancy import QueueList, QueueReading
from vgpu.queueing.order import Candidate, Order, User, Waiting, ordered
from vgpu.queueing.preempted import Preempted
from vgpu.queueing.rules import DEFAULT_RULES, QueueRules
from vgpu.quotas.checks import NOTHING
from vgpu.quotas.quota import Allowance
from vgpu.spec import as_options
from vgpu.units import counted, format_bytes, format_duration

log = get_logger(__name__)

EVERY_S: Final = 2.0
"""Between two attempts, where no event came: a GPU Server may have been restarted, or a time to live has ended."""
SETTLE_S: Final = 0.02
"""After an event: several come together."""
JUDGE_S: Final = 30.0
"""Between two requests to the name service about the users that wait: their groups may be others."""
NO_ROOM: Final = frozenset(
    {ErrorCode.NO_ROOM, ErrorCode.MODE, ErrorCode.QUOTA, ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT}
)
"""Refusals that may end by themselves."""


Admit: TypeAlias = Callable[[Entry, tuple[int, ...]], Awaitable[Creation]]
"""Admits the request on the first of these GPUs that takes it."""


class Queue:
    """``run`` in a nursery; any task may call ``wait``. ``rules`` may be replaced at any time."""

    def __init__(
        self,
        survey: StatusCollector,
        feed: EventFeed,
        places: PlaceKeeper,
        quotas: NodeQuotas,
        admit: Admit,
        forwarder: Forwarder,
        *,
        placement: str,
        rules: QueueRules = DEFAULT_RULES,
    ) -> None:
        self.rules = rules
        self._survey = survey
        self._feed = feed
        self._places = places
        self._quotas = quotas
        self._admit = admit
        self._placement = placement
        self._entries: dict[Place, Entry] = {}
        self._order = Order()
        self._served_s: dict[User, float] = {}
        """When each user's last request was placed."""
        self._judged_by: object = None
        """The quotas by which the requests were judged last."""
        self._judge_at = 0.0
        self._sending, self._receiving = trio.open_memory_channel[EventReading](1)
        self._preemption = Preemption(survey, forwarder, self._wake)
        self._returning: dict[str, VgpuStatus] = {}
        """The preempted vGPUs of the last attempt."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def kept(self) -> Mapping[int, str]:
        """By GPU, the request that it is kept for."""
        return self._order.kept

    async def wait(self, entry: Entry, limit_s: float) -> Creation:
        """The creation of its vGPU, once there is room. ``VgpuError``: ``no-room`` after ``limit_s``, or at once where
        it never fits; or what else is wrong with the request."""
        snapshot = await self._survey.snapshot()
        entry.since_unix_s = self._places.since(entry.place, entry.since_unix_s)
        self._check(entry, snapshot)
        if (before := self._entries.get(entry.place)) is not None:  # the same request on another link
            before.end(None, VgpuError(ErrorCode.EXISTS, "the same request waits on another link now"))
        self._entries[entry.place] = entry
        self._wake()
        try:
            with trio.move_on_after(limit_s):
                await entry.done.wait()
            if not entry.done.is_set():
                waited = format_duration(max(1, int(limit_s)) * 10**9)
                raise VgpuError(
                    ErrorCode.NO_ROOM,
                    f"there was no room for {waited}: {entry.reason or _BEHIND}",
                    "wait longer, or ask for less",
                )
            if entry.error is not None:
                raise entry.error
            assert entry.creation is not None
            return entry.creation
        except BaseException:
            if entry.creation is not None:
                entry.creation.close()
            raise
        finally:
            entry.left = True
            if self._entries.get(entry.place) is entry:
                del self._entries[entry.place]
            self._wake()

    def reading(self) -> QueueList:
        """The requests in the order in which they are tried."""
        by_id = {entry.key: entry for entry in self._entries.values()}
        found: list[QueueReading] = []
        for candidate in self._order.candidates:
            key, number = candidate.request.request_id, len(found) + 1
            if key in by_id:
                entry = by_id[key]
                reading = QueueReading(
                    request_id=entry.request.request_id,
                    position=number,
                    owner_uid=entry.owner_uid,
                    spec=entry.spec,
                    gpu=entry.request.gpu,
                    since_unix_s=entry.since_unix_s,
                    kept_gpu=candidate.kept,
                    reason=entry.reason,
                )
                found.append(reading)
            elif key in self._returning:
                vgpu = self._returning[key]
                reading = QueueReading(
                    request_id="",
                    vgpu_id=key,
                    position=number,
                    owner_uid=vgpu.owner_uid,
                    spec=vgpu.spec,
                    gpu=str(vgpu.gpu_index),
                    since_unix_s=candidate.request.since_s,
                    kept_gpu=candidate.kept,
                    reason=self._preemption.reasons.get(key, "it was preempted"),
                )
                found.append(reading)
        return QueueList(waiting=tuple(found))

    def check_resume(self, vgpu: VgpuStatus) -> None:
        """``VgpuError`` (no-room): a preempted vGPU may not have its GPU yet."""
        self._preemption.refuse_early(vgpu, self.kept)

    # --- the task

    async def run(self) -> NoReturn:
        await self._places.read()
        for entry in self._entries.values():  # they came before the database was read
            entry.since_unix_s = self._places.since(entry.place, entry.since_unix_s)
        self._feed.add(self._sending)
        async with trio.open_nursery() as nursery:
            while True:
                with trio.move_on_after(EVERY_S if self._is_needed else math.inf):
                    await self._receiving.receive()
                    await trio.sleep(SETTLE_S)
                try:
                    await self._place(nursery)
                    await self._preempt(nursery)
                except VgpuError as error:
                    log.warning("the queue waits", reason=error.message)
                except Exception:  # our own fault; the node goes on, and tries again later
                    log.exception("the queue failed")
                    await trio.sleep(EVERY_S)
                await self._places.keep({place: entry.since_unix_s for place, entry in self._entries.items()})

    @property
    def _is_needed(self) -> bool:
        """Something waits, or may do: at its start the node does not know yet which vGPUs are preempted."""
        return bool(self._entries or self._returning) or self._places.remembers

    def _wake(self) -> None:
        with suppress(trio.WouldBlock):
            self._sending.send_nowait(_WAKE)

    async def _place(self, nursery: trio.Nursery) -> None:
        """Try every request once, in their order. After each success the order is made anew."""
        await self._judge()
        failed: dict[tuple[object, ...], str] = {}
        while True:
            snapshot = await self._survey.snapshot()
            entries = {entry.key: entry for entry in self._entries.values() if not entry.done.is_set()}
            self._block(snapshot, entries.values())
            self._order = self._ordered(snapshot, entries)
            grown = readings_of(None, snapshot, 0.0)
            rooms = {gpu.index: figures.with_what_is_given_back(gpu, grown) for gpu in snapshot.gpus}
            gpus = {gpu.index: gpu for gpu in snapshot.gpus}
            full: dict[tuple[tuple[int, ...], int | None], str] = {}
            for candidate in self._order.candidates:
                await trio.lowlevel.checkpoint()  # a long queue does not hold up the node's other tasks
                if (vgpu := self._returning.get(candidate.request.request_id)) is not None:
                    self._bring_back(vgpu, candidate, snapshot, nursery)
                    continue
                entry = entries[candidate.request.request_id]
                if entry.left or entry.done.is_set():
                    continue
                if entry.blocked:
                    entry.reason = entry.blocked
                    continue
                where = candidate.gpus, candidate.kept
                if candidate.gpus:  # most requests of a long queue end here, in few steps
                    asks = [(entry.asks_of(gpus[index]), rooms[index]) for index in candidate.gpus]
                    if not any(a.time_ppm <= r.time_ppm and a.memory_bytes <= r.memory_bytes for a, r in asks):
                        full[where] = entry.reason = full.get(where) or self._why(entry, candidate, snapshot)
                        continue
                what = entry.kind, candidate.gpus, entry.user if entry.allowance.sections else None
                if what in failed:  # one like it has found no room just now
                    entry.reason = failed[what]
                    continue
                if await self._try(entry, candidate, snapshot):
                    break
                failed[what] = entry.reason
            else:
                return

    async def _judge(self) -> None:
        """Refuse what never fits the quotas. They may be others than when the request came, and so may groups."""
        quotas = self._quotas.quotas
        if quotas is self._judged_by and trio.current_time() < self._judge_at:
            return
        self._judge_at = trio.current_time() + JUDGE_S
        gpus = [gpu for gpu in (await self._survey.snapshot()).gpus if gpu.total_memory_bytes]
        allowances: dict[int, Allowance] = {}
        for entry in list(self._entries.values()):
            uid = entry.owner_uid
            if uid not in allowances:
                try:
                    allowances[uid] = await self._quotas.allowance(uid)
                except VgpuError as error:  # the name service is slow: the admission asks again for each request
                    log.warning("the quotas of users that wait are not known", reason=error.message)
                    return
            entry.allowance = allowances[uid]
            may_have = figures.wanted(entry.request, gpus)
            never = self._quotas.refusal(entry.spec, may_have, entry.allowance, entry.claim)
            if never is not None:
                entry.end(None, never)
        self._judged_by = quotas

    def _block(self, snapshot: Snapshot, entries: Iterable[Entry]) -> None:
        """Find those that their users' quotas keep out now. What a request was judged by is seldom another."""
        if self._quotas.is_trivial:
            for entry in entries:
                entry.judged, entry.blocked = (), ""
            return
        by_user, by_claim = self._quotas.held_now(snapshot)
        gpus = [gpu for gpu in snapshot.gpus if gpu.total_memory_bytes]
        cards = tuple(gpu.total_memory_bytes for gpu in gpus)
        for entry in entries:
            held, of_claims = by_user.get(entry.user, NOTHING), by_claim.get(entry.claim, NOTHING)
            facts = held, of_claims, cards, entry.allowance, self._quotas.quotas
            if facts != entry.judged:
                may_have = figures.wanted(entry.request, gpus)
                refusal = self._quotas.refusal(entry.spec, may_have, entry.allowance, entry.claim, held, of_claims)
                entry.judged, entry.blocked = facts, "" if refusal is None else refusal.message

    async def _try(self, entry: Entry, candidate: Candidate, snapshot: Snapshot) -> bool:
        """Whether the order has changed: the request has its vGPU, or is refused for good."""
        usable = [gpu for gpu in snapshot.gpus if gpu.index in candidate.gpus]
        # Where vGPUs have grown beyond their guarantee, the admission may take that back.
        grown = {reading.gpu for reading in readings_of(None, snapshot, 0.0)}
        ranks = ranked(self._placement, usable, snapshot.vgpus, entry.spec)
        best = [rank.gpu.index for rank in ranks if rank.reasons or rank.gpu.index in grown]
        if not best:
            entry.reason = self._why(entry, candidate, snapshot)
            return False
        try:
            creation = await self._admit(entry, tuple(best))
        except VgpuError as error:
            if error.code in NO_ROOM:
                entry.reason = error.message
                return False
            entry.end(None, error)
            return True
        self._served_s[entry.user] = time.time()
        entry.end(creation)
        return True

    def _bring_back(self, vgpu: VgpuStatus, candidate: Candidate, snapshot: Snapshot, nursery: trio.Nursery) -> None:
        """Begin to resume a preempted vGPU, if its GPU has room. The move of its memory holds up no other request."""
        gpu = next((gpu for gpu in figures.open_gpus(snapshot) if gpu.index == vgpu.gpu_index), None)
        assert vgpu.preempted is not None
        if self._is_expected(vgpu.preempted.key):
            self._preemption.reasons[vgpu.vgpu_id] = "the node waits for the request for which it was preempted"
        elif self._preemption.begins_to_resume(vgpu, gpu, open_to=bool(candidate.gpus)):
            nursery.start_soon(self._preemption.resume, vgpu, self.rules.preempt_after_ns / 1e9)

    def _is_expected(self, key: str) -> bool:
        """After a restart of the node, the client of that request may come back."""
        return any(f"{uid}/{request_id}" == key for request_id, uid in self._places.expected)

    async def _preempt(self, nursery: trio.Nursery) -> None:
        """Begin to suspend vGPUs for the first request that has waited for long enough, and gets room by that."""
        if self.rules.preempt == "off" or self._preemption.in_progress is not None or not self._entries:
            return
        acts, after_s = self._preemption.acts, self.rules.preempt_after_ns / 1e9
        snapshot = await self._survey.snapshot()
        entries = {entry.key: entry for entry in self._entries.values() if not entry.done.is_set()}
        for candidate in self._ordered(snapshot, entries).candidates:
            entry = entries.get(candidate.request.request_id)
            if entry is None or entry.left or entry.blocked or time.time() - entry.since_unix_s < after_s:
                continue
            usable = [gpu for gpu in figures.open_gpus(snapshot) if gpu.index in candidate.gpus]
            plan = self._preemption.plan(entry.spec, self._within_quota(entry, usable, snapshot), snapshot)
            if plan is None:
                continue
            if acts == self._preemption.acts:
                mark = Preempted(entry.owner_uid, entry.request.request_id, entry.spec.priority, time.time())
                self._preemption.in_progress = entry.key, plan.gpu
                nursery.start_soon(self._preemption.suspend, plan, entry.key, mark, after_s)
                self._order = self._ordered(snapshot, entries)  # the GPU is kept from now on
            return

    def _within_quota(self, entry: Entry, gpus: Sequence[GpuStatus], snapshot: Snapshot) -> list[GpuStatus]:
        """By default a vGPU's memory depends on the card's, so it may fit its quota on some GPUs alone."""
        by_user, by_claim = self._quotas.held_now(snapshot)
        now = by_user.get(entry.user, NOTHING), by_claim.get(entry.claim, NOTHING)
        refusal = partial(self._quotas.refusal, entry.spec)
        return [gpu for gpu in gpus if refusal([gpu], entry.allowance, entry.claim, *now) is None]

    def _ordered(self, snapshot: Snapshot, entries: Mapping[str, Entry]) -> Order:
        serving = figures.open_gpus(snapshot)
        self._returning = {vgpu.vgpu_id: vgpu for vgpu in preempted(snapshot)}
        weights = {entry.owner_uid: entry.allowance.quota.weight or 1.0 for entry in entries.values()}
        waiting = [
            Waiting(
                key,
                entry.user,
                entry.since_unix_s,
                entry.sizes(figures.wanted(entry.request, serving)),
                entry.allowance.quota.weight or 1.0,
                PRIORITIES[entry.spec.priority],
                bool(entry.blocked),
            )
            for key, entry in entries.items()
        ]
        for vgpu_id, vgpu in self._returning.items():
            user, weight = self._quotas.source(vgpu.owner_uid), weights.get(vgpu.owner_uid, 1.0)
            own = [gpu for gpu in serving if gpu.index == vgpu.gpu_index]
            since_s = vgpu.created_unix_s if vgpu.preempted is None else vgpu.preempted.since_unix_s
            size = figures.parts((gpu, request(vgpu.spec, gpu)) for gpu in own)
            waiting.append(Waiting(vgpu_id, user, since_s, size, weight, PRIORITIES[vgpu.spec.priority]))
        return ordered(
            time.time(),
            waiting,
            figures.held(snapshot, self._quotas.source, self._returning),
            {gpu.index: figures.room(gpu) for gpu in serving},
            self.rules.patience_ns / 1e9,
            self._served_s,
            self._preemption.kept(
                snapshot, {key: entry.spec for key, entry in entries.items() if not (entry.left or entry.blocked)}
            ),
        )

    @staticmethod
    def _why(entry: Entry, candidate: Candidate, snapshot: Snapshot) -> str:
        return figures.why(figures.wanted(entry.request, figures.open_gpus(snapshot)), candidate.gpus, candidate.kept)

    # --- what is refused at once

    def _check(self, entry: Entry, snapshot: Snapshot) -> None:
        """``VgpuError``: the queue is full, or the request fits no GPU even when it is empty. A request that is asked
        for again takes its own place."""
        others = [other for place, other in self._entries.items() if place != entry.place]
        own = sum(other.user == entry.user for other in others)
        exempt = entry.user in {0, os.geteuid()}
        if len(others) >= self.rules.most:
            raise VgpuError(ErrorCode.FULL, f"{counted(self.rules.most, 'request')} wait already", "try again later")
        if own >= self.rules.most_per_user and not exempt:
            raise VgpuError(
                ErrorCode.FULL,
                f"{counted(own, 'request')} of yours wait already, the most by [queue] most_per_user",
                "see: vgpuctl queue",
            )
        gpus = [gpu for gpu in snapshot.gpus if gpu.total_memory_bytes]
        may_have = figures.wanted(entry.request, gpus)
        if may_have and not entry.sizes(may_have):
            largest = max(gpu.total_memory_bytes for gpu in may_have)
            asked = format_bytes(entry.spec.memory_on(largest))
            raise VgpuError(
                ErrorCode.NO_ROOM,
                f"no GPU ever has room for {as_options(entry.spec.model_dump(exclude_defaults=True))}: "
                f"{asked} are asked for, and the largest has {format_bytes(largest)}",
                f"--mem {format_bytes(largest).replace(' ', '')} at most",
            )


_BEHIND: Final = "it has not been tried yet"
_WAKE: Final = EventReading(at_unix_s=0.0, kind="queue", gpu_index=0, text="")
