"""The baton with real hooks and a real relay: what happens to those who wait for it."""

from __future__ import annotations

import signal
import time

import pytest

from tests.hook.programs import PROLOGUE, Endless
from tests.hook.stage import MS, Stage, StagedVgpu, eventually, stop


@pytest.fixture
def vgpu(stage: Stage) -> StagedVgpu:
    return stage.spatial_vgpu()


@pytest.fixture
def both(stage: Stage, vgpu: StagedVgpu) -> tuple[Endless, Endless]:
    vgpu.open()
    return Endless(stage, vgpu), Endless(stage, vgpu)


def passes(vgpu: StagedVgpu) -> bool:
    """Whether the baton is passed on while one looks."""
    before = vgpu.activity.baton
    eventually(lambda: vgpu.activity.baton != before, "the baton is passed on")
    return True


def test_two_take_turns_and_both_go_on(vgpu: StagedVgpu, both: tuple[Endless, Endless]) -> None:
    for program in both:
        program.await_more()
    assert passes(vgpu)


def test_one_alone_keeps_it(stage: Stage, vgpu: StagedVgpu) -> None:
    vgpu.open()
    program = Endless(stage, vgpu)
    program.await_more()
    word = vgpu.activity.baton
    program.await_more()
    assert vgpu.activity.baton == word != 0


def test_without_a_relay_nobody_waits_for_ever(vgpu: StagedVgpu, both: tuple[Endless, Endless]) -> None:
    """Whoever waits for a word that nobody changes goes without, after a second."""
    for program in both:
        program.await_more()
    vgpu.relay.close()
    for program in both:
        program.await_more()
        program.await_more()


def test_a_new_relay_puts_them_in_order_again(stage: Stage, vgpu: StagedVgpu, both: tuple[Endless, Endless]) -> None:
    for program in both:
        program.await_more()
    before = vgpu.activity.baton
    vgpu.renew_relay()
    assert vgpu.activity.baton >> 8 > before >> 8
    for program in both:
        program.await_more()
    assert passes(vgpu)


def test_who_waits_for_it_wants_and_has_no_work(vgpu: StagedVgpu, both: tuple[Endless, Endless]) -> None:
    for program in both:
        program.await_more()
    eventually(
        lambda: sorted((s.want, s.undrained) for s in vgpu.slots()) == [(True, False), (True, True)],
        "one works, one waits",
    )


LONG = """
kernel = app.kernel(5000)
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "launch":
        kernel.launch()
    print(app.result("cuStreamQuery", app.stream), flush=True)
"""
RUNS = "600"


@pytest.mark.parametrize("lives_s", [0, 0.5])
@pytest.mark.parametrize("lease", ["open", "finite"])
def test_a_stopped_process_whose_kernel_nobody_knows_is_waited_for_while_it_runs(
    stage: Stage, lease: str, lives_s: float
) -> None:
    """Launched while nobody else wants the GPU it is not asked about; under a finite lease it is found long overdue."""
    vgpu = stage.vgpu()
    process = stage.start(PROLOGUE + LONG, stage.environment(vgpu))
    assert stage.heard(process) == "ready"
    stage.tell(process, "launch")
    vgpu.await_want()
    now = time.monotonic_ns()
    epoch = vgpu.open() if lease == "open" else vgpu.lease(now, now + 60_000 * MS)
    assert stage.heard(process) == RUNS
    Endless(stage, vgpu).await_start()
    time.sleep(lives_s)
    stop(process.pid)
    if lease == "open":
        epoch = vgpu.revoke(time.monotonic_ns())
    else:
        assert vgpu.end(epoch, time.monotonic_ns() + MS)
    time.sleep(0.7)
    told = stage.relay_page.entry(vgpu.key).drained_epoch == epoch
    process.send_signal(signal.SIGCONT)
    stage.tell(process, "and now?")
    assert stage.heard(process) == RUNS
    assert not told
