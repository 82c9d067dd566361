"""The node's queue on its own: fairness by what users got last, quotas that keep requests out, ends that meet."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import trio
import trio.testing

from tests.ctl.fake_node import vgpu_reading
from tests.placement.test_box import gpu
from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Process
from vgpu.limits import Limits
from vgpu.node.creation import Creation
from vgpu.node.sources import Owners
from vgpu.node.tenancy.admission import Admission
from vgpu.node.tenancy.entry import Entry
from vgpu.node.tenancy.places import PlaceKeeper
from vgpu.node.tenancy.queue import NO_ROOM, Queue
from vgpu.node.tenancy.quotas import NodeQuotas
from vgpu.protocol.messages import Create, GpuStatus, Snapshot, VgpuStatus
from vgpu.queueing.rules import QueueRules
from vgpu.quotas.quota import NO_QUOTAS, Quotas
from vgpu.spec import VgpuSpec

LONG_NS = 10**18


def on_its_own_clock(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """The test runs on a clock that jumps whenever all tasks wait."""

    def run() -> None:
        trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))

    run.__name__ = test.__name__
    return run


@dataclass
class Made:
    """A creation that notes its end."""

    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass
class Bench:
    """A queue over figures of GPUs. ``admitted``: the names, in the order in which they got their vGPUs."""

    quotas: NodeQuotas
    gpus: tuple[GpuStatus, ...] = (gpu(0, 1.0), gpu(1, 1.0))
    vgpus: tuple[VgpuStatus, ...] = ()
    tried: list[str] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    then: Callable[[Entry], None] = lambda entry: None

    def __post_init__(self) -> None:
        self.queue = Queue(
            cast(Any, self),
            cast(Any, self),
            cast(PlaceKeeper, self),
            self.quotas,
            self.admit,
            cast(Any, self),
            placement="spread",
            rules=QueueRules(patience_ns=LONG_NS),
        )

    # --- what the queue asks: survey, feed, places

    async def snapshot(self) -> Snapshot:
        await trio.lowlevel.checkpoint()
        return Snapshot.model_construct(gpus=self.gpus, vgpus=self.vgpus)

    def add(self, _: object) -> None: ...

    async def read(self) -> None: ...

    async def keep(self, _: object) -> None: ...

    def since(self, _: object, otherwise: float) -> float:
        return otherwise

    remembers = False
    expected: ClassVar[frozenset[object]] = frozenset()

    async def admit(self, entry: Entry, gpus: tuple[int, ...]) -> Creation:
        self.tried.append(entry.spec.name or "")
        await trio.lowlevel.checkpoint()
        self.then(entry)
        self.admitted.append(entry.spec.name or "")
        self.made.append(Made())
        return cast(Creation, self.made[-1])

    # --- what a test does

    async def entry(self, name: str, uid: int, since_s: float, sm: int = 50, request_id: str = "") -> Entry:
        spec = VgpuSpec.parse(sm_percent=sm, memory_bytes="1G", name=name)
        request = Create(spec=spec, request_id=request_id or name)
        asker = Process(1, 1)
        allowance = await self.quotas.allowance(uid)
        return Entry(request, spec, allowance, uid, asker, self.quotas.source(uid), time.time() - 100 + since_s)


def bench(quotas: dict[str, Any] | None = None, owners: Owners | None = None) -> Bench:
    asked = NO_QUOTAS if quotas is None else Quotas.model_validate(quotas)
    return Bench(NodeQuotas(asked, lambda: owners or Owners()))


@asynccontextmanager
async def running(made: Bench) -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.queue.run)
        yield nursery
        nursery.cancel_scope.cancel()


async def settled() -> None:
    await trio.sleep(0.5)


def taken(name: str, uid: int, sm: int, index: int = 0) -> VgpuStatus:
    spec = VgpuSpec.parse(sm_percent=sm, memory_bytes="1G")
    return vgpu_reading(vgpu_id=f"vgpu-{name}", owner_uid=uid, gpu_index=index, spec=spec)


@on_its_own_clock
async def test_of_users_that_hold_the_same_the_next_is_the_one_served_longest_ago() -> None:
    made = bench()
    async with running(made) as nursery:
        for number, (name, uid) in enumerate([("ann0", 1), ("ann1", 1), ("bob0", 2)]):
            entry = await made.entry(name, uid, number)
            nursery.start_soon(made.queue.wait, entry, 60)
        await settled()
        made.gpus = (gpu(0, 0.0), gpu(1, 1.0))
        made.then = lambda _: setattr(made, "gpus", (gpu(0, 1.0), gpu(1, 1.0)))
        await _until(lambda: made.admitted == ["ann0"])
        made.gpus = (gpu(0, 0.0), gpu(1, 1.0))
        await _until(lambda: len(made.admitted) == 2)
    assert made.admitted == ["ann0", "bob0"]


@on_its_own_clock
async def test_no_gpu_is_kept_for_a_request_that_its_quota_keeps_out() -> None:
    made = bench({"sm_total": 100})
    made.vgpus = (taken("one", 1, 50), taken("two", 1, 50))
    made.queue.rules = QueueRules(patience_ns=10**9)
    async with running(made) as nursery:
        nursery.start_soon(made.queue.wait, await made.entry("ann", 1, 0), 60)
        nursery.start_soon(made.queue.wait, await made.entry("bob", 2, 1), 60)
        await settled()
        assert set(made.queue.kept.values()) == {"2/bob"}
        reasons = {one.spec.name: one.reason for one in made.queue.reading().waiting}
        assert "uid 1 has 100 % of the 100 % of a GPU that the quota of everyone allows" in reasons["ann"]
        assert reasons["bob"].startswith("GPU 0, the emptiest, has 0 %")
        made.vgpus = (taken("one", 1, 50),)
        await _until(lambda: set(made.queue.kept.values()) == {"1/ann", "2/bob"})
    assert made.tried == []


@on_its_own_clock
async def test_a_request_that_new_quotas_never_allow_is_refused() -> None:
    made = bench()
    async with running(made) as nursery:
        refused: list[VgpuError] = []

        async def wait() -> None:
            with pytest.raises(VgpuError) as error:
                await made.queue.wait(await made.entry("ann", 1, 0), 60)
            refused.append(error.value)

        nursery.start_soon(wait)
        await settled()
        made.quotas.quotas = Quotas.model_validate({"sm": 40})
        await _until(lambda: bool(refused))
    assert refused[0].code is ErrorCode.QUOTA
    assert len(made.queue) == 0


@on_its_own_clock
async def test_the_same_request_on_another_link_takes_over_and_no_creation_is_lost() -> None:
    made = bench()
    made.gpus = (gpu(0, 0.0), gpu(1, 1.0))
    ends: list[object] = []

    async def wait(entry: Entry) -> None:
        try:
            ends.append(await made.queue.wait(entry, 60))
        except VgpuError as error:
            ends.append(error.code)

    async with running(made) as nursery:
        first = await made.entry("ann", 1, 0, request_id="same")
        second = await made.entry("ann", 1, 0, request_id="same")

        def comes_back(_: Entry) -> None:
            """While the GPU Server answers, the client comes back on another link."""
            made.then = lambda _: None
            first.end(None, VgpuError(ErrorCode.EXISTS, "the same request waits on another link now"))

        made.then = comes_back
        nursery.start_soon(wait, first)
        await _until(lambda: len(ends) == 1)
        nursery.start_soon(wait, second)
        await _until(lambda: len(ends) == 2)
    assert ends == [ErrorCode.EXISTS, made.made[1]]
    assert [one.closed for one in made.made] == [True, False]
    late = await made.entry("late", 1, 0)
    late.end(cast(Creation, made.made[1]))
    late.end(None, VgpuError(ErrorCode.EXISTS, ""))
    assert late.creation is made.made[1]


@on_its_own_clock
async def test_what_subordinate_uids_hold_counts_as_their_owners() -> None:
    made = bench(owners=Owners((100_000,), ((65_536, 1),)))
    made.vgpus = (taken("inside", 100_007, 50),)
    async with running(made) as nursery:
        nursery.start_soon(made.queue.wait, await made.entry("ann", 1, 0), 60)
        nursery.start_soon(made.queue.wait, await made.entry("bob", 2, 1), 60)
        await settled()
        assert [one.spec.name for one in made.queue.reading().waiting] == ["bob", "ann"]


@on_its_own_clock
async def test_many_at_once_never_exceed_what_one_user_may_have_waiting() -> None:
    made = bench()
    made.queue.rules = QueueRules(most_per_user=3, most=5)
    refused: list[str] = []

    async def wait(name: str, uid: int) -> None:
        try:
            await made.queue.wait(await made.entry(name, uid, 0), 60)
        except VgpuError as error:
            refused.append(error.message)

    async with running(made) as nursery:
        for number in range(8):
            nursery.start_soon(wait, f"ann{number}", 1)
        await settled()
        assert len(made.queue) == 3
        assert len(refused) == 5
        nursery.start_soon(wait, "ann0", 1)  # the same request again takes its own place
        await settled()
        assert len(made.queue) == 3


def test_by_default_a_user_with_all_that_may_wait_can_still_ask_and_remove() -> None:
    assert QueueRules().most_per_user + 16 <= Limits().links_per_user


@on_its_own_clock
async def test_a_gpu_server_that_dies_during_an_admission_is_a_reason_to_wait() -> None:
    """What the link raises would end the queue's task, and so the node."""
    admission = Admission.__new__(Admission)
    admission._forwarder = cast(Any, SimpleNamespace(served=_served))
    admission._survey = cast(Any, SimpleNamespace(note=lambda _: None))
    request = Create(spec=VgpuSpec.parse(sm_percent=10, memory_bytes="1G"), request_id="one")
    for ended in (ConnectionResetError("reset"), BrokenPipeError("pipe"), trio.BrokenResourceError()):

        async def begin(_: Creation, error: Exception = ended) -> VgpuStatus:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Creation, "begin", begin)
            with pytest.raises(VgpuError, match="GPU 0 has ended") as refused:
                await admission._begin(gpu(0), request, 1, Process(1, 1))
        assert refused.value.code in NO_ROOM


async def _served(_: int) -> None:
    return None


async def _until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not holds():  # noqa: ASYNC110 - what is awaited is a figure of several objects
            await trio.sleep(0.01)
