"""The backlog against a simulated GPU whose queue, clock and idleness are known exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cython_ext.testing import bindings_logic as native
from cython_ext.testing.bindings_logic import UNKNOWN_NS

US, MS = 1_000, 1_000_000


@dataclass
class Gpu:
    """A FIFO. Launches are told to it and to the backlog; markers complete when everything before them has."""

    backlog: native.Backlog = field(default_factory=native.Backlog)
    now_ns: int = 0
    end_ns: int = 0  # when the queue will be empty
    busy_ns: int = 0
    markers: list[int] = field(default_factory=list)  # completion of each, by tag
    unmarked: bool = False

    def launch(self, actual_ns: int, predicted_ns: int, assumed_ns: int = 0) -> None:
        self.backlog.submit(self.now_ns, predicted_ns, assumed_ns)
        self.end_ns = max(self.end_ns, self.now_ns) + actual_ns
        self.busy_ns += actual_ns
        self.unmarked = True

    def mark(self) -> None:
        if self.backlog.mark(len(self.markers)):
            self.markers.append(self.end_ns)
            self.unmarked = False

    def poll(self) -> None:
        """What a hook does: look at the markers, oldest first, until one is not complete."""
        while (tag := self.backlog.oldest()) is not None:
            if self.markers[tag] > self.now_ns:
                self.backlog.seen_busy(self.now_ns)
                return
            self.backlog.completed(self.now_ns)

    def synchronise(self) -> None:
        """Block until the queue is empty."""
        self.now_ns = max(self.now_ns, self.end_ns)
        self.backlog.seen_busy(self.now_ns)
        self.backlog.drained(self.now_ns)
        self.unmarked = False

    @property
    def true_backlog_ns(self) -> int:
        return max(self.end_ns - self.now_ns, 0)


@dataclass(frozen=True, slots=True)
class Step:
    pause_ns: int
    length_ns: int  # of the launch, 0: none
    mark: bool
    poll: bool


steps = st.builds(
    Step,
    st.one_of(st.integers(0, 20 * US), st.integers(0, 3 * MS)),
    st.one_of(st.just(0), st.integers(1, 50 * US), st.integers(1, 5 * MS)),
    st.booleans(),
    st.booleans(),
)


def play(gpu: Gpu, step: Step, predicted_ns: int) -> None:
    gpu.now_ns += step.pause_ns
    if step.poll:
        gpu.poll()
    if step.length_ns:
        gpu.launch(step.length_ns, predicted_ns)
    if step.mark:
        gpu.mark()


@given(st.lists(steps, max_size=60))
def test_right_predictions_are_never_made_wrong(history: list[Step]) -> None:
    """Whatever the order of launches, gaps, markers and looks, late or early: the predicted end is the true one."""
    gpu = Gpu()
    for step in history:
        play(gpu, step, step.length_ns)
        assert gpu.backlog.backlog_ns(gpu.now_ns) == gpu.true_backlog_ns
        if gpu.true_backlog_ns:
            assert gpu.backlog.end_ns == gpu.end_ns
    assert gpu.backlog.scale == 1.0


@given(st.lists(steps, max_size=60), st.integers(0, 5 * MS), st.integers(0, 5 * MS))
def test_books_of_a_lease_add_up_and_right_predictions_miss_no_gap_that_was_looked_at(
    history: list[Step], before_ns: int, after_ns: int
) -> None:
    """held = busy + idle, to the nanosecond; busy is the truth and the gaps nobody saw the GPU empty for."""
    gpu = Gpu(now_ns=10 * MS)
    gpu.backlog.begin(gpu.now_ns)
    start = gpu.now_ns
    unseen = 0
    gpu.now_ns += before_ns
    for step in history:
        looked = step.poll and not gpu.unmarked
        if step.length_ns and gpu.now_ns + step.pause_ns > gpu.end_ns and gpu.backlog.busy and not looked:
            unseen += gpu.now_ns + step.pause_ns - gpu.end_ns
        play(gpu, step, step.length_ns)
    gpu.now_ns += after_ns
    gpu.mark()
    while gpu.backlog.busy:
        gpu.now_ns = max(gpu.now_ns, gpu.end_ns)
        gpu.poll()
        gpu.mark()
    gpu.backlog.finish(gpu.now_ns)
    assert gpu.backlog.busy_ns + gpu.backlog.idle_ns == gpu.now_ns - start
    assert gpu.backlog.busy_ns == gpu.busy_ns + unseen


@given(st.lists(st.tuples(steps, st.floats(0.1, 10)), max_size=60), st.booleans())
def test_books_add_up_however_wrong_predictions_are(history: list[tuple[Step, float]], synchronise: bool) -> None:
    gpu = Gpu(now_ns=10 * MS)
    gpu.backlog.begin(gpu.now_ns)
    reported = 0
    for step, error in history:
        play(gpu, step, int(step.length_ns * error))
        assert gpu.backlog.busy_ns >= reported, "what was reported is never taken back"
        reported = gpu.backlog.busy_ns
        assert gpu.backlog.backlog_ns(gpu.now_ns) >= 0
        assert 0.25 <= gpu.backlog.scale <= 4
    if synchronise:
        gpu.synchronise()
    gpu.mark()
    gpu.now_ns = max(gpu.now_ns, gpu.end_ns)
    gpu.poll()
    while gpu.backlog.busy:
        gpu.mark()
        gpu.poll()
    gpu.backlog.finish(gpu.now_ns)
    assert gpu.backlog.busy_ns + gpu.backlog.idle_ns == gpu.now_ns - 10 * MS
    assert gpu.backlog.unknown == 0


@settings(max_examples=min(30, settings().max_examples))
@given(st.integers(0, 2**32 - 1), st.floats(0.3, 3.5))
def test_a_queue_that_never_empties_is_busy_exactly_whatever_is_predicted(seed: int, error: float) -> None:
    source = random.Random(seed)
    gpu = Gpu(now_ns=MS)
    gpu.backlog.begin(MS)
    for _ in range(300):
        while gpu.true_backlog_ns < 300 * US:
            length = source.randrange(5 * US, 200 * US)
            gpu.launch(length, int(length / error))
            if source.random() < 0.4:
                gpu.mark()
        gpu.now_ns += source.randrange(1, 250 * US)
        gpu.poll()
    gpu.synchronise()
    gpu.backlog.finish(gpu.now_ns)
    assert gpu.backlog.idle_ns == 0
    assert gpu.backlog.busy_ns == gpu.busy_ns == gpu.now_ns - MS


@settings(max_examples=min(30, settings().max_examples))
@given(st.integers(0, 2**32 - 1), st.floats(0.3, 3.5), st.integers(1, 4))
def test_scale_and_backlog_converge_on_a_gpu_that_runs_at_another_speed(seed: int, speed: float, launches: int) -> None:
    """Predictions are ``1/speed`` of the truth, with 10 % of noise on top.

    After 300 ms, five times what the scale takes to settle, it is right within 5 %, and the backlog within what lies
    between two looks and a quarter of what is queued.
    """
    source = random.Random(seed)
    gpu = Gpu()
    while gpu.now_ns < 450 * MS:
        while gpu.true_backlog_ns < MS:
            for _ in range(launches):
                length = source.randrange(20 * US, 300 * US)
                gpu.launch(length, int(length / speed * source.uniform(0.9, 1.1)))
            gpu.mark()
        gpu.now_ns += source.randrange(1, 60 * US)
        gpu.poll()
        if gpu.now_ns > 300 * MS:
            assert gpu.backlog.scale == pytest.approx(speed, rel=0.05)
            error = gpu.backlog.backlog_ns(gpu.now_ns) - gpu.true_backlog_ns
            assert abs(error) <= 60 * US + 0.25 * max(gpu.true_backlog_ns, MS)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 10 * MS))
def test_an_application_that_sleeps_is_charged_to_the_predicted_completion_not_to_the_poll(
    launches: int, length_us: int, sleep_ns: int
) -> None:
    gpu = Gpu()
    gpu.backlog.begin(0)
    for _ in range(launches):
        gpu.launch(length_us * US, length_us * US)
    gpu.mark()
    gpu.now_ns = gpu.end_ns + sleep_ns
    gpu.poll()
    assert not gpu.backlog.busy
    assert gpu.backlog.drained_ns == gpu.end_ns
    assert gpu.backlog.busy_ns == launches * length_us * US


def test_a_wrong_prediction_is_clipped_to_what_was_seen() -> None:
    gpu = Gpu()
    gpu.launch(5 * MS, MS)
    gpu.mark()
    gpu.now_ns = 4 * MS
    gpu.poll()
    assert gpu.backlog.busy_ns == 4 * MS
    gpu.now_ns = 9 * MS
    gpu.poll()
    assert gpu.backlog.drained_ns == 4 * MS, "predicted at 1, seen busy at 4, seen done at 9"
    gpu.now_ns = 10 * MS
    gpu.launch(MS, 5 * MS)
    gpu.mark()
    gpu.now_ns = 12 * MS
    gpu.poll()
    assert gpu.backlog.drained_ns == 12 * MS, "predicted at 15, seen done at 12"


def test_a_head_that_is_overdue_pushes_everything_behind_it() -> None:
    gpu = Gpu()
    gpu.launch(10 * MS, MS)
    gpu.mark()
    gpu.launch(2 * MS, 2 * MS)
    gpu.now_ns = 7 * MS
    gpu.poll()
    assert gpu.backlog.backlog_ns(gpu.now_ns) == 2 * MS
    assert gpu.backlog.end_ns == 9 * MS


@pytest.mark.parametrize("predicted_ns", [MS, UNKNOWN_NS])
def test_a_kernel_that_waits_for_another_launch_does_not_block_it_for_ever(predicted_ns: int) -> None:
    """The first kernel spins until the fourth launch has come; each goes once the backlog is small and none unknown."""
    backlog = native.Backlog()
    submitted_at = []
    for now in range(0, 500 * MS, MS // 2):
        if backlog.busy:
            backlog.seen_busy(now)
        if backlog.backlog_ns(now) <= MS // 4 and backlog.unknown == 0:
            backlog.submit(now, predicted_ns, MS)
            backlog.mark(now)
            submitted_at.append(now)
            if len(submitted_at) == 4:
                break
    assert len(submitted_at) == 4, "deadlock"
    assert submitted_at[1] >= 100 * MS or predicted_ns != UNKNOWN_NS
    assert submitted_at[2] - submitted_at[0] >= 100 * MS, "forgiven all the time: no window is left"
    for _ in submitted_at:
        backlog.completed(500 * MS)
    assert not backlog.busy
    assert backlog.unknown == 0
    assert backlog.scale == 1.0


def test_a_full_ring_refuses_a_marker_and_loses_nothing() -> None:
    gpu = Gpu()
    for _ in range(native.MARKERS + 5):
        gpu.launch(MS, MS)
        gpu.mark()
    assert len(gpu.markers) == native.MARKERS
    assert not gpu.backlog.mark(0)
    assert gpu.backlog.end_ns == gpu.end_ns
    gpu.now_ns = gpu.end_ns
    gpu.poll()
    assert gpu.backlog.busy
    gpu.mark()
    gpu.poll()
    assert not gpu.backlog.busy
    assert gpu.backlog.drained_ns == gpu.end_ns


def test_there_is_no_marker_without_a_launch() -> None:
    backlog = native.Backlog()
    assert not backlog.mark(1)
    assert backlog.oldest() is None
    assert backlog.completed(5)


def test_unknown_launches_count_as_assumed_and_until_they_are_done() -> None:
    gpu = Gpu()
    gpu.launch(3 * MS, UNKNOWN_NS, MS)
    gpu.mark()
    assert (gpu.backlog.unknown, gpu.backlog.backlog_ns(0)) == (1, MS)
    gpu.now_ns = 3 * MS
    gpu.poll()
    assert gpu.backlog.unknown == 0
    assert gpu.backlog.scale == 1.0, "a guess teaches nothing"


@pytest.mark.parametrize("case", ["first of the lease", "discard"])
def test_what_ran_beside_others_teaches_the_scale_little_or_nothing(case: str) -> None:
    """The first of a lease may have waited for a switch, or for the tail of who was before it: for a millisecond."""
    gpu = Gpu()

    def run(lasts_ns: int, predicted_ns: int) -> float:
        gpu.backlog.discard(case == "discard")
        gpu.backlog.begin(gpu.now_ns)
        gpu.launch(lasts_ns, predicted_ns)
        gpu.mark()
        gpu.synchronise()
        gpu.backlog.finish(gpu.now_ns)
        return gpu.backlog.scale

    assert run(5 * MS, 4 * MS + 1) == run(5 * MS, 6 * MS - 1) == 1.0
    shorter = run(5 * MS, 9 * MS)
    assert (shorter < 1.0) == (case != "discard")
    before = run(9 * MS, 5 * MS)
    assert (before > shorter) == (case != "discard")
    gpu.backlog.discard(False)
    gpu.launch(5 * MS, MS)
    gpu.mark()
    gpu.synchronise()
    assert gpu.backlog.scale > before


def test_gaps_left_by_the_host_do_not_look_like_slow_kernels() -> None:
    """A program that launches a 20 µs kernel every 100 µs and looks rarely: nothing disproves its predictions."""
    gpu = Gpu()
    for n in range(1000):
        gpu.launch(20 * US, 20 * US)
        gpu.now_ns += 100 * US
        if n % 10 == 9:
            gpu.mark()
            gpu.poll()
    assert gpu.backlog.scale == 1.0


def test_refill_is_the_idle_time_at_the_start_of_a_lease() -> None:
    gpu = Gpu()
    gpu.backlog.begin(MS)
    gpu.now_ns = MS + 300 * US
    gpu.launch(MS, MS)
    assert gpu.backlog.refill_ns == 300 * US
    gpu.mark()
    gpu.backlog.finish(2 * MS)
    gpu.backlog.begin(2 * MS)  # the queue has not run dry between the leases
    gpu.now_ns = 2 * MS
    gpu.launch(MS, MS)
    assert gpu.backlog.refill_ns == 1, "nothing, and that is known"
    gpu.synchronise()
    assert gpu.backlog.idle_ns == 300 * US


@pytest.mark.parametrize("error", [0.9, 1.0, 1.1])
@pytest.mark.parametrize("starved", [False, True])
def test_a_host_that_has_to_regain_its_lead_costs_what_its_lease_lacks_at_the_start(
    error: float, starved: bool
) -> None:
    """10 ms in which every 20 µs kernel is launched 25 µs after the last, unseen; then a full queue, from which is
    learned how wrong the predictions are."""
    gpu = Gpu()
    predicted = int(20 * US * error)
    for lease in range(20):
        gpu.backlog.begin(gpu.now_ns)
        start = gpu.now_ns
        for n in range(1500):
            late = starved and gpu.now_ns - start < 10 * MS
            gpu.now_ns += 25 * US if late else 10 * US
            gpu.launch(20 * US, predicted)
            if n % 8 == 7:
                gpu.mark()
            if gpu.true_backlog_ns > 5 * MS:
                gpu.now_ns += MS
            if not gpu.unmarked:
                gpu.poll()
        if lease >= 10:
            lost = 8 * MS * (5 if starved else 0) // 25
            assert lost - 200 * US < gpu.backlog.refill_ns < lost + 200 * US
        gpu.synchronise()
        gpu.backlog.finish(gpu.now_ns)
        gpu.now_ns += 50 * MS


def test_a_lease_that_began_under_the_overrun_of_the_last_is_idle_only_from_the_drain_on() -> None:
    gpu = Gpu()
    gpu.backlog.begin(0)
    gpu.launch(5 * MS, 5 * MS)
    gpu.synchronise()
    gpu.backlog.finish(5 * MS)
    gpu.backlog.begin(3 * MS)
    gpu.now_ns = 6 * MS
    gpu.launch(MS, MS)
    assert gpu.backlog.idle_ns == gpu.backlog.refill_ns == MS


def test_idleness_outside_leases_is_nobodys() -> None:
    gpu = Gpu()
    gpu.backlog.begin(0)
    gpu.launch(MS, MS)
    gpu.synchronise()
    gpu.backlog.finish(3 * MS)
    gpu.backlog.begin(10 * MS)
    gpu.now_ns = 11 * MS
    gpu.launch(MS, MS)
    gpu.synchronise()
    gpu.backlog.finish(12 * MS)
    assert gpu.backlog.idle_ns == 2 * MS + MS
    assert gpu.backlog.busy_ns == 2 * MS


def test_the_longest_kernel_is_remembered_for_a_second_and_forgotten_after_two() -> None:
    gpu = Gpu()
    gpu.now_ns = 10**10
    gpu.launch(30 * MS, 30 * MS)
    for second_tenths in range(1, 40):
        gpu.now_ns = 10**10 + second_tenths * 10**8
        gpu.launch(MS, MS)
        if second_tenths <= 10:
            assert gpu.backlog.longest_ns == 30 * MS
        if second_tenths > 21:
            assert gpu.backlog.longest_ns == MS


def test_work_that_its_marker_came_before_counts_until_a_later_one() -> None:
    backlog = native.Backlog()
    backlog.begin(0)
    backlog.submit(0, MS)
    backlog.mark(1)
    assert backlog.completed(10 * US)  # the launch itself comes now, and takes 9 ms
    assert not backlog.busy
    assert backlog.mark_late(20 * US, 2)
    backlog.seen_busy(9 * MS)
    assert backlog.oldest() == 2
    assert backlog.completed(9 * MS + 100 * US)
    assert not backlog.busy
    assert 9 * MS <= backlog.busy_ns <= 9 * MS + 100 * US


nanoseconds = st.integers(-(2**63), 2**63 - 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "mark", "mark_late", "seen_busy", "completed", "drained", "begin", "finish"]),
            nanoseconds,
            nanoseconds,
            nanoseconds,
        ),
        max_size=60,
    )
)
def test_no_numbers_break_it(calls: list[tuple[str, int, int, int]]) -> None:
    """Clocks that jump and absurd lengths: the ring stays a ring, and the outputs stay in range."""
    backlog = native.Backlog()
    for name, now, predicted, assumed in calls:
        match name:
            case "submit":
                backlog.submit(now // 8, predicted, assumed)
            case "mark":
                backlog.mark(now % 2**64)
            case "mark_late":
                backlog.mark_late(now // 8, predicted % 2**64)
            case _:
                getattr(backlog, name)(now // 8)
        assert backlog.backlog_ns(now // 8) >= 0
        assert 0.25 <= backlog.scale <= 4
        assert backlog.busy or (backlog.unknown == 0 and backlog.oldest() is None)
