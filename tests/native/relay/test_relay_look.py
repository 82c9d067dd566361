"""A context is new: the relay says that NVML is to be looked at."""

from __future__ import annotations

import time

from tests.native.stage import MS, Stage, eventually


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


def test_contexts_that_no_clock_has_shown_yet_are_left_alone(stage: Stage) -> None:
    process, _ = stage.process()
    stage.grants.implicit_ns = 100
    wakes = stage.relay.stats().wakes
    process.make_context(time.monotonic_ns() + 60_000 * MS)
    eventually(lambda: stage.relay.stats().wakes > wakes)
    process.ring()
    eventually(lambda: stage.relay.stats().wakes > wakes + 1)
    assert not stage.relay.look_wanted()


def test_however_many_a_tenant_tells_of_the_server_is_not_asked_all_the_time(stage: Stage) -> None:
    process, _ = stage.process()
    stage.grants.implicit_ns = 100
    began_ns = time.monotonic_ns()
    looks = 0
    for at_ns in range(101, 401):
        process.make_context(at_ns)
        time.sleep(0.0005)
        looks += stage.relay.look_wanted()
    assert 1 <= looks <= 1 + (time.monotonic_ns() - began_ns) / (20 * MS)
    process.make_context(401)  # on a busy machine the one before has been looked for already
    eventually(stage.relay.look_wanted)  # the last one, all the same
