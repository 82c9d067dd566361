"""When a launch may take it for granted that the queue has run as predicted, and when the driver is asked."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from cython_ext.testing.bindings_logic import BELIEVED_AFTER, BELIEVED_LAUNCHES, BELIEVED_NS, Belief

PACE_NS = BELIEVED_NS // 20


def confirmed(now_ns: int = 0) -> Belief:
    belief = Belief()
    for _ in range(BELIEVED_AFTER):
        belief.answered(True, now_ns)
    return belief


def test_nobody_is_believed_before_there_were_enough_answers() -> None:
    belief = Belief()
    for _ in range(BELIEVED_AFTER):
        assert not belief.suffices(0)
        belief.answered(True, 0)
    assert belief.suffices(0)


def test_after_a_few_launches_the_driver_is_asked_and_if_it_agrees_they_are_believed_again() -> None:
    belief = confirmed()
    for _ in range(3):
        assert [belief.suffices(PACE_NS) for _ in range(BELIEVED_LAUNCHES + 1)] == [True] * BELIEVED_LAUNCHES + [False]
        belief.answered(True, PACE_NS)


def test_nor_is_anybody_believed_for_long() -> None:
    belief = confirmed()
    assert belief.suffices(BELIEVED_NS - 1)
    assert not belief.suffices(BELIEVED_NS)


def test_the_first_no_starts_it_all_over() -> None:
    belief = confirmed()
    belief.answered(False, 0)
    for _ in range(BELIEVED_AFTER - 1):
        belief.answered(True, 0)
    assert not belief.suffices(0)
    belief.answered(True, 0)
    assert belief.suffices(0)


class BeliefTwin(RuleBasedStateMachine):
    """What is believed by a list of answers."""

    def __init__(self) -> None:
        super().__init__()
        self.belief = confirmed()
        self.answers = [True] * BELIEVED_AFTER
        self.now_ns = self.answered_ns = 0
        self.since = 0

    @rule(passed_ns=st.integers(0, BELIEVED_NS // 2))
    def launch(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        believed = (
            all(self.answers[-BELIEVED_AFTER:])
            and self.since < BELIEVED_LAUNCHES
            and self.now_ns - self.answered_ns < BELIEVED_NS
        )
        assert self.belief.suffices(self.now_ns) == believed
        self.since += believed

    @rule(right=st.integers(0, 99), number=st.integers(1, BELIEVED_AFTER))
    def answer(self, right: int, number: int) -> None:
        for _ in range(number):
            self.belief.answered(right > 0, self.now_ns)
            self.answers.append(right > 0)
        self.answered_ns, self.since = self.now_ns, 0


TestBelief = BeliefTwin.TestCase
