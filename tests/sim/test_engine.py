"""The engine against its twin, and the laws that every schedule obeys."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cython_ext.simengine import (
    COPY_IN,
    COPY_OUT,
    EXTERNAL,
    KERNEL,
    LEGACY,
    MARK,
    NONBLOCKING,
    QUEUE,
    WAIT,
    Engine,
)
from tests.sim.twin import Stream, Twin

SMS = 16
SLICE, SWITCH, IDLE_SWITCH = 20, 3, 1


def opened(value: int | None) -> int:
    assert value is not None
    return value


class AgainstTwin(RuleBasedStateMachine):
    """Random work in random streams at random times: every operation starts and ends when the twin says."""

    SERVERS: ClassVar = st.sampled_from([0, 0, 1 << 33])
    CAPS: ClassVar = st.sampled_from([0, 2, 5, 8])

    @initialize(setups=st.lists(st.tuples(SERVERS, CAPS), min_size=1, max_size=3))
    def begin(self, setups: list[tuple[int, int]]) -> None:
        self.engine = Engine(sms=SMS)
        self.engine.set_times(slice_ns=SLICE, switch_ns=SWITCH, idle_switch_ns=IDLE_SWITCH)
        self.twin = Twin(SMS, SLICE, SWITCH, IDLE_SWITCH)
        self.bounds: list[tuple[int, int, int]] = []
        for server, cap in setups:
            context = opened(self.engine.open_context(server=server, sm_cap=cap))
            self.twin.contexts[context] = (server or context + 1, cap or SMS)
            self.open_stream(context, LEGACY, 0)

    def open_stream(self, context: int, flags: int, priority: int) -> None:
        stream = opened(self.engine.open_stream(context, flags=flags, priority=priority))
        assert stream == len(self.twin.streams)
        self.twin.streams.append(Stream(context, flags, priority))

    @precondition(lambda self: len(self.twin.streams) < 8)
    @rule(data=st.data(), flags=st.sampled_from([0, NONBLOCKING]), priority=st.sampled_from([0, 0, -1]))
    def another_stream(self, data: st.DataObject, flags: int, priority: int) -> None:
        self.open_stream(data.draw(st.sampled_from(sorted(self.twin.contexts))), flags, priority)

    @rule(
        data=st.data(),
        kind=st.sampled_from([KERNEL, KERNEL, KERNEL, COPY_IN, COPY_OUT, MARK, WAIT, EXTERNAL]),
        ns=st.integers(1, 60),
        sms=st.integers(1, SMS),
        count=st.integers(1, 4),
    )
    def submit(self, data: st.DataObject, kind: int, ns: int, sms: int, count: int) -> None:
        stream = data.draw(st.integers(0, len(self.twin.streams) - 1))
        wait = None
        if kind == WAIT:
            other = data.draw(st.integers(0, len(self.twin.streams) - 1))
            wait = (other, len(self.twin.streams[other].ops))
        for _ in range(count):
            duration = ns if kind in (KERNEL, COPY_IN, COPY_OUT) else 0
            ordinal = self.engine.submit(stream, kind, duration, sms=sms, wait=wait)
            self.twin.submit(stream, kind, duration, sms, wait)
            self.bounds.append((stream, ordinal, self.engine.earliest(stream, ordinal)))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        stream = data.draw(st.integers(0, len(self.twin.streams) - 1))
        head = self.twin.streams[stream].head
        if head is not None and head.kind == EXTERNAL:
            head.released = True
            self.engine.release(stream, self.twin.streams[stream].done)

    @rule(ns=st.integers(1, 150))
    def pass_time(self, ns: int) -> None:
        self.engine.advance(self.twin.now + ns)
        self.twin.advance(self.twin.now + ns)
        self.compare()

    @rule()
    def somebody_dies_inside(self) -> None:
        self.engine.damage_and_recover()

    def compare(self) -> None:
        for number, stream in enumerate(self.twin.streams):
            assert self.engine.stream(number) == (stream.context, stream.done, len(stream.ops))
            for ordinal, op in enumerate(stream.ops):
                _, remaining, start, end = self.engine.operation(number, ordinal)
                assert (start, end) == (op.start or 0, op.end or 0), f"stream {number}, operation {ordinal}: {op}"
                assert remaining == pytest.approx(float(max(op.remaining, 0)), abs=1e-2)
        for stream, ordinal, bound in self.bounds:
            end = self.twin.streams[stream].ops[ordinal].end
            assert end is None or end >= bound

    @invariant()
    def sm_time_is_conserved(self) -> None:
        if not hasattr(self, "engine"):
            return
        total = sum(context[3] for context in self.engine.contexts().values())
        assert total == pytest.approx(self.engine.sm_ns)
        assert self.engine.sm_ns <= SMS * self.engine.time_ns + 1e-3
        assert self.engine.kernel_ns <= self.engine.time_ns

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.pass_time(200)


TestAgainstTwin = AgainstTwin.TestCase
TestAgainstTwin.settings = settings(stateful_step_count=30, deadline=None)


def busy_engine(contexts: int, kernel_ns: int, count: int, **options: int) -> tuple[Engine, list[int]]:
    engine = Engine(**options)
    streams = []
    for _ in range(contexts):
        stream = opened(engine.open_stream(opened(engine.open_context())))
        for _ in range(count):
            engine.submit(stream, KERNEL, kernel_ns)
        streams.append(stream)
    return engine, streams


def test_one_context_has_the_gpu_to_itself() -> None:
    engine, (stream,) = busy_engine(1, 300_000, 100)
    engine.advance(1 + 100 * 300_000)
    assert engine.stream(stream)[1] == 100
    assert engine.kernel_ns == 100 * 300_000


@given(contexts=st.integers(2, 6), kernel_ns=st.integers(50_000, 5_000_000))
def test_time_slicing_is_fair_and_costs_six_percent(contexts: int, kernel_ns: int) -> None:
    """Slices of 2.05 ms, and 0.138 ms from one to the next. None is ahead of another by more than a slice."""
    engine, _ = busy_engine(contexts, kernel_ns, QUEUE)
    elapsed = 45_000_000
    engine.advance(1 + elapsed)
    times = [context[4] for context in engine.contexts().values()]
    assert max(times) - min(times) <= 2_050_000
    assert sum(times) == pytest.approx(elapsed * 2050 / (2050 + 138), abs=2_200_000)


@given(steps=st.lists(st.integers(1, 3_000_000), min_size=1, max_size=30), kernel_ns=st.integers(10_000, 2_000_000))
def test_how_often_one_looks_changes_nothing(steps: list[int], kernel_ns: int) -> None:
    often, streams = busy_engine(3, kernel_ns, 20)
    once, _ = busy_engine(3, kernel_ns, 20)
    now = 1
    for step in steps:
        now += step
        often.advance(now)
    once.advance(now)
    for stream in streams:
        assert often.stream(stream) == once.stream(stream)
        for ordinal in range(20):
            assert often.operation(stream, ordinal)[2:] == once.operation(stream, ordinal)[2:]


@given(caps=st.lists(st.integers(4, 66).map(lambda n: 2 * n), min_size=2, max_size=4))
def test_under_mps_who_fits_runs_at_the_same_time(caps: list[int]) -> None:
    """Caps that fit side by side hold exactly, whoever else works; if they do not fit, the SMs are all in use."""
    engine = Engine(sms=132)
    streams = []
    for cap in caps:
        stream = opened(engine.open_stream(opened(engine.open_context(server=1 << 40, sm_cap=cap))))
        for _ in range(200):
            engine.submit(stream, KERNEL, 1_000_000, sms=132)
        streams.append(stream)
    elapsed = 50_000_000
    engine.advance(1 + elapsed)
    used = [context[3] / elapsed for context in engine.contexts().values()]
    if sum(caps) <= 132:
        assert used == pytest.approx(caps, rel=1e-3)
    else:
        assert sum(used) == pytest.approx(132, rel=1e-3)
        assert all(u <= cap + 1e-6 for u, cap in zip(used, caps, strict=True))


def test_a_full_queue_takes_no_more_until_its_process_has_seen_the_first_ones_finish() -> None:
    engine, (stream,) = busy_engine(1, 1000, QUEUE)
    assert not engine.has_room(stream)
    with pytest.raises(BlockingIOError):
        engine.submit(stream, KERNEL, 1000)
    engine.advance(1 + 5000)
    assert not engine.has_room(stream)
    engine.deliver(stream)
    for _ in range(5):
        engine.submit(stream, KERNEL, 1000)
    assert not engine.has_room(stream)


@given(
    requests=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3 << 30), st.booleans()), max_size=40),
    limit=st.sampled_from([0, 1 << 30, 2 << 30]),
)
def test_memory_is_never_more_than_there_is(requests: list[tuple[int, int, bool]], limit: int) -> None:
    engine = Engine(memory_bytes=4 << 30)
    contexts = [opened(engine.open_context(memory_limit=limit)) for _ in range(3)]
    held: list[tuple[int, int]] = []
    for number, size, give in requests:
        if give and held:
            engine.give_memory(*held.pop())
        own = sum(s for c, s in held if c == contexts[number])
        fits = sum(s for _, s in held) + size <= 4 << 30 and (not limit or own + size <= limit)
        assert engine.take_memory(contexts[number], size) == fits
        if fits:
            held.append((contexts[number], size))
        assert engine.memory_used_bytes == sum(s for _, s in held) <= 4 << 30


def test_the_dead_leave_the_sms_within_the_grace_and_their_memory_with_them() -> None:
    engine, streams = busy_engine(2, 50_000_000, 10)
    victim, survivor = engine.contexts()
    engine.take_memory(victim, 1 << 30)
    engine.advance(10_000_000)
    engine.kill_context(victim, 500_000)
    assert engine.memory_used_bytes == 1 << 30
    engine.advance(14_000_000)
    assert list(engine.contexts()) == [survivor]
    assert engine.memory_used_bytes == 0
    assert engine.stream(streams[0])[0] is None
    before = engine.kernel_ns
    engine.advance(24_000_000)
    assert engine.kernel_ns - before == 10_000_000


def test_the_dead_without_running_work_are_gone_at_once() -> None:
    engine, _ = busy_engine(1, 1000, 1)
    engine.advance(5000)
    engine.kill_context(0, 1_000_000)
    assert engine.contexts() == {}


def test_a_fault_takes_the_context_and_under_mps_everybody_of_the_server() -> None:
    engine = Engine()
    alone = opened(engine.open_context())
    shared = [opened(engine.open_context(server=1 << 40)) for _ in range(2)]
    streams = {c: opened(engine.open_stream(c)) for c in (alone, *shared)}
    for stream in streams.values():
        engine.submit(stream, KERNEL, 1000)
    engine.fail_operation(streams[shared[0]], 0, 700)
    engine.advance(1_000_000)
    errors = {c: context[5] for c, context in engine.contexts().items()}
    assert errors == {alone: 0, shared[0]: 700, shared[1]: 700}
