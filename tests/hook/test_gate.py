"""The gate against the simulated GPU, the real dispatcher and the real relay: who may submit, until when, and what is
told."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import time
from itertools import pairwise

import pytest

from cython_ext.readings import GrantsFlag, SlotState
from tests.hook.programs import PROLOGUE, Endless, drained, used_lease
from tests.hook.stage import MS, PATIENCE_S, Stage, StagedVgpu, eventually


def revoked_at_work(stage: Stage, vgpu: StagedVgpu, *programs: Endless) -> int:
    """Their standby lease is revoked while they work, and has drained; where a busy machine had made them idle just
    then, it is done again. Its epoch."""
    epoch = 0

    def revoked() -> bool:
        nonlocal epoch
        vgpu.open()
        for program in programs:
            program.await_more()
        epoch = vgpu.revoke(time.monotonic_ns() + 2 * MS)
        return drained(stage, vgpu, epoch).wants

    eventually(revoked, "it drains, and they want another")
    return epoch


def test_waits_for_a_lease(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = Endless(stage, vgpu)
    vgpu.await_want()
    assert program.is_held()
    assert program.ask() == (0, 0)
    vgpu.open()
    program.await_more()
    eventually(lambda: vgpu.slot().undrained, "it is seen at work")


def test_who_was_idle_for_half_a_circle_of_epochs_has_its_next_lease(stage: Stage) -> None:
    """Others have had 2³¹ leases since its last one: the GPU of a vGPU in a large company has, in a week or two."""
    vgpu, other = stage.vgpu(), stage.vgpu()
    program = Endless(stage, vgpu)
    vgpu.await_want()
    now_ns = time.monotonic_ns()
    last = vgpu.lease(now_ns, now_ns + 20 * MS)
    eventually(lambda: vgpu.slot().drained_epoch == last, "it has drained its lease")
    assert program.is_held()
    for epoch in (2**30, 2**31 + 9):
        stage.epochs = itertools.count(epoch)
        other.lease(now_ns, now_ns + MS)
    vgpu.open()
    program.await_more()


def test_the_relay_is_told_of_a_lease_that_was_over_before_anybody_woke_for_it(stage: Stage) -> None:
    """By itself it looks at the plan 20 times a second; leases may be a few hundred microseconds long."""
    vgpu = stage.vgpu()
    program = Endless(stage, vgpu)
    vgpu.await_want()
    assert program.is_held()
    vgpu.relay.close()
    rung, now_ns = vgpu.activity.rung, time.monotonic_ns()
    vgpu.lease(now_ns, now_ns + 1)
    eventually(lambda: vgpu.activity.rung != rung, "the program told its relay")
    assert not vgpu.slot().undrained


def test_a_revoked_lease_ends_and_drains(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = Endless(stage, vgpu)
    epoch = revoked_at_work(stage, vgpu, program)
    assert program.is_held()
    slot = vgpu.slot()
    assert (slot.drained_epoch, slot.undrained) == (epoch, False)
    vgpu.open()
    program.await_more()


def test_a_finite_lease_takes_no_work_after_its_end(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = Endless(stage, vgpu)
    for _ in range(5):
        went = used_lease(stage, vgpu, 30 * MS)  # from GO on, which may be late, it has its length
        slot = vgpu.slot()
        assert went.end_ns is not None
        assert went.at_ns < slot.last_submit_ns < went.end_ns
        assert (slot.last_epoch, slot.drained_epoch) == (went.epoch, went.epoch)
    assert program.is_held()
    slot = vgpu.slot()
    assert slot.busy_ns > 0
    assert slot.gate_waits > 0


def test_the_window_bounds_what_is_queued(stage: Stage) -> None:
    """100 kernels of 1 ms: unthrottled they are submitted at once; with a window of 1 ms only as they run."""
    vgpu = stage.vgpu()
    program = stage.start(
        PROLOGUE
        + """
import time
kernel = app.kernel(1.0)
kernel.launch()
start = time.monotonic_ns()
for _ in range(100):
    kernel.launch()
submitted = time.monotonic_ns() - start
app.synchronize()
print(submitted, flush=True)
""",
        stage.environment(vgpu),
    )
    with vgpu.granting(60_000 * MS):
        assert int(stage.heard(program)) > 90 * MS
        assert program.wait(PATIENCE_S) == 0


def test_an_idle_holder_gives_back(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = stage.start(
        PROLOGUE + "kernel = app.kernel(2.0)\nfor _ in sys.stdin:\n    kernel.launch()\n    print(1, flush=True)",
        stage.environment(vgpu),
    )
    stage.tell(program)
    vgpu.await_want()
    start_ns = time.monotonic_ns()
    epoch = vgpu.lease(start_ns, start_ns + 60_000 * MS)
    stage.heard(program)
    event = drained(stage, vgpu, epoch)  # it sleeps in input(): nobody but the hook thread can have seen the drain
    assert not event.wants
    assert event.at_ns < start_ns + 60_000 * MS
    stage.tell(program)
    vgpu.await_want()
    second = vgpu.lease(time.monotonic_ns(), time.monotonic_ns() + 60_000 * MS)
    stage.heard(program)
    assert not drained(stage, vgpu, second).wants
    assert vgpu.slot().busy_ns > MS


@pytest.mark.parametrize("contended", [False, True])
def test_an_open_lease_goes_back_after_a_while_or_soon_where_others_gain(stage: Stage, contended: bool) -> None:
    vgpu = stage.vgpu()
    program = stage.start(
        PROLOGUE + "kernel = app.kernel(1.0)\nfor _ in sys.stdin:\n    kernel.launch()\n    print(1, flush=True)",
        stage.environment(vgpu),
    )
    if contended:
        vgpu.grants.flags = GrantsFlag.CONTENDED
    epoch = vgpu.open()
    stage.tell(program)
    stage.heard(program)
    eventually(lambda: not vgpu.slot().undrained, "its drain was seen")
    event = drained(stage, vgpu, epoch)
    assert not event.wants
    assert contended or event.idle_ns > 20 * MS


def test_who_has_drained_a_lease_that_goes_on_for_another_process_is_not_left_behind(stage: Stage) -> None:
    """The end of a lease comes, one process drains, the other has long work; then the end is moved away."""
    vgpu = stage.vgpu()
    vgpu.open()
    short = Endless(stage, vgpu)
    short.await_start()
    long = stage.start(PROLOGUE + "app.kernel(1500.0).launch()\nprint(1, flush=True)\ninput()", stage.environment(vgpu))
    stage.heard(long)
    epoch = vgpu.revoke(time.monotonic_ns())
    eventually(
        lambda: sorted(slot.drained_epoch == epoch for slot in vgpu.slots()) == [False, True],
        "one has drained, the other has not",
    )
    vgpu.end(epoch, None)
    assert drained(stage, vgpu, epoch).wants
    vgpu.open()
    short.await_more()


def test_a_gate_sleeps_until_a_lease_that_begins_by_the_clock(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = Endless(stage, vgpu)
    vgpu.await_want()
    waits = vgpu.slot().gate_waits
    start_ns = time.monotonic_ns() + 300 * MS
    epoch = next(stage.epochs)
    assert stage.dispatcher.publish(vgpu.key, epoch, start_ns, None, (), start_ns, early=False)
    program.await_more()
    assert time.monotonic_ns() >= start_ns
    assert vgpu.slot().gate_waits - waits < 100


@pytest.mark.parametrize("stream", ["LEGACY", "PER_THREAD", "app.new_stream(0)", "app.new_stream(1)"])
@pytest.mark.parametrize("kind", ["open", "finite"])
def test_a_sleeper_with_long_work_is_seen_to_drain(stage: Stage, stream: str, kind: str) -> None:
    vgpu = stage.vgpu()
    program = stage.start(
        PROLOGUE
        + f"stream = {stream}\nkernel = app.kernel(150.0, stream)\nkernel.launch()\nprint(1, flush=True)\ninput()",
        stage.environment(vgpu),
    )
    if kind == "open":
        vgpu.await_want()
        start_ns = time.monotonic_ns()
        vgpu.open()
        stage.heard(program)
        drained(stage, vgpu, vgpu.revoke(time.monotonic_ns() + MS))
    else:
        start_ns = used_lease(stage, vgpu, 20 * MS).at_ns
        stage.heard(program)
    assert time.monotonic_ns() >= start_ns + 149 * MS  # not before the kernel was through
    assert not vgpu.slot().undrained


OVERLAPPING = """
import time
from ctypes import c_int

class Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int * 16)]

class Config(ctypes.Structure):
    _fields_ = [
        ("shape", c_uint * 7), ("stream", c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", c_uint)]

overlaps = Attribute(6)
overlaps.value[0] = 1

def launch(kernel):
    function, gx, gy, gz, bx, by, bz, shared, stream, parameters, _ = kernel.arguments
    config = Config((c_uint * 7)(gx, gy, gz, bx, by, bz, shared), stream, ctypes.pointer(overlaps), 1)
    app.call("cuLaunchKernelEx", byref(config), function, parameters, None)

short, long = (app.kernel(ms, PER_THREAD) for ms in (0.1, 150.0))
for _ in range(20):
    launch(short)
    app.synchronize()
before = time.monotonic_ns()
launch(long)
launch(short)
print(before, flush=True)
input()
"""


def test_launches_that_overlap_in_a_threads_own_stream_are_seen_to_drain(stage: Stage) -> None:
    """No marker stands behind them, and nobody else can name the stream."""
    vgpu = stage.vgpu()
    program = stage.start(PROLOGUE + OVERLAPPING, stage.environment(vgpu))
    with vgpu.granting(60_000 * MS):
        launched_ns = int(stage.heard(program))
        eventually(lambda: not vgpu.slot().undrained, "its drain was seen")
        assert time.monotonic_ns() >= launched_ns + 149 * MS
        assert vgpu.slot().busy_ns > 140 * MS


TRUSTED = """
import time
from tests.hook.app import NS_PER_ITERATION
kernel = app.kernel(0.005)
def launch(ms):
    kernel.parameters[1].value = int(ms * 1e6 / NS_PER_ITERATION)
    kernel.launch()
    began = time.monotonic_ns()
    while time.monotonic_ns() < began + 20_000:
        pass
for turn in range(4):
    for _ in range(300):  # the GPU is idle at each, so that the driver is not asked at each any more
        launch(0.005)
    before = time.monotonic_ns()
    launch(60.0)
    launch(0.005)
    print(before, flush=True)
    input()
"""


def test_a_belief_that_was_wrong_is_in_the_books_and_nobody_hears_of_a_drain_before_it(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = stage.start(PROLOGUE + TRUSTED, stage.environment(vgpu))
    busy_ns = [0]
    with vgpu.granting(60_000 * MS):
        for turn in range(1, 5):
            launched_ns = int(stage.heard(program))
            eventually(lambda turn=turn: vgpu.slot().launches == 302 * turn, "it was launched")
            eventually(lambda: not vgpu.slot().undrained, "its drain was seen")
            assert time.monotonic_ns() >= launched_ns + 59 * MS
            busy_ns.append(vgpu.slot().busy_ns)
            stage.tell(program)
    # On a busy machine a thread may be kept from noting that it has launched; not each time.
    assert max(after - before for before, after in pairwise(busy_ns)) > 59 * MS


def test_a_removed_vgpu_fails_its_launches(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = Endless(stage, vgpu)
    vgpu.open()
    program.await_more()
    vgpu.grants.flags = GrantsFlag.REMOVED
    vgpu.revoke(time.monotonic_ns() + MS)
    eventually(lambda: program.ask()[1] != 0, "its launches fail")
    assert program.ask()[1] == 46
    program.process.kill()
    assert program.process.stderr is not None
    (line,) = program.process.stderr.read().splitlines()
    assert "removed" in line


def test_a_restarted_server_gets_its_processes_back(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = Endless(stage, vgpu)
    vgpu.open()
    program.await_more()
    index = vgpu.slot().index
    vgpu.restart_server()
    eventually(lambda: len(vgpu.requests) == 2, "it attached again")
    assert (vgpu.requests[1]["slot"], vgpu.requests[1]["op"]) == (index, "attach")
    assert program.is_held()  # the old server's open lease is worth nothing
    vgpu.open()
    program.await_more()
    assert vgpu.slot().state == SlotState.ACTIVE


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [(GrantsFlag(0), "held"), (GrantsFlag.LOSS_ERROR, "error"), (GrantsFlag.LOSS_RUN, "runs")],
)
def test_a_silent_server(stage: Stage, policy: GrantsFlag, outcome: str) -> None:
    vgpu = stage.vgpu()
    program = Endless(stage, vgpu)
    vgpu.grants.flags = policy
    vgpu.open()
    program.await_more()
    vgpu.grants.grace_ns = 200 * MS
    stage.fall_silent()
    if outcome == "held":
        eventually(program.is_held, "the gate shut")
    elif outcome == "error":
        eventually(lambda: program.ask()[1] == 46, "its launches fail")
    else:
        eventually(lambda: vgpu.grants.alive_ns + 400 * MS < time.monotonic_ns(), "the grace has passed")
        program.await_more()


def test_killed_in_the_middle_of_a_kernel(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = Endless(stage, vgpu, ms=20.0)
    vgpu.open()
    program.await_more()
    epoch = vgpu.open()
    program.process.kill()
    event = drained(stage, vgpu, epoch)
    assert not event.wants
    assert vgpu.slot().state == SlotState.DEAD


def test_a_sibling_goes_on_when_the_other_is_killed(stage: Stage) -> None:
    vgpu = stage.vgpu()
    one, other = Endless(stage, vgpu), Endless(stage, vgpu)
    vgpu.open()
    one.await_more()
    other.await_more()
    one.process.kill()
    one.process.wait()
    other.await_more()
    revoked_at_work(stage, vgpu, other)
    assert other.is_held()


def test_threads_share_the_gate(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = stage.start(
        PROLOGUE
        + """
context = c_void_p()
app.call("cuDevicePrimaryCtxRetain", byref(context), app.device)
def work(own):
    app.call("cuCtxSetCurrent", context)
    stream = PER_THREAD if own else app.new_stream(1)
    kernel = app.kernel(0.05, stream)
    for _ in range(200):
        kernel.launch()
    app.call("cuStreamSynchronize", c_void_p(stream) if own else stream)
threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(6)]
for t in threads: t.start()
for t in threads: t.join()
print("done", flush=True)
input()
""",
        stage.environment(vgpu),
    )
    vgpu.open()
    for _ in range(20):  # revoked and granted again while they run
        drained(stage, vgpu, vgpu.revoke(time.monotonic_ns() + MS))
        vgpu.open()
    assert stage.heard(program) == "done"
    eventually(lambda: vgpu.slot().launches == 1200, "every launch was counted")


@pytest.mark.parametrize("how", ["sys.exit(3)", "os._exit(3)", "raise SystemExit(3)"])
@pytest.mark.parametrize("kind", ["open", "finite"])
def test_exit_codes_are_the_programs_own(stage: Stage, how: str, kind: str) -> None:
    vgpu = stage.vgpu()
    program = stage.start(
        PROLOGUE + f"import os\nkernel = app.kernel(5.0)\nfor _ in range(10): kernel.launch()\n{how}",
        stage.environment(vgpu),
    )
    if kind == "open":
        vgpu.open()
    with vgpu.granting(20 * MS) if kind == "finite" else contextlib.nullcontext():
        _, err = program.communicate(timeout=PATIENCE_S)
    assert (program.returncode, err) == (3, "")


def test_signals_reach_the_program(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program: subprocess.Popen[str] = stage.start(
        PROLOGUE
        + """
import os, signal, time
def handle(*_):              # a print may be interrupted by the next one, which Python refuses
    os.write(1, b"%s\\n" % str(threading.current_thread() is threading.main_thread()).encode())
signal.signal(signal.SIGUSR1, handle)
print("ready", flush=True)
while True:
    time.sleep(0.05)         # signal.pause() would sleep on if one came just before it
""",
        stage.environment(vgpu),
    )
    stage.heard(program)
    for _ in range(20):
        program.send_signal(signal.SIGUSR1)
        assert stage.heard(program) == "True"
