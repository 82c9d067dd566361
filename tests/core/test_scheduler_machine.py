"""Anything may happen at any time: vGPUs come, change, sleep, stop, resume, leave the card, come back to it and go, in
both modes; in temporal mode gangs call them, or do not.

Hypothesis drives the simulated GPU; after every step the scheduler's own check runs (the model runs it after each
event as well), and at the end the books are compared with what an observer saw.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuserver.core.scheduler.interface import make_scheduler
from gpuserver.core.scheduler.leases import AccountState, GangCalled, GangWindow
from tests.core import oracle
from tests.core.model import MS, Run, Work
from tests.core.populations import works
from vgpu.share import PPM, Mode, Priority, Share

shares = st.builds(
    lambda guarantee, extra, sms, priority, bursts, shareable, counted, slo: Share(
        guarantee * 10_000,
        PPM if bursts else min(PPM, (guarantee + extra) * 10_000),
        sms * 1000,
        priority,
        bursts,
        shareable=shareable and counted,
        counted=counted,
        tpot_ns=slo[0] * MS,
        ttft_ns=slo[1] * MS,
    ),
    st.integers(1, 40),
    st.sampled_from([0, 10, 100, 100]),
    st.integers(5, 100),
    st.sampled_from(list(Priority)),
    st.booleans(),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([(0, 0), (0, 0), (10, 0), (30, 500), (0, 200)]),
)
demands = st.lists(st.sampled_from([0, 200_000, 600_000, 900_000]), min_size=1, max_size=3).map(tuple)
"""For a tenth of a second each."""


class SchedulerMachine(RuleBasedStateMachine):
    mode: Mode

    @initialize(together=st.booleans())
    def begin(self, together: bool) -> None:
        scheduler = make_scheduler(self.mode)
        self.watch = oracle.Watch(scheduler)
        self.run = Run(scheduler, [], [], watch=self.watch, together=together, taking=True)
        self.next_key = 0
        self.stopped: set[int] = set()
        self.members: set[int] = set()
        self.aside: list[tuple[int, Share, Work, AccountState]] = []

    def key(self, index: int) -> int:
        return self.run.keys[index % len(self.run.keys)]

    @precondition(lambda self: len(self.run.keys) < 6)
    @rule(share=shares, work=works(), demands_ppm=demands)
    def add(self, share: Share, work: Work, demands_ppm: tuple[int, ...]) -> None:
        self.run.add(self.next_key, share, replace(work, demands_ppm=demands_ppm, demand_ns=100 * MS))
        self.next_key += 1

    @precondition(lambda self: self.run.keys)
    @rule(index=st.integers(0, 5), share=shares)
    def change(self, index: int, share: Share) -> None:
        self.run.change(self.key(index), share)

    @precondition(lambda self: len(self.run.keys) > 1)
    @rule(index=st.integers(0, 5))
    def remove(self, index: int) -> None:
        self.forget(self.key(index))

    def forget(self, key: int) -> None:
        self.stopped.discard(key)
        self.members.discard(key)
        self.run.remove(key)

    @precondition(lambda self: len(self.run.keys) > 1)
    @rule(index=st.integers(0, 5))
    def park(self, index: int) -> None:
        """Away from the card: it has no leases, and keeps its book."""
        key = self.key(index)
        book = self.run.scheduler.books(self.run.now_ns)[key]
        self.aside.append((key, self.run.shares[key], self.run.apps[key].work, book))
        self.forget(key)

    @precondition(lambda self: self.aside)
    @rule()
    def unpark(self) -> None:
        self.run.add(*self.aside.pop())

    @precondition(lambda self: self.mode is Mode.TEMPORAL and self.run.keys)
    @rule(
        index=st.integers(0, 5),
        start_ms=st.integers(-30, 60),
        length_ms=st.sampled_from([1, 5, 20, 40]),
        lapse_ms=st.sampled_from([1, 20, 100, 500]),
        window=st.builds(GangWindow, binding=st.booleans(), urgent=st.booleans(), leader=st.sampled_from([-1, 0, 1])),
    )
    def gang_window(self, index: int, start_ms: int, length_ms: int, lapse_ms: int, window: GangWindow) -> None:
        key, now_ns = self.key(index), self.run.now_ns
        start_ns = max(0, now_ns + start_ms * MS)
        window = replace(window, start_ns=start_ns, end_ns=start_ns + length_ms * MS, lapses_ns=now_ns + lapse_ms * MS)
        self.members.add(key)
        self.run._deliver(GangCalled(key, window))

    @precondition(lambda self: self.members)
    @rule()
    def leave_gang(self) -> None:
        self.run._deliver(GangCalled(self.members.pop(), None))

    @precondition(lambda self: self.run.keys)
    @rule(index=st.integers(0, 5))
    def read(self, index: int) -> None:
        key = self.key(index)
        for epoch, held in self.run.published[key].items():
            if held.record is not None:
                self.run.observe(key, epoch)

    @precondition(lambda self: self.run.keys)
    @rule(index=st.integers(0, 5))
    def stop(self, index: int) -> None:
        self.stopped.add(self.key(index))
        self.run.stop(self.key(index))

    @precondition(lambda self: self.stopped)
    @rule()
    def resume(self) -> None:
        self.run.resume(self.stopped.pop())

    @precondition(lambda self: self.run.keys)
    @rule(index=st.integers(0, 5))
    def give_up(self, index: int) -> None:
        key = self.key(index)
        if self.run.apps[key].wants and self.run.apps[key].held is None:
            self.run.give_up(key)

    @rule(milliseconds=st.sampled_from([1, 3, 10, 40, 150, 400]))
    def time_passes(self, milliseconds: int) -> None:
        self.run.run(self.run.now_ns + milliseconds * MS)

    @invariant()
    def promises_hold(self) -> None:
        self.run.scheduler.check()
        assert not self.watch.found, self.watch.found[:3]

    @invariant()
    def books_only_grow(self) -> None:
        now_ns, up_ns = self.run.now_ns, self.run.up_ns
        in_force: Counter[int] = Counter()  # until the scheduler has heard of the drain
        for r in self.run.records:
            in_force[r.key] += (now_ns if r.drained_ns is None else min(now_ns, r.drained_ns + up_ns)) - r.go_ns
        for standby in self.run.scheduler.snapshot(now_ns):
            assert 0 <= standby.busy_ns <= in_force[standby.vgpu]
            assert standby.held_ns <= in_force[standby.vgpu]
            assert standby.overuse_ns <= standby.held_ns

    def teardown(self) -> None:
        """Nobody is stopped any more: whoever wants is served, and the books agree with the observer."""
        for key in self.stopped:
            self.run.resume(key)
        self.run.run(self.run.now_ns + 3000 * MS)
        assert not self.watch.found, self.watch.found[:3]
        for one in self.run.scheduler.snapshot(self.run.now_ns):
            if one.waiting_since_ns is not None and not (one.holds or one.penalised or one.throttled):
                waited_ns = self.run.now_ns - one.waiting_since_ns
                assert one.lag_ns <= oracle.CREDIT or waited_ns < 1500 * MS, f"{one} is owed, and waits for {waited_ns}"
        for key in self.run.keys:
            since, until = self.run.wanting[key][-1] if self.run.wanting[key] else (0, 0)
            capped = self.run.shares[key].limit_ppm < PPM
            if until is None and since < self.run.now_ns - 2500 * MS and not capped and len(self.run.keys) == 1:
                assert self.run.busy_ns(key, self.run.now_ns - 1000 * MS, self.run.now_ns) > 900 * MS


class TemporalMachine(SchedulerMachine):
    mode = Mode.TEMPORAL


class SpatialMachine(SchedulerMachine):
    mode = Mode.SPATIAL


TestTemporalMachine = TemporalMachine.TestCase
TestSpatialMachine = SpatialMachine.TestCase
TestTemporalMachine.settings = settings(stateful_step_count=25)
TestSpatialMachine.settings = settings(stateful_step_count=25)
