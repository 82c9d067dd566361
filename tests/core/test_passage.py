"""Whoever is killed when, a vGPU that moves is in one place: what servers remember, and every order of what they do."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuserver.core.states.migration import AT_REST, MigrationState, Step
from vgpu.identity import Process

GPUS = (0, 1, 2)
PROGRAMS = (Process(7, 1), Process(8, 1))


def test_what_a_server_does_next() -> None:
    assert AT_REST.next_step is Step.STAY
    for suspended in (True, False):
        begun = AT_REST.begun(suspended=suspended)
        assert begun.next_step is (Step.STAY if suspended else Step.GO_ON)
        left = begun.left(1, "here", PROGRAMS)
        assert (left.next_step, left.home, left.programs) == (Step.ASK, "here", PROGRAMS)
        assert left.stayed().next_step is begun.next_step
        assert left.arrived(0).next_step is begun.next_step
        assert begun.given_up().next_step is Step.STAY


def test_where_its_programs_are_is_known_until_they_are_brought_back() -> None:
    """However often it moves meanwhile."""
    moved = AT_REST.begun(suspended=True).left(1, "first", PROGRAMS).arrived(0).released()
    again = moved.begun(suspended=True).left(2, "second", PROGRAMS)
    assert again.home == "first"
    assert again.arrived(1).brought_back() == MigrationState(came_from=1, programs=PROGRAMS)
    assert AT_REST.left(1, "first", ()).home == ""


class Journals(RuleBasedStateMachine):
    """Of three servers. A server that is killed does nothing more than not to do the next rule: what it knew is there,
    and an answer that it did not hear it asks for again."""

    @initialize(gpu=st.sampled_from(GPUS), suspended=st.booleans())
    def create(self, gpu: int, suspended: bool) -> None:
        self.rows: dict[int, MigrationState] = {gpu: AT_REST}
        self.suspended = suspended
        self.removed = False

    @rule(gpu=st.sampled_from(GPUS), to=st.sampled_from(GPUS))
    def leave(self, gpu: int, to: int) -> None:
        row = self.rows.get(gpu)
        if row is not None and row.next_step is not Step.ASK and row.came_from is None and to != gpu:
            self.rows[gpu] = row.begun(suspended=self.suspended).left(to, f"gpu{gpu}", PROGRAMS)

    @rule(gpu=st.sampled_from(GPUS), takes=st.booleans(), heard=st.booleans())
    def ask(self, gpu: int, takes: bool, heard: bool) -> None:
        row = self.rows.get(gpu)
        if row is None or row.leaving is None:
            return
        if row.leaving in self.rows:
            takes = True  # the same answer to the same question
        elif takes:
            self.rows[row.leaving] = MigrationState(row.goes_on, home=row.home, programs=row.programs).arrived(gpu)
        if heard and takes:
            del self.rows[gpu]
        elif heard:
            self.rows[gpu] = row.stayed()

    @rule(gpu=st.sampled_from(GPUS), well=st.booleans())
    def bring_back(self, gpu: int, well: bool) -> None:
        row = self.rows.get(gpu)
        if row is not None and row.next_step is Step.GO_ON:
            self.rows[gpu] = row.brought_back() if well else row.given_up()

    @rule(gpu=st.sampled_from(GPUS))
    def release(self, gpu: int) -> None:
        row = self.rows.get(gpu)
        if row is not None and row.came_from is not None and row.came_from not in self.rows:
            self.rows[gpu] = row.released()

    @precondition(lambda self: not self.removed)
    @rule(gpu=st.sampled_from(GPUS))
    def remove(self, gpu: int) -> None:
        row = self.rows.get(gpu)
        if row is not None and row.leaving is None and row.came_from is None:
            del self.rows[gpu]
            self.removed = True

    @invariant()
    def it_is_in_one_place(self) -> None:
        owners = [gpu for gpu, row in self.rows.items() if row.leaving is None or row.leaving not in self.rows]
        assert len(owners) == (0 if self.removed else 1)
        assert len(self.rows) <= 2
        assert not (self.removed and self.rows), "nobody takes it in again"

    @invariant()
    def its_programs_stand_still_where_it_is_known(self) -> None:
        for row in self.rows.values():
            assert row.leaving is None or row.home


TestJournals = Journals.TestCase
