"""How moves are carried out, with programs that are played and a clock that runs when everybody waits."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from cython_ext.pages.storepage import STORE_BLOCK_BYTES, STORE_SEGMENT_BLOCKS
from cython_ext.readings import SlotState, Where
from gpuserver.core.scheduler.leases import VgpuIndex
from gpuserver.core.states.migration import AT_REST
from gpuserver.core.states.residency import STORE_SLACK_BYTES, HostMemory
from gpuserver.core.states.together import MemberResidence
from gpuserver.runtime.memory import groups, places, swapping
from gpuserver.runtime.memory.stores import Stores
from gpuserver.runtime.memory.swapping import Swapping
from gpuserver.runtime.vgpus import Vgpu
from tests.tiers import slow
from vgpu.identity import Process
from vgpu.protocol.peer import start_time
from vgpu.share import Priority

GIB = 1 << 30
STEP_S = 0.004
SEGMENT_BYTES = STORE_SEGMENT_BLOCKS * STORE_BLOCK_BYTES
CARD = 100 * GIB
OWNED = 80 * GIB
"""Of such, one is on the card at a time."""


class Played:
    """A vGPU with one program, whose hook moves ``out`` and ``into`` the card so many bytes a second.

    ``refuses``: so often the driver has no room when half of it has come, or ``failure`` instead.
    ``stuck_s``: until then it cannot leave. ``is_stopped``, ``is_running``: what the kernel says of it.
    ``told``: what its page said, in order.
    """

    swaps, lends_memory, room_bytes, pending_bytes = True, False, 0, 0
    programs: tuple[Process, ...] = ()
    activity: Any = object()

    def __init__(self, name: str, key: int, where: Where = Where.RESIDENT) -> None:
        owner, share = SimpleNamespace(uid=1), SimpleNamespace(priority=Priority.NORMAL)
        self.tenant = owner.uid
        self.group_wants, self.group_awaits, self.idle_suspended = False, "", ()
        spec = SimpleNamespace(group=None)
        self.record = SimpleNamespace(vgpu_id=name, key=VgpuIndex(key), owner=owner, share=share, spec=spec)
        self.record.memory_limit_bytes = CARD
        self.share = None
        self.grants = SimpleNamespace(present_bytes=0, spare_bytes=0)
        self.removed, self.lifecycle_lock, self.passage = trio.Event(), trio.Lock(), AT_REST
        self.swapped_out = self.quiesced = self.expected = False
        self.swaps_out = self.swaps_in = 0
        self.where = where
        self.away_bytes = OWNED if where is Where.AWAY else 0
        self.out = self.into = 80 * GIB
        self.refuses, self.stuck_s, self.failure = 0, 0.0, Where.KEPT_AWAY
        self.is_stopped: Callable[[], bool] = lambda: False
        self.is_running = True
        self.told: list[bool] = []
        self.passes: list[bool] = []

    @property
    def alive(self) -> list[SimpleNamespace]:
        where = {
            "where": self.where,
            "undrained": 0,
            "moved_ns": 0,
            "pinned_ns": 0,
            "clean_blocks": 0,
            "move_result": 1,
        }
        return [SimpleNamespace(state=SlotState.ACTIVE, pid=self.record.key, start_time=1, **where)]

    movable_bytes = OWNED

    @property
    def here_bytes(self) -> int:
        return self.movable_bytes - self.away_bytes

    borrowed_bytes = here_bytes

    def place(self, *, on_card: bool) -> None:
        self.told.append(on_card)

    def pass_others(self, passes: bool) -> None:
        self.passes.append(passes)

    @property
    def left(self) -> int:
        """How often it was told to."""
        return sum(not on_card and before for before, on_card in zip([True, *self.told], self.told, strict=False))

    def step(self) -> None:
        if not self.told or not self.is_running or self.is_stopped():
            return
        if self.told[-1]:
            self._comes()
        elif trio.current_time() < self.stuck_s:
            self.where = Where.STUCK
        elif self.where is not Where.AWAY:
            self.away_bytes = min(OWNED, self.away_bytes + int(self.out * STEP_S))
            self.where = Where.AWAY if self.away_bytes == OWNED else Where.MOVING

    def _comes(self) -> None:
        if self.where in {Where.RESIDENT, self.failure}:
            return
        self.where = Where.MOVING
        if self.refuses and self.here_bytes >= OWNED // 2:
            self.refuses -= 1
            self.where = self.failure
            return
        allowed = self.grants.present_bytes or OWNED
        self.away_bytes -= max(0, min(int(self.into * STEP_S), allowed - self.here_bytes))
        if self.away_bytes == 0:
            self.where = Where.RESIDENT


class Stage:
    """A server with these vGPUs, all of which always want the GPU. ``begun``: whose moves began; ``events``: kinds."""

    def __init__(self, *played: Played) -> None:
        self.played = played
        self.begun: list[str] = []
        self.events: list[str] = []

        async def have(*_: object) -> str:
            return ""

        vgpus = {vgpu.record.vgpu_id: vgpu for vgpu in played}
        tokens = SimpleNamespace(
            park=lambda key: None,
            unpark=lambda key, share: None,
            wants=lambda key: True,
            last_event_ns=lambda key: 0,
        )
        self.state = SimpleNamespace(
            settings=SimpleNamespace(host_memory_bytes=1 << 40),
            registry=SimpleNamespace(guaranteed_memory_bytes=0),
            facts=SimpleNamespace(index=0, total_memory_bytes=CARD, numa_node=None),
            record_event=lambda kind, vgpu, text, **more: self.events.append(kind),
            vgpus=vgpus,
            tokens=tokens,
            at_enlist=[],
            at_strike_off=[],
            gangs=SimpleNamespace(tell=lambda residences: None),
        )
        memory = SimpleNamespace(outside=(), left_bytes=0, readings=1)
        self.swapping = Swapping(cast(Any, self.state), cast(Any, memory))
        stores = {"lacks": lambda *_: "", "have": have, "have_room_for": lambda _: False, "host": HostMemory()}
        self.swapping.stores = cast(Any, SimpleNamespace(take_first=lambda *_: None, **stores))

    async def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Until that is so, and for that long at most."""
        begin = self.swapping._begin

        def begins(vgpu: Vgpu, *rest: Any, **more: Any) -> Any:
            assert not vgpu.lifecycle_lock.locked(), "another move of it is under way"
            self.begun.append(vgpu.record.vgpu_id)
            return begin(vgpu, *rest, **more)

        self.swapping._begin = begins  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            self.state.nursery = nursery
            for vgpu in self.played:
                self.swapping.enlist(cast(Vgpu, vgpu))
            nursery.start_soon(self.swapping.run)
            with trio.move_on_after(seconds):
                while not until():
                    for vgpu in self.played:
                        vgpu.step()
                    await trio.sleep(STEP_S)
            nursery.cancel_scope.cancel()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stage]:
    """Makes one; what the kernel says of processes is what is played."""

    def make(*played: Played) -> Stage:
        def program(process: Process) -> Played:
            return next(vgpu for vgpu in played if vgpu.record.key == process.pid)

        # The machine has run for a while.
        clock = SimpleNamespace(monotonic_ns=lambda: int((trio.current_time() + 1000) * 1e9))
        for module in (groups, places, swapping):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(swapping, "is_stopped", lambda process: program(process).is_stopped())
        monkeypatch.setattr(swapping, "is_running", lambda process: program(process).is_running)
        return Stage(*played)

    return make


def play(scene: Callable[[], Any]) -> None:
    trio.run(scene, clock=MockClock(autojump_threshold=0))


def test_host_memory_of_programs_counts_in_whichever_order_their_vgpus_are_removed(stage: Callable[..., Stage]) -> None:
    a, b = Played("a", 1), Played("b", 2)
    found, myself = stage(a, b), Process(os.getpid(), start_time(os.getpid()))
    a.programs = (myself,)
    found.swapping.stores = stores = Stores(SEGMENT_BYTES)
    stores.of(1).grow(1)
    for vgpu in (a, b):
        vgpu.removed.set()
        found.swapping.forget(cast(Vgpu, vgpu))
    stores.sweep(1, set())
    assert stores.ready_bytes == SEGMENT_BYTES


def test_an_allocation_that_waits_for_room_makes_it_no_smaller(stage: Callable[..., Stage]) -> None:
    """It reserves what it asks for at each try. The server may read its slot just then."""

    class Tries(Played):
        borrowed_bytes = property(lambda self: self.here_bytes + GIB)  # type: ignore[assignment]
        pending_bytes = GIB

    async def scene() -> None:
        rooms = []
        for vgpu in (Played("a", 1), Tries("a", 1)):
            found = stage(vgpu)
            found.swapping.enlist(cast(Vgpu, vgpu))
            rooms.append(found.swapping.room_bytes)
        assert rooms[0] == rooms[1]

    play(scene)


def test_they_take_turns(stage: Callable[..., Stage]) -> None:
    async def scene() -> None:
        a, b = Played("a", 1), Played("b", 2, Where.AWAY)
        found = stage(a, b)
        await found.run(60, until=lambda: min(a.left, b.left) >= 2)
        assert min(a.left, b.left) >= 2
        assert set(found.events) == {"swapped-in", "swapped-out"}
        assert {*a.passes} == {*b.passes} == {False, True}  # one leaves while the other comes

    play(scene)


def test_a_suspended_vgpu_costs_ten_steps_a_second_until_the_bell_rings(stage: Callable[..., Stage]) -> None:
    async def scene() -> None:
        a = Played("a", 1, Where.AWAY)
        a.quiesced, a.swapped_out = True, True
        found, steps = stage(a), list[float]()
        step = found.swapping._step
        found.swapping._step = lambda: steps.append(trio.current_time()) or step()  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.run, 20.0)
            await trio.sleep(5)
            steps.clear()
            await trio.sleep(10)
            assert len(steps) <= 10 / swapping.CALM_S + 1
            a.quiesced = False
            found.swapping.step_now()
            steps.clear()
            await trio.sleep(swapping.LOOK_S)
            assert steps
            assert found.begun[-1] == "a"
            nursery.cancel_scope.cancel()

    play(scene)


def test_who_leaves_again_after_a_return_that_failed_does_nothing_else_meanwhile(stage: Callable[..., Stage]) -> None:
    """For longer than nobody asks it again: what it has on the card is its own, and no reason to call it hopeless."""

    async def scene() -> None:
        a, b = Played("a", 1, Where.AWAY), Played("b", 2)
        a.refuses, a.out = 1, 8 * GIB
        found = stage(a, b)
        await found.run(60, until=lambda: a.where is Where.RESIDENT)
        assert a.where is Where.RESIDENT
        assert "no-room" not in found.events

    play(scene)


def test_no_room_is_kept_free_after_a_move_back_that_the_driver_fails(stage: Callable[..., Stage]) -> None:
    async def scene() -> None:
        a = Played("a", 1, Where.AWAY)
        a.refuses, a.failure = 1, Where.FAILED_BACK
        found = stage(a)
        await found.run(60, until=lambda: a.where is Where.RESIDENT)
        assert a.where is Where.RESIDENT
        assert found.events.count("stuck") == 1
        assert found.swapping._short.bytes_ == 0

    play(scene)


def test_nobody_leaves_for_a_program_that_was_stopped_half_way(stage: Callable[..., Stage]) -> None:
    async def scene() -> None:
        a, b = Played("a", 1, Where.AWAY), Played("b", 2)
        a.is_stopped = lambda: a.here_bytes > 0 and trio.current_time() < began + 60
        began = trio.current_time()
        found = stage(a, b)
        await found.run(60)
        assert b.left <= 1  # it came, and was stopped then
        assert found.events.count("stuck") <= 2

    play(scene)


@pytest.mark.parametrize("sizes", [(1,), *slow((1, 2))], ids=["one size", "another size each time"])
def test_who_takes_nothing_of_what_it_says_it_waits_for_is_passed_over(
    stage: Callable[..., Stage], sizes: tuple[int, ...]
) -> None:
    class Liar(Played):
        movable_bytes = GIB
        said = random.Random(1)
        room_bytes = property(lambda self: self.said.choice(sizes) * GIB)  # type: ignore[assignment]

    async def scene() -> None:
        a, b, liar = Played("a", 1), Played("b", 2, Where.AWAY), Liar("liar", 3)
        found = stage(a, b, liar)
        await found.run(60, until=lambda: min(a.left, b.left) >= 2)
        assert min(a.left, b.left) >= 2

    play(scene)


@pytest.mark.parametrize("unused", [GIB // 8, 2 * GIB])
def test_others_leave_for_an_allocation_that_the_driver_refuses_though_the_books_have_room(
    stage: Callable[..., Stage], unused: int
) -> None:
    """The driver keeps more of the card for itself than the books know."""

    async def scene() -> None:
        a = Played("a", 1)

        class Refused(Played):
            movable_bytes = CARD - OWNED - unused
            room_bytes = property(lambda self: 0 if a.left else GIB // 16)  # type: ignore[assignment]

        found = stage(a, Refused("b", 2))
        await found.run(30, until=lambda: a.left > 0)
        assert a.left > 0

    play(scene)


@pytest.mark.parametrize("same", [False, True])
def test_only_an_allocation_that_tries_all_the_while_is_refused_by_the_driver(
    stage: Callable[..., Stage], same: bool
) -> None:
    """A program that allocates and frees in a loop waits for room at every step of the server, too."""

    async def scene() -> None:
        vgpu = Played("a", 1)
        vgpu.room_bytes = GIB // 16
        found = stage(vgpu)
        place, now_ns = places.SwapState(), places.time.monotonic_ns()
        place.offered_ns = now_ns - 2 * swapping.TAKE_NS
        place.room_ns = place.offered_ns if same else now_ns
        found.swapping._pass_over(cast(Vgpu, vgpu), place, now_ns, offered=True)
        assert (place.failures, place.refused, found.swapping._short.bytes_ > 0) == (1, same, same)

    play(scene)


def test_an_allocation_that_waits_when_the_server_begins_is_not_yet_refused(stage: Callable[..., Stage]) -> None:
    async def scene() -> None:
        class Waits(Played):
            movable_bytes = GIB
            room_bytes = GIB // 16

        a = Played("a", 1)
        found = stage(a, Waits("b", 2))
        await found.run(swapping.TAKE_NS / 2e9)
        assert (a.left, found.swapping._short.bytes_) == (0, 0)

    play(scene)


@pytest.mark.slow
def test_a_program_that_is_traced_is_moved_as_any_other(stage: Callable[..., Stage]) -> None:
    """At any moment it may be seen stopped, for microseconds."""

    async def scene() -> None:
        a, b = Played("a", 1), Played("b", 2, Where.AWAY)
        chance = random.Random(1)
        a.is_stopped = lambda: chance.random() < 0.3
        found = stage(a, b)
        await found.run(60)
        assert min(a.left, b.left) >= 2
        assert "stuck" not in found.events

    play(scene)


def test_a_program_that_is_no_more_is_not_waited_for(stage: Callable[..., Stage]) -> None:
    """Its broker, which would say so, may have been stopped."""

    async def scene() -> None:
        a, b = Played("a", 1), Played("b", 2, Where.AWAY)
        a.is_running = False
        found = stage(a, b)
        await found.run(10, until=lambda: b.here_bytes > 0)
        assert b.here_bytes > 0
        assert "stuck" not in found.events

    play(scene)


def test_what_is_suspended_leaves_once_it_can_and_stays_away(stage: Callable[..., Stage]) -> None:
    """The server that had begun to suspend it is no more."""

    async def scene() -> None:
        a, b = Played("a", 1), Played("b", 2, Where.AWAY)
        a.quiesced, a.stuck_s = True, trio.current_time() + 20
        found = stage(a, b)
        await found.run(60, until=lambda: b.where is Where.RESIDENT and a.where is Where.AWAY)
        assert (a.where, b.where) == (Where.AWAY, Where.RESIDENT)
        assert not any(a.told)
        assert found.events.count("stuck") <= 1

    play(scene)


def test_a_migration_that_cannot_end_stops_nobody_else(stage: Callable[..., Stage]) -> None:
    async def scene() -> None:
        leaver = Played("leaver", 3, Where.AWAY)
        leaver.swaps, leaver.activity = False, None
        leaver.passage = cast(Any, SimpleNamespace(leaving=1))
        a, b = Played("a", 1), Played("b", 2, Where.AWAY)
        found = stage(a, b)
        found.state.vgpus["leaver"] = leaver
        await found.run(30, until=lambda: b.where is Where.RESIDENT)
        assert (b.where, a.left) == (Where.RESIDENT, 1)

    play(scene)


def test_a_vgpu_that_is_there_before_the_others_of_its_group_has_no_leases(stage: Callable[..., Stage]) -> None:
    """For a bounded time. Others wait for its room meanwhile."""

    async def scene() -> None:
        rank, lone = Played("rank", 1, Where.AWAY), Played("lone", 2)
        rank.record.spec.group = "job"
        found = stage(rank, lone)
        others = {1: MemberResidence(wants=True, ready=True)}
        given: list[VgpuIndex] = []
        found.state.tokens.unpark = lambda key, share: given.append(key)
        found.state.gangs.residents = lambda key: others

        async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
            with trio.fail_after(seconds):
                while not condition():  # noqa: ASYNC110 - what is waited for is played
                    await trio.sleep(STEP_S)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.run, 300)
            await until(lambda: rank.where is Where.RESIDENT)
            left = rank.left
            await trio.sleep(30)
            assert (rank.where, rank.left) == (Where.RESIDENT, left)
            assert rank.record.key not in given
            assert rank.group_awaits == "the vGPU of its group on GPU 1 has no room yet"
            others[1] = MemberResidence(granted=True, there=True)
            await until(lambda: rank.record.key in given)
            others[1] = MemberResidence(wants=True)
            await until(lambda: lone.where is Where.RESIDENT)
            assert rank.where is Where.AWAY
            nursery.cancel_scope.cancel()

    play(scene)


@pytest.mark.parametrize("growth_first", [True, False])
def test_stores_grow_ahead_for_what_is_owned_in_whichever_order_the_tasks_began(
    stage: Callable[..., Stage], *, growth_first: bool
) -> None:
    asked: list[tuple[int, int]] = []

    async def ahead(tenant: int, bytes_: int) -> bool:
        asked.append((tenant, bytes_))
        return False

    async def scene() -> None:
        owner, liar = Played("owner", 1), Played("liar", 2)
        owner.tenant, liar.tenant = 7, 8
        owner.record.memory_limit_bytes, liar.record.memory_limit_bytes = 2 * OWNED, OWNED // 2
        found = stage(owner, liar)
        stores = SimpleNamespace(have_ahead=ahead, have_room_for=lambda wanted: True)
        found.swapping.stores = cast(Any, SimpleNamespace(**(vars(found.swapping.stores) | vars(stores))))
        tasks = [found.swapping.run, found.swapping.grow_ahead]
        async with trio.open_nursery() as nursery:
            found.state.nursery = nursery
            for task in reversed(tasks) if growth_first else tasks:
                nursery.start_soon(task)
                await wait_all_tasks_blocked()
            assert not asked
            for vgpu in found.played:
                found.swapping.enlist(cast(Vgpu, vgpu))
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        assert {*asked} == {(7, OWNED + STORE_SLACK_BYTES), (8, OWNED // 2 + STORE_SLACK_BYTES)}

    play(scene)
