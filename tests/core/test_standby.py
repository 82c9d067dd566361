"""When a suspended vGPU that waits for triggers is resumed, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from gpuserver.core.states.idle import AGAIN_LEAST_NS, AGAIN_MOST_NS
from gpuserver.core.states.standby import NO_STANDBY, Cause, Seen, Standby, cause_of, decide

NOTHING = Seen(now_unix_s=100.0)
EVERYTHING = Seen(now_unix_s=1e12, calls=True, ends=True, port=8000)
CALL, PORT, TIME = Standby(("call",)), Standby(("tcp:8000",)), Standby(at_unix_s=100.5)

triggers = st.sets(st.sampled_from(("call", "tcp:8000", "tcp:9000"))).map(tuple)
standbys = st.builds(Standby, triggers, st.none() | st.floats(0, 1e9))
seen = st.builds(
    Seen,
    now_unix_s=st.floats(0, 1e9),
    calls=st.booleans(),
    starts=st.booleans(),
    ends=st.booleans(),
    port=st.sampled_from((0, 8000, 9000, 9001)),
)


@pytest.mark.parametrize(
    ("standby", "what", "cause"),
    [
        (NO_STANDBY, EVERYTHING, None),
        (CALL, NOTHING, None),
        (CALL, replace(NOTHING, port=8000), None),
        (CALL, replace(NOTHING, calls=True), Cause.CALL),
        (PORT, replace(NOTHING, calls=True), None),
        (PORT, replace(NOTHING, port=9000), None),
        (PORT, replace(NOTHING, port=8000), Cause.CONNECTION),
        (PORT, replace(NOTHING, ends=True), Cause.END),
        (PORT, replace(NOTHING, starts=True, ends=True), Cause.START),
        (TIME, replace(NOTHING, calls=True, ends=True, port=8000), None),
        (TIME, replace(NOTHING, now_unix_s=100.5), Cause.TIME),
        (replace(TIME, triggers=("call", "tcp:8000")), EVERYTHING, Cause.CONNECTION),
        (replace(TIME, triggers=("call",)), EVERYTHING, Cause.CALL),
    ],
)
def test_the_rules(standby: Standby, what: Seen, cause: Cause | None) -> None:
    assert cause_of(standby, what) is cause


@given(standbys, seen)
def test_a_cause_is_a_trigger_that_is_so(standby: Standby, what: Seen) -> None:
    match cause_of(standby, what):
        case Cause.CALL:
            assert "call" in standby.triggers
            assert what.calls
        case Cause.CONNECTION:
            assert f"tcp:{what.port}" in standby.triggers
        case Cause.TIME:
            assert standby.at_unix_s is not None
            assert what.now_unix_s >= standby.at_unix_s
        case Cause.END:
            assert standby.triggers
            assert what.ends
        case Cause.START:
            assert standby.triggers
            assert what.starts
        case None:
            assert standby.at_unix_s is None or what.now_unix_s < standby.at_unix_s
            assert not ("call" in standby.triggers and what.calls)
            assert f"tcp:{what.port}" not in standby.triggers
        case Cause.REQUEST:
            pytest.fail("no request resumes it here")


@given(standbys, standbys, seen)
def test_one_trigger_more_hinders_no_other(one: Standby, other: Standby, what: Seen) -> None:
    times = [at for at in (one.at_unix_s, other.at_unix_s) if at is not None]
    both = Standby((*one.triggers, *other.triggers), min(times, default=None))
    if cause_of(one, what) or cause_of(other, what):
        assert cause_of(both, what) is not None


class Server(RuleBasedStateMachine):
    """A shell that looks every now and then, whose attempts may fail, and which may be killed: the next one knows only
    the standby. Whatever happens before, a trigger that lasts resumes the vGPU with the next attempt that may be made
    and succeeds; without one it stays suspended."""

    @initialize(standby=standbys)
    def suspend(self, standby: Standby) -> None:
        self.standby, self.resumed = standby, False
        self.now_ns = 1
        self.seen = NOTHING

    def look(self, succeeds: bool) -> None:
        self.seen = replace(self.seen, now_unix_s=self.now_ns / 1e9)
        if self.resumed or decide(self.standby, self.seen, self.now_ns) is None:
            return
        assert cause_of(self.standby, self.seen) is not None
        if succeeds:
            self.resumed = True
        else:
            self.seen = replace(self.seen, failures=self.seen.failures + 1, tried_ns=self.now_ns)

    @rule(passed_ns=st.integers(1, 10**12), succeeds=st.booleans())
    def time_passes(self, passed_ns: int, succeeds: bool) -> None:
        self.now_ns += passed_ns
        self.look(succeeds)

    @rule(what=seen)
    def changes(self, what: Seen) -> None:
        self.seen = replace(what, failures=self.seen.failures, tried_ns=self.seen.tried_ns)

    @rule()
    def killed(self) -> None:
        self.seen = replace(self.seen, failures=0, tried_ns=0)

    @rule()
    def again_at_once(self) -> None:
        """Not as soon as it has just failed."""
        failures = self.seen.failures
        self.look(succeeds=False)
        if self.seen.failures > failures:
            self.now_ns += AGAIN_LEAST_NS - 1
            self.look(succeeds=True)
            assert not self.resumed

    @rule()
    def looked_at_until_it_works(self) -> None:
        self.now_ns += AGAIN_MOST_NS
        self.look(succeeds=True)
        assert self.resumed or cause_of(self.standby, self.seen) is None


TestServer = Server.TestCase
