"""A context is new: the relay says that NVML is to be looked at."""

from __future__ import annotations

from tests.native.stage import Stage, eventually


def test_a_look_at_nvml_is_wanted_once_for_each_context_that_is_newer_than_the_last(stage: Stage) -> None:
    process, _ = stage.process()
    stage.grants.implicit_ns = 100
    process.make_context(100)
    process.make_context(101)
    eventually(stage.relay.look_wanted)
    process.ring()
    process.make_context(99)
    process.make_context(102)
    eventually(stage.relay.look_wanted)
    wakes = stage.relay.stats().wakes
    process.ring()
    eventually(lambda: stage.relay.stats().wakes > wakes + 1)
    assert not stage.relay.look_wanted()
    stage.relay.rebind(stage.grants)
    eventually(stage.relay.look_wanted)
