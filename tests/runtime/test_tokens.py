"""The token loop with a real dispatcher and a real scheduler; relays are played."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import trio

from cython_ext.dispatch.dispatcher import Dispatcher
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.pages.relaypage import RelayPage
from cython_ext.readings import GrantsFlag
from cython_ext.testing.fake_peer import Voice
from gpuserver.core.observe.trace import Recorder
from gpuserver.core.scheduler.leases import AccountState
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, Policy
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from gpuserver.runtime.leases import tokens
from gpuserver.runtime.leases.tokens import TokenLoop
from tests.native.stage import grants
from vgpu.protocol.trace import LeaseRecord
from vgpu.share import PPM, Share

HALF = Share(PPM // 2, sm_mpercent=50_000)


class Card:
    """Some vGPUs, two as a rule, their pages, and the loop that serves them."""

    def __init__(
        self,
        kind: type[TemporalScheduler | SpatialScheduler],
        shares: Sequence[Share] = (HALF, HALF),
        first_epoch: int = 1,
        policy: Policy = DEFAULT_POLICY,
    ) -> None:
        self.relays = RelayPage.create()
        self.dispatcher = Dispatcher(self.relays)
        self.loop = TokenLoop(kind(policy, first_epoch=first_epoch), self.dispatcher)
        self.pages: list[GrantsPage] = [grants() for _ in shares]
        self.voices = [Voice(self.relays, key) for key in range(len(shares))]
        for key, (page, share) in enumerate(zip(self.pages, shares, strict=True)):
            self.loop.add(key, page, share)

    def contended(self) -> list[bool]:
        return [bool(page.flags & GrantsFlag.CONTENDED) for page in self.pages]

    def play(self, act: Callable[[], Awaitable[None]]) -> None:
        async def scene() -> None:
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.loop.run)
                    await act()
                    nursery.cancel_scope.cancel()

        trio.run(scene)


@pytest.fixture
def card(request: pytest.FixtureRequest) -> Iterator[Card]:
    found = Card(getattr(request, "param", TemporalScheduler))
    yield found
    found.dispatcher.close()


def granted(page: GrantsPage) -> bool:
    """Whether the lease that it shows is one that begins without its word."""
    current = page.plan().current
    return current is not None and current.go_by_ns is not None


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a word in shared memory tells nobody that it has changed
        await trio.sleep(0.001)


def test_an_idle_vgpu_has_go_without_the_loop(card: Card) -> None:
    """Nobody runs the loop: what was published when the vGPU was added is enough."""
    card.voices[1].say(want=True)
    deadline = time.monotonic() + 30
    while not card.pages[1].plan().open_epoch:
        assert time.monotonic() < deadline
    assert card.dispatcher.outstanding(1) == [(2, True)]


def test_a_wish_counts_for_a_second(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "WISH_NS", 60 * 10**9)  # not over while a busy machine has other things to do

    async def act() -> None:
        card.voices[0].say(want=True)
        await until(lambda: card.contended() == [False, True])
        card.voices[0].say(want=False)
        await until(lambda: card.dispatcher.outstanding(0) != [(1, True)])
        card.loop.forget_wishes()
        assert card.contended() == [False, True]
        card.voices[1].say(want=True)
        await until(lambda: card.contended() == [True, True])
        monkeypatch.setattr(tokens, "WISH_NS", 0)  # the second is over, for whoever does not want now
        card.loop.forget_wishes()
        assert card.contended() == [True, False]

    card.play(act)


def test_a_wish_that_nobody_looked_at_is_remembered(card: Card) -> None:
    """The GPU is idle: its lease began, and ended, without a decision."""

    async def act() -> None:
        began_ns = time.monotonic_ns()
        card.voices[1].say(want=True)
        await until(lambda: bool(card.pages[1].plan().open_epoch))
        card.voices[1].say(want=False)
        await until(lambda: card.loop.last_event_ns(1) >= began_ns and not card.loop.wants(1))
        assert card.loop.last_event_ns(0) == 0
        last_event_ns = card.loop.last_event_ns(1)
        card.loop.park(1)
        assert card.loop.last_event_ns(1) >= last_event_ns

    card.play(act)


def test_the_account_of_a_vgpu_is_known_on_the_bench_and_as_it_is_removed(card: Card) -> None:
    """Nobody runs the loop: no time is charged meanwhile."""
    had = AccountState(lag_ns=0, bucket_ns=0, held_ns=9, busy_ns=8, overuse_ns=7, tokens=6)
    card.pages.append(grants())
    card.loop.add(7, card.pages[2], Share(PPM), had)
    assert card.loop.parked_account(7) is None
    card.loop.park(7)
    assert 7 not in card.loop.statements()
    parked_account = card.loop.parked_account(7)
    assert parked_account is not None
    for book in (parked_account, card.loop.remove(7)):
        assert replace(book, lag_ns=0, bucket_ns=0) == had
    assert card.loop.parked_account(7) is None


@pytest.mark.parametrize("card", [TemporalScheduler, SpatialScheduler], indirect=True)
def test_a_debt_to_its_limit_is_paid_as_time_passes_on_the_bench_and_off_it(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swapped out and in again, each stay on the card shorter than its debt takes, it would else be throttled for ever.
    Nobody runs the loop: to the scheduler nothing happens meanwhile."""
    second, passed = 10**9, 0
    clock = time.monotonic_ns
    monkeypatch.setattr(tokens, "time", SimpleNamespace(monotonic_ns=lambda: clock() + passed))
    capped = Share(PPM // 2, PPM // 2, sm_mpercent=50_000)
    card.pages.append(grants())
    card.loop.add(
        7, card.pages[2], capped, AccountState(0, bucket_ns=-10 * second, held_ns=0, busy_ns=0, overuse_ns=0, tokens=0)
    )
    Voice(card.relays, 7).say(want=True)
    trio.run(until, lambda: card.loop.wants(7))
    card.loop.drain_events()

    def debt_s() -> int:
        return round(-card.loop.books()[7].bucket_ns / second)

    assert debt_s() == 10
    passed = 4 * second
    assert debt_s() == 8
    card.loop.park(7)
    passed = 8 * second
    assert debt_s() == 6
    card.loop.change(7, Share(PPM // 4, PPM // 4, sm_mpercent=50_000))
    passed = 12 * second
    assert debt_s() == 5
    card.loop.unpark(7, capped)
    assert debt_s() == 5
    assert card.loop.statements()[7].throttled


def test_nobody_goes_beside_what_a_vgpu_on_the_bench_has_queued() -> None:
    """Its account is gone with its leases; what it had submitted is still on the GPU."""
    card = Card(TemporalScheduler, policy=replace(DEFAULT_POLICY, quantum_min_ns=60 * 10**9))
    try:

        async def act() -> None:
            card.voices[0].say(want=True)
            await until(lambda: card.pages[0].plan().open_epoch == 1)
            card.loop.park(0)
            card.voices[1].say(want=True)
            await until(lambda: granted(card.pages[1]))
            assert card.dispatcher.outstanding(1) == [(2, False)]
            card.voices[0].say(want=True, drained_epoch=1)
            await until(lambda: card.dispatcher.outstanding(1) == [(2, True)])
            card.loop.park(1)
            card.voices[1].say(want=True, drained_epoch=2)
            await until(lambda: not card.dispatcher.outstanding(1))
            card.loop.unpark(0, HALF)
            await until(lambda: card.dispatcher.outstanding(0) == [(3, True)])

        card.play(act)
    finally:
        card.dispatcher.close()


@pytest.mark.parametrize("beside", ["nobody", "later", "before"])
def test_what_a_vgpu_on_the_bench_has_queued_is_charged_to_it_until_somebody_else_is(card: Card, beside: str) -> None:
    """Its lease ends with its place in the competition; what it had submitted does not."""

    async def other_goes() -> int:
        card.voices[1].say(want=True)  # and waits, but not for ever
        await until(lambda: card.dispatcher.outstanding(1)[:1] == [(2, True)])
        went = card.pages[1].plan().current
        assert went is not None
        return went.start_ns

    async def act() -> None:
        card.voices[0].say(want=True)
        await until(lambda: card.pages[0].plan().open_epoch == 1)
        begun = card.pages[0].plan().current
        assert begun is not None
        if beside == "before":
            await other_goes()
        card.loop.park(0)
        before = card.loop.books()[0]
        if beside == "later":
            charged_ns = await other_goes() - begun.start_ns
        elif beside == "before":
            charged_ns = before.held_ns
        await trio.sleep(0.001)
        drained_ns = time.monotonic_ns()
        if beside == "nobody":
            charged_ns = drained_ns - begun.start_ns
        card.voices[0].say(want=True, drained_epoch=1, drained_ns=drained_ns)
        await until(lambda: not card.dispatcher.outstanding(0))
        card.loop.drain_events()
        book = card.loop.books()[0]
        assert book.held_ns == charged_ns
        more_ns = book.held_ns - before.held_ns
        assert (more_ns > 0) == (beside != "before")
        assert (before.lag_ns - book.lag_ns, book.busy_ns - before.busy_ns) == (more_ns, more_ns)
        assert book.overuse_ns - before.overuse_ns == more_ns

    card.play(act)


def test_what_it_had_queued_is_charged_once_however_often_a_vgpu_goes_to_the_bench(card: Card) -> None:
    """Also where it drains when its vGPU has come back, or has had another lease and gone again."""

    async def act() -> None:
        card.voices[0].say(want=True)
        await until(lambda: card.pages[0].plan().open_epoch == 1)
        begun = card.pages[0].plan().current
        assert begun is not None
        card.loop.park(0)
        await trio.sleep(0.001)
        before_ns = time.monotonic_ns()
        card.loop.unpark(0, HALF)
        assert card.loop.books()[0].held_ns >= before_ns - begun.start_ns
        await until(lambda: [went for _, went in card.dispatcher.outstanding(0)] == [True, True])
        last = max(epoch for epoch, _ in card.dispatcher.outstanding(0))
        card.loop.park(0)
        await trio.sleep(0.001)
        drained_ns = time.monotonic_ns()
        card.voices[0].say(want=True, drained_epoch=last, drained_ns=drained_ns)
        await until(lambda: not card.dispatcher.outstanding(0))
        card.loop.drain_events()
        book = card.loop.books()[0]
        assert before_ns - begun.start_ns < book.held_ns <= drained_ns - begun.start_ns

    card.play(act)


@pytest.mark.parametrize("card", [SpatialScheduler], indirect=True)
def test_where_all_fit_nobody_gains_by_a_return(card: Card) -> None:
    async def act() -> None:
        for voice in card.voices:
            voice.say(want=True)
        await until(lambda: all(page.plan().open_epoch for page in card.pages))
        assert card.contended() == [False, False]
        card.loop.change(1, Share(PPM // 2, sm_mpercent=60_000))
        assert card.contended() == [True, True]

    card.play(act)


def test_a_recorder_hears_of_leases_and_hooks_note_while_there_is_one(card: Card) -> None:
    first, second = Recorder(1000), Recorder(1000)

    def traced() -> list[bool]:
        return [bool(page.flags & GrantsFlag.TRACED) for page in card.pages]

    async def act() -> None:
        assert traced() == [False, False]
        card.loop.record(first)
        card.loop.record(second)
        card.voices[0].say(want=True)
        await until(lambda: card.dispatcher.outstanding(0) == [(1, True)])
        card.pages.append(grants())
        card.loop.add(7, card.pages[2], Share(1))
        assert traced() == [True, True, True]
        card.loop.forget_recorder(first)
        card.voices[0].say(want=False)
        await until(lambda: second.waiting > 0)
        card.loop.forget_recorder(second)
        assert traced() == [False, False, False]

    card.play(act)
    assert first.waiting == 0
    (records, lost) = second.take(1000)
    assert lost == 0
    assert [(record.epoch, record.ended) for record in records if isinstance(record, LeaseRecord)] == [(1, "returned")]


def test_a_recorder_that_comes_later_knows_what_is_in_force(card: Card) -> None:
    """Nobody runs the loop: what the dispatcher did and nobody has heard of yet is heard first."""
    card.voices[0].say(want=True)
    trio.run(until, lambda: card.pages[0].plan().open_epoch != 0)
    recorder = Recorder(1000)
    card.loop.record(recorder)
    (running,) = recorder.under_way(time.monotonic_ns())
    assert isinstance(running, LeaseRecord)
    current = card.pages[0].plan().current
    assert current is not None
    assert (running.epoch, running.go_ns, running.ended) == (current.epoch, current.start_ns, "in-force")


def test_a_wide_vgpu_waits_for_as_many_narrow_ones_as_an_mps_server_has_processes() -> None:
    card = Card(SpatialScheduler, [Share(PPM // 2, sm_mpercent=2_000)] * 47 + [Share(PPM // 2, sm_mpercent=100_000)])
    try:

        async def act() -> None:
            for voice in card.voices:
                voice.say(want=True)
            await until(lambda: bool(card.dispatcher.outstanding(47)))

        card.play(act)
    finally:
        card.dispatcher.close()


@pytest.mark.parametrize("first", [2**32 - 4, 2**33 - 4])
def test_leases_go_on_across_the_end_of_the_epoch_circle(first: int) -> None:
    card = Card(TemporalScheduler, first_epoch=first)
    try:

        async def act() -> None:
            for _ in range(6):
                card.voices[0].say(want=True)
                await until(lambda: bool(card.pages[0].plan().open_epoch))
                epoch = card.pages[0].plan().open_epoch
                card.voices[0].say(want=False, returned_epoch=epoch)
                await until(lambda old=epoch: card.dispatcher.outstanding(0)[:1] not in ([], [(old, True)]))  # type: ignore[misc]

        card.play(act)
        assert card.loop.next_epoch > first + 6
        assert 0 < card.dispatcher.outstanding(0)[0][0] < 16
        assert card.loop.snapshot()[0].tokens == 6
    finally:
        card.dispatcher.close()
