"""Every setting of a vGPU and of a GPU, changed while programs work: what they get follows, nobody is started anew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.node import PATIENCE_S, SimulatedNode, eventually
from tests.integration.worker import GIB, Worker
from vgpu.protocol.messages import MetricsSnapshot, VgpuStatus
from vgpu.spec import VgpuChanges

ROOT = Path(__file__).parents[2]
CLOSE = 0.06
QUIET_S = 240.0


@pytest.fixture
def pair(node: SimulatedNode) -> Iterator[tuple[str, str]]:
    """Two vGPUs of 30 and 60 % with a program each that wants all it can get. On a busy host such a program waits for
    a processor, and may be found light: these take turns all the same."""
    with ExitStack() as owned:
        spec = {"memory_bytes": "1G", "lease": "exclusive"}
        made = [node.create(sm_percent=percent, **spec).vgpu_id for percent in (30, 60)]
        for vgpu_id in made:
            command = [sys.executable, "-m", "vgpu.ctl", "exec", vgpu_id, "--"]
            command += [sys.executable, "-m", "vgpu.workload", "--seconds", "600", "-o", "json"]
            program = node.popen(command, stdout=subprocess.DEVNULL)
            owned.callback(program.wait)
            owned.callback(program.kill)
        first, second = made
        yield first, second


def reading(node: SimulatedNode, vgpu_id: str) -> VgpuStatus:
    found = node.reading(vgpu_id)
    assert found is not None
    return found


@pytest.fixture
def takers(node: SimulatedNode) -> tuple[str, str]:
    """The same two vGPUs with a process each that keeps every lease to its end, however seldom it has a processor."""
    spec = {"memory_bytes": "1G", "lease": "exclusive"}
    first, second = [node.create(sm_percent=percent, **spec).vgpu_id for percent in (30, 60)]
    for vgpu_id in (first, second):
        node.attach(vgpu_id)
    return first, second


def comes_to(node: SimulatedNode, parts: dict[str, float], patience_s: float = PATIENCE_S) -> None:
    """Each of these vGPUs is seen to have that part of the GPU's time; on a busy host not all in one reading."""
    missing = dict(parts)

    def seen() -> bool:
        for vgpu_id, part in parts.items():
            if abs(reading(node, vgpu_id).busy_ratio - part) < CLOSE:
                missing.pop(vgpu_id, None)
        return not missing

    eventually(seen, f"time as in {parts}", patience_s)


def change(node: SimulatedNode, vgpu_id: str, **fields: object) -> VgpuStatus:
    with node.link() as link:
        return link.set(vgpu_id, VgpuChanges.parse(**fields))  # type: ignore[arg-type]


def settings_hold(node: SimulatedNode, first: str, second: str, patience_s: float) -> None:
    comes_to(node, {first: 0.3, second: 0.6}, patience_s)
    change(node, first, sm_percent=15)
    comes_to(node, {first: 0.15, second: 0.6}, patience_s)
    change(node, first, sm_percent=40, quota_limit_percent=50)  # half of the time of 40 %
    comes_to(node, {first: 0.2, second: 0.6}, patience_s)
    change(node, first, burst=True)
    comes_to(node, {first: 0.4, second: 0.6}, patience_s)  # the burst takes what the second vGPU leaves
    change(node, first, burst=False, quota_limit_percent=100)
    change(node, second, sm_percent=20)
    comes_to(node, {first: 0.4, second: 0.2}, patience_s)


def test_every_setting_holds_from_the_next_token_on(node: SimulatedNode, takers: tuple[str, str]) -> None:
    settings_hold(node, *takers, PATIENCE_S)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_programs_have_what_the_settings_say(node: SimulatedNode, pair: tuple[str, str]) -> None:
    """They need a processor, as in ``test_in_short_rounds_and_a_short_window_programs_have_their_parts``."""
    settings_hold(node, *pair, QUIET_S)


@pytest.mark.slow
def test_priority_and_quantum_change_how_tokens_are_cut(node: SimulatedNode, takers: tuple[str, str]) -> None:
    first, second = takers
    comes_to(node, {first: 0.3, second: 0.6})
    with node.link() as link:
        link.set_gpu("0", period_ns=200_000_000)
    eventually(lambda: reading(node, second).tokens_per_second < 9, "rounds of 200 ms")
    assert change(node, first, priority="high").spec.priority == "high"  # beside one, the period is not made longer
    with node.link() as link:
        link.set_gpu("0", period_ns=40_000_000)
    eventually(lambda: reading(node, second).tokens_per_second > 12, "rounds of 40 ms")
    comes_to(node, {first: 0.3, second: 0.6})  # it goes first among the entitled, and gets no more


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_short_rounds_and_a_short_window_programs_have_their_parts(
    node: SimulatedNode, pair: tuple[str, str]
) -> None:
    """They need a processor for each 2 ms of the GPU: where others keep all processors busy, they have less. So they
    have minutes to find one moment without others."""
    first, second = pair
    change(node, first, priority="high")
    with node.link() as link:
        link.set_gpu("0", period_ns=40_000_000)
    comes_to(node, {first: 0.3, second: 0.6}, QUIET_S)
    with node.link() as link:
        assert link.set_gpu("0", window_ns=2_000_000).window_ns == 2_000_000
    comes_to(node, {first: 0.3, second: 0.6}, QUIET_S)


def test_a_token_without_an_end_is_told_until_somebody_else_wants(node: SimulatedNode) -> None:
    def told() -> tuple[bool, bool]:
        with node.link() as link:
            now = link.look()
        [mine] = [vgpu for vgpu in now.vgpus if vgpu.vgpu_id == alone.vgpu_id]
        assert not (mine.open_ended and mine.tokens_per_second)
        return mine.open_ended, now.gpus[0].open_ended

    alone = node.create(sm_percent=30, memory_bytes="1G", burst=True)
    node.attach(alone.vgpu_id)
    eventually(lambda: told() == (True, True), "it alone wants the GPU")
    node.attach(node.create(sm_percent=30, memory_bytes="1G", burst=True).vgpu_id)
    eventually(lambda: told() == (False, False) and reading(node, alone.vgpu_id).tokens > 5, "it has company")


def test_waits_and_hand_overs_are_counted_and_told_together(node: SimulatedNode, pair: tuple[str, str]) -> None:
    with node.link() as link:
        before = sum(link.meter().gpus[0].handovers.counts)  # others have used this GPU

    def metered() -> MetricsSnapshot | None:
        with node.link() as link:
            found = link.meter()
        waits = {meters.vgpu_id: sum(meters.waits.counts) for meters in found.vgpus}
        busy = found.snapshot.gpus[0].utilization_ratio
        return found if min(waits.values()) >= 20 and busy and set(waits) == set(pair) else None

    found = eventually(metered, "both have waited and NVML was asked")
    tokens = {vgpu.vgpu_id: vgpu.tokens for vgpu in found.snapshot.vgpus}
    for meters in found.vgpus:
        assert sum(meters.waits.counts) <= tokens[meters.vgpu_id] + 2  # those that are not over yet
        assert meters.waits.sum_ns > 0
    (gpu,) = found.gpus
    assert before < sum(gpu.handovers.counts) <= before + sum(tokens.values()) + 4
    assert sum(gpu.loop_lag.counts) > 0
    assert found.snapshot.gpus[0].events_heard >= 2 * sum(gpu.handovers.counts)  # a drain and a GO each
    assert {process.vgpu_id for process in found.processes} == set(pair)

    def observed() -> bool:
        with node.link() as link:
            advice = link.inspect(pair[0]).advice
        assert advice is not None
        return advice.observed_ns > 0  # whole seconds

    eventually(observed, "a second at work")


def test_a_recording_of_leases_alone_asks_nothing_of_programs(node: SimulatedNode, pair: tuple[str, str]) -> None:
    eventually(lambda: all(reading(node, vgpu_id).tokens > 5 for vgpu_id in pair), "both are at work")
    with node.link() as link:
        records = [record for chunk in link.trace("0", 500_000_000, work=False) for record in chunk.records]
    kinds = {record.kind for record in records}
    assert {"lease", "wait"} <= kinds <= {"lease", "wait", "level"}
    assert {record.vgpu_id for record in records} == set(pair)


def test_a_limit_below_what_is_in_use_is_warned_of_until_it_is_not(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="4G")
    program = Worker(node, vgpu, GIB)
    try:
        program.goes_on()
        with node.link() as link:
            (told,) = link.set(vgpu.vgpu_id, VgpuChanges.parse(memory_bytes="512M")).warnings
            assert "of 512 MiB: they keep it, and are refused more" in told
            detail = link.inspect(vgpu.vgpu_id)
            assert detail.vgpu.warnings == (told,)
            assert detail.advice is not None
            assert "more than the 512 MiB that it may have now" in detail.advice.text
            assert not link.set(vgpu.vgpu_id, VgpuChanges.parse(memory_bytes="4G")).warnings
            link.set(vgpu.vgpu_id, VgpuChanges.parse(memory_bytes="512M"))
    finally:
        program.end()
    eventually(lambda: not reading(node, vgpu.vgpu_id).warnings, "it has no more")


def test_a_limit_that_no_context_fits_is_a_warning_at_create(node: SimulatedNode) -> None:
    small = node.create(sm_percent=10, memory_bytes="64M")
    (told,) = small.warnings
    assert told.startswith("One CUDA context ")
    assert "the limit is 64 MiB" in told
    assert node.create(sm_percent=10, memory_bytes="2G").warnings == ()
