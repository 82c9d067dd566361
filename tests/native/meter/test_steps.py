"""Steps: which waits end a decode step or a prefill, whatever other vGPUs make of their time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cython_ext.testing.bindings_logic import LONGER, PAUSE_NS, STEP_DECODE, STEP_NONE, STEP_PREFILL, Steps

US, MS = 1_000, 1_000_000


class Server:
    """A program that launches, waits and thinks. ``ends``: what each wait ended, and how long that took."""

    def __init__(self) -> None:
        self.steps, self.now_ns, self.spent_ns = Steps(), 1_000 * MS, 0
        self.ends: list[tuple[int, int]] = []
        self.waits(0, 0)

    def waits(self, work_ns: int, lasts_ns: int, launches: int = 1) -> tuple[int, int]:
        for _ in range(launches if work_ns else 0):
            self.steps.launches(self.now_ns, self.spent_ns)
            self.spent_ns += work_ns // launches
        self.now_ns += lasts_ns
        self.ends.append(self.steps.waited(self.now_ns, self.spent_ns))
        return self.ends[-1]

    def thinks(self, lasts_ns: int) -> None:
        self.now_ns += lasts_ns

    def answers(self, tokens: int, prefill_ns: int, step_ns: int, stretch: float = 1.0) -> None:
        """One request after a pause. Other vGPUs make it wait ``stretch`` times as long."""
        self.thinks(2 * PAUSE_NS)
        self.waits(prefill_ns, int(prefill_ns * stretch), 10)
        for _ in range(tokens):
            self.thinks(300 * US)
            self.waits(step_ns, int(step_ns * stretch))

    def kinds(self, last: int) -> list[int]:
        return [kind for kind, _ in self.ends[-last:]]


@given(st.integers(1, 400), st.integers(1, 40), st.sampled_from([1.0, 1.3, 5.0]), st.integers(2, 30), st.integers(1, 4))
def test_a_request_is_a_prefill_and_decode_steps(
    prefill_ms: int, step_ms: int, stretch: float, tokens: int, requests: int
) -> None:
    server, prefill_ms = Server(), prefill_ms + step_ms
    for _ in range(requests):
        server.answers(tokens, prefill_ms * MS, step_ms * MS, stretch)
        assert server.kinds(tokens + 1) == [STEP_PREFILL] + [STEP_DECODE] * tokens
        assert server.ends[-tokens - 1][1] == int(prefill_ms * MS * stretch)
        assert all(lasted == int(step_ms * MS * stretch) + 300 * US for _, lasted in server.ends[-tokens:])


@given(st.integers(5, 40), st.integers(3, 30), st.sampled_from([1.0, 4.0]))
def test_a_prefill_between_decode_steps_is_told_by_its_work(step_ms: int, times: int, stretch: float) -> None:
    server = Server()
    server.answers(20, 50 * MS, step_ms * MS, stretch)
    work_ns = times * step_ms * MS
    assert server.waits(work_ns, int(work_ns * stretch)) == (STEP_PREFILL, int(work_ns * stretch))
    assert server.waits(step_ms * MS, step_ms * MS)[0] == STEP_DECODE


@given(st.integers(5, 40), st.integers(0, 90), st.integers(1, 3))
def test_values_that_a_program_looks_at_end_no_step(step_ms: int, work_us: int, looks: int) -> None:
    server = Server()
    server.answers(4, 50 * MS, step_ms * MS)
    for _ in range(10):
        for _ in range(looks):
            assert server.waits(work_us * US, work_us * US + 20 * US)[0] == STEP_NONE
        kind, lasted_ns = server.waits(step_ms * MS, step_ms * MS)
        assert kind == STEP_DECODE
        assert lasted_ns == step_ms * MS + looks * (work_us + 20) * US  # from token to token


def test_time_that_others_take_makes_no_prefill_of_a_step() -> None:
    server = Server()
    server.answers(10, 50 * MS, 8 * MS)
    assert server.waits(8 * MS, 200 * MS) == (STEP_DECODE, 200 * MS)


def test_a_pause_is_no_part_of_a_step() -> None:
    server = Server()
    server.answers(10, 50 * MS, 8 * MS)
    server.thinks(5_000 * MS)
    assert server.waits(30 * MS, 35 * MS, 3) == (STEP_PREFILL, 35 * MS)
    server.thinks(MS)
    server.waits(50 * US, 60 * US)  # the step goes on …
    server.thinks(5_000 * MS)
    assert server.waits(30 * MS, 35 * MS, 3) == (STEP_PREFILL, 35 * MS)  # … but not over a pause


@given(st.integers(1, 20), st.integers(1, 100))
def test_other_steps_are_learned_whether_shorter_or_longer(before_ms: int, after_ms: int) -> None:
    server = Server()
    server.answers(20, 50 * MS, before_ms * MS)
    for _ in range(3 * LONGER):
        server.waits(after_ms * MS, after_ms * MS)
    assert set(server.kinds(LONGER // 2)) == {STEP_DECODE}


def test_a_program_without_launches_has_no_steps() -> None:
    server = Server()
    assert [server.waits(0, MS)[0] for _ in range(10)] == [STEP_NONE] * 10
