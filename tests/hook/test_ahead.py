"""Work queued ahead of its lease: in the driver's queue, and not run before the lease begins."""

from __future__ import annotations

import mmap
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.experiments.hook_logs import leases, parse
from cython_ext.readings import GrantsFlag, SlotState
from tests.hook.programs import Endless, drained
from tests.hook.queueing import Program
from tests.hook.stage import MS, PATIENCE_S, Stage, StagedVgpu, eventually, stop

UNAVAILABLE = 46
RETURNED_EPOCH_AT = 36  # ActivityPage.returned_epoch


@pytest.mark.parametrize("stream", ["own", "legacy"])
def test_a_launch_without_a_lease_returns_and_its_kernel_runs_when_the_lease_begins(
    stage: Stage, vgpu: StagedVgpu, stream: str
) -> None:
    program = Program(stage, vgpu)
    program.ask(f"use {stream}")
    for _ in range(3):
        assert program.ask("launch 6") == "0"
        vgpu.await_want()
        program.stays_queued()
        before = vgpu.slot().busy_ns
        program.epoch = program.lease(60_000 * MS)
        eventually(program.is_done, "it runs")
        assert not drained(stage, vgpu, program.epoch).wants
        # Who wants nothing has drained; the hook thread notes it in the slot once it hears that the lease went back.
        eventually(lambda: vgpu.slot().drained_epoch == program.epoch, "its books are closed")
        slot = vgpu.slot()
        assert (slot.last_epoch, slot.undrained) == (program.epoch, False)
        assert slot.busy_ns - before >= 2 * MS, "it was charged"


def test_the_log_tells_when_it_was_queued_and_released(stage: Stage, vgpu: StagedVgpu, tmp_path: Path) -> None:
    log = tmp_path / "hook.log"
    program = Program(stage, vgpu, VGPU_HOOK_LOG=str(log))
    asked_ns = time.monotonic_ns()
    assert program.ask("launch 6") == "0"
    program.stays_queued()
    program.epoch = program.lease(60_000 * MS)
    eventually(program.is_done, "it runs")
    assert not drained(stage, vgpu, program.epoch).wants
    eventually(lambda: vgpu.slot().drained_epoch == program.epoch, "its books are closed")
    said = parse(log.read_text().splitlines())
    queued = next(line for line in said if line.what == "queues ahead of epoch, behind ns" and line.at_ns > asked_ns)
    lease = next(lease for lease in leases(said) if lease.epoch == program.epoch)
    assert lease.go_ns is not None
    assert lease.released_ns is not None
    assert lease.over_ns is not None
    assert queued.at_ns < lease.go_ns <= lease.begins_ns <= lease.released_ns <= lease.over_ns
    assert sum(line.what == queued.what and line.at_ns > asked_ns for line in said) == 1, "the first alone"


def test_a_vgpu_alone_that_is_held_to_its_limit_queues_ahead_too(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    vgpu.grants.flags = GrantsFlag(0)
    program.ask("launch 6")
    program.stays_queued()
    program.lease(60_000 * MS)
    eventually(program.is_done, "it runs")


def test_no_more_is_queued_than_half_a_lease(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    epoch, whole = None, 0
    program.ask("beside launch 400")
    while whole < 2:  # one that its host slept through for a moment was given back
        vgpu.await_want()
        launches = vgpu.slot().launches
        epoch = program.lease(16 * MS)
        whole += drained(stage, vgpu, epoch).wants
        eventually(lambda before=launches: vgpu.slot().launches > before + 10, "it launches")  # type: ignore[misc]
    known: list[int] = []
    eventually(lambda: (known.append(vgpu.slot().launches), known[-5:].count(known[-1]) == 5)[1], "it waits")
    assert vgpu.slot().last_epoch == epoch
    with vgpu.granting(16 * MS):
        eventually(lambda: program.ask("seen") == "[0]", "all were launched")
        eventually(program.is_done, "all have run")


def test_what_was_queued_alone_has_its_turn_beside_a_sibling(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("launch 20")
    program.stays_queued()
    sibling = Endless(stage, vgpu)
    eventually(lambda: all(slot.want for slot in vgpu.slots()), "both want")
    with vgpu.granting(40 * MS):
        eventually(program.is_done, "its turn comes")
        sibling.await_more()


@pytest.mark.parametrize("how", ["switched off", "per-thread", "capture"])
def test_where_it_is_not_simple_a_launch_waits_in_the_gate(stage: Stage, vgpu: StagedVgpu, how: str) -> None:
    program = Program(stage, vgpu, **({"VGPU_AHEAD": "0"} if how == "switched off" else {}))
    if how == "per-thread":
        program.ask("use per-thread")
    elif how == "capture":
        program.ask("capture")
    program.waits_in_the_gate()
    if how == "capture":
        program.ask("captured")


@pytest.mark.parametrize("stream", ["own", "legacy"])
def test_a_fill_behind_it_is_queued_and_counted_too(stage: Stage, vgpu: StagedVgpu, stream: str) -> None:
    program = Program(stage, vgpu)
    program.ask(f"use {stream}")
    launches = vgpu.slot().launches
    assert program.ask("launch 3") == "0"
    assert program.ask("fill") == "0"
    assert program.ask("launch 3") == "0"
    assert program.ask("fill") == "0"
    program.stays_queued()
    eventually(lambda: vgpu.slot().launches == launches + 8, "they are counted")
    program.epoch = program.lease(60_000 * MS)
    eventually(program.is_done, "it runs")
    assert not drained(stage, vgpu, program.epoch).wants
    assert program.ask("read") == "1"


def test_a_synchronous_fill_waits_for_the_lease_outside_the_driver(stage: Stage, vgpu: StagedVgpu) -> None:
    """Inside, it might keep out whoever has to launch."""
    program = Program(stage, vgpu)
    program.ask("use legacy")
    program.ask("launch 6")
    program.ask("beside fill_now")
    program.stays_queued()
    assert program.ask("launch 1") == "0", "others go on queueing"
    assert program.ask("seen") == "[]"
    with vgpu.granting(20 * MS):
        eventually(lambda: program.ask("seen") == "['filled']", "it is through")
        eventually(program.is_done, "it runs")


def test_a_copy_to_the_host_behind_it_waits_in_the_driver_until_the_lease(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("use legacy")
    program.ask("launch 6")
    program.ask("beside read")
    program.stays_queued()
    assert program.ask("seen") == "[]"
    with vgpu.granting(20 * MS):
        eventually(lambda: program.ask("seen") == "[1]", "it is through")


def test_graphs_do_not_fill_the_drivers_queue(stage: Stage, vgpu: StagedVgpu) -> None:
    """In the driver each node may take one of its 1020 places: ten graphs of 300 nodes would wait there."""
    program = Program(stage, vgpu)
    answers: list[int | None] = [None]
    program.ask("beside make_graph")

    def queued_ahead() -> int:
        """How many of ten, before there is a lease. None on a machine so busy that no launch was fit to learn from."""
        with vgpu.granting(60_000 * MS):
            eventually(lambda: program.ask("seen") == str(answers), "all are launched")
            eventually(lambda: not stage.dispatcher.wants(vgpu.key), "the rest is given back")
        eventually(lambda: not vgpu.slot().want, "that is known")
        before = vgpu.slot().launches
        program.ask("beside graphs 10")
        answers.append(0)
        vgpu.await_want()
        time.sleep(0.05)
        queued = vgpu.slot().launches - before
        assert queued <= 3, "with 300 nodes each"
        return queued

    eventually(lambda: queued_ahead() >= 1, "one is queued ahead")
    with vgpu.granting(20 * MS):
        eventually(lambda: program.ask("seen") == str(answers), "all are launched")
    eventually(lambda: vgpu.slot().graph_launches >= 30, "they are counted as graphs")


def test_a_capture_that_begins_behind_it(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("use legacy")
    program.ask("launch 6")
    program.ask("capture")
    program.stays_queued()
    program.lease(60_000 * MS)
    eventually(program.is_done, "it runs")
    program.ask("captured")


def test_a_free_waits_with_it_and_lets_other_threads_launch(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("launch 6")
    program.ask("beside free")
    program.stays_queued()
    program.ask("beside launch 200")
    time.sleep(0.02)
    assert program.ask("seen") == "[]"
    with vgpu.granting(20 * MS):
        eventually(lambda: "freed" in program.ask("seen"), "it is freed")
        eventually(lambda: "0" in program.ask("seen"), "the other thread's are launched")


def test_a_lease_that_was_given_back_and_taken_back_runs_what_was_queued_meanwhile(
    stage: Stage, vgpu: StagedVgpu
) -> None:
    """The relay gives a lease back before it looks whether somebody has just woken. Then it is the old lease that goes
    on, while the GPU waits for the next."""
    program = Program(stage, vgpu)
    program.ask("launch 1")
    epoch = program.lease(60_000 * MS)
    eventually(program.is_done, "it runs")
    with mmap.mmap(vgpu.activity.fileno(), 4096) as page:
        program.ask("launch 1")
        before = page[RETURNED_EPOCH_AT : RETURNED_EPOCH_AT + 4]
        page[RETURNED_EPOCH_AT : RETURNED_EPOCH_AT + 4] = struct.pack("<I", epoch)
        program.ask("launch 6")
        page[RETURNED_EPOCH_AT : RETURNED_EPOCH_AT + 4] = before
    vgpu.grants.flags = GrantsFlag.CONTENDED  # as the relay does: whoever sleeps looks again
    vgpu.grants.wake()
    with vgpu.granting(20 * MS):
        eventually(program.is_done, "it runs")


def test_no_queue_begins_while_a_marker_may_precede_its_launch(stage: Stage, vgpu: StagedVgpu) -> None:
    """One thread is inside a launch while another one puts a marker into the same stream. Only a query of the stream
    shows the end of that launch, and a stream that waits for a word cannot be queried."""
    program = Program(stage, vgpu)
    assert program.ask("hold_other 1") == "0"
    assert program.ask("launch_other") == "0"
    epoch = program.lease(60_000 * MS)
    eventually(lambda: vgpu.slot().last_epoch == epoch, "the lease begins")
    program.ask("beside fill_other")
    time.sleep(0.05)
    launches = vgpu.slot().launches
    program.ask("beside launch_other")
    eventually(lambda: vgpu.slot().launches > launches, "the launch has passed the gate")
    time.sleep(0.05)
    assert program.ask("seen") == "[]", "the driver's queue is full"
    program.ask("interrupt_launch")
    program.ask("let_other 1")
    eventually(lambda: program.ask("seen") == "[0]", "the records are in the queue")
    eventually(lambda: program.ask("other_is_done") == "0", "the queue is empty")
    assert program.ask("launch_unknown") == "0", "a marker in the other stream comes first"
    eventually(program.is_done, "it runs")
    assert vgpu.end(epoch, time.monotonic_ns())
    assert program.ask("hold_other 2") == "0"
    program.ask("resume_launch")
    eventually(lambda: program.ask("seen") == "[0, 0]", "the launch is in the queue")
    time.sleep(0.05)  # the hook queries the streams
    program.ask("beside launch 1")
    time.sleep(0.05)
    program.ask("let_other 2")
    drained(stage, vgpu, epoch)
    with vgpu.granting(20 * MS):
        eventually(lambda: program.ask("seen") == "[0, 0, 0]", "the next launch is through")


def test_it_ends_with_its_process(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("launch 6")
    program.stays_queued()
    stage.tell(program.process, "leave")
    assert program.process.wait(PATIENCE_S) == 0


def test_a_removed_vgpu_does_not_leave_it_hanging(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("launch 6")
    program.stays_queued()
    vgpu.grants.flags = GrantsFlag.REMOVED
    vgpu.grants.wake()
    assert program.ask("synchronize") == "0"
    assert program.ask("launch 1") == str(UNAVAILABLE)


def test_a_lost_server_does_not_leave_it_hanging(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("launch 6")
    program.stays_queued()
    vgpu.grants.grace_ns = 200 * MS
    stage.fall_silent()
    assert program.ask("synchronize") == "0"


def test_a_restarted_server_does_not_leave_it_hanging(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("launch 6")
    program.stays_queued()
    vgpu.restart_server()
    assert program.ask("synchronize") == "0"
    program.ask("beside launch 6")
    with vgpu.granting(20 * MS):
        eventually(lambda: program.ask("seen") == "[0]", "it goes on")


def removed(stage: Stage, vgpu: StagedVgpu, program: Program) -> None:
    vgpu.grants.flags = GrantsFlag.REMOVED
    vgpu.grants.wake()


def lost(stage: Stage, vgpu: StagedVgpu, program: Program) -> None:
    vgpu.grants.grace_ns = 200 * MS
    stage.fall_silent()


def restarted(stage: Stage, vgpu: StagedVgpu, program: Program) -> None:
    vgpu.restart_server()


def slept(stage: Stage, vgpu: StagedVgpu, program: Program) -> None:
    """Through a lease, after which the relay takes its wish back."""
    stop(program.process.pid)
    epoch = program.lease(30 * MS)
    drained(stage, vgpu, epoch)
    program.process.send_signal(signal.SIGCONT)
    program.lease(60_000 * MS)


@pytest.mark.parametrize("what", [removed, lost, restarted, slept])
def test_who_has_the_gates_lock_in_the_driver_behind_it_is_not_left_hanging(
    stage: Stage, vgpu: StagedVgpu, what: Callable[[Stage, StagedVgpu, Program], None]
) -> None:
    """The driver's queue is full, and a thread is in one of the hook's own calls, which waits there for a place: so the
    hook thread cannot have the lock, and has no more than the word to let it run."""
    program = Program(stage, vgpu)
    program.ask("launch 6")
    program.stays_queued()
    program.ask("beside records 2000")
    time.sleep(0.05)
    for _ in range(20):
        program.ask("beside launch 1")
    time.sleep(0.05)
    assert program.ask("seen") == "[]"
    what(stage, vgpu, program)
    eventually(lambda: program.ask("seen") != "[]", "it runs")


@pytest.mark.parametrize(
    "destructor",
    [
        "",
        "cuStreamDestroy_v2(other)",
        "cuModuleUnload(app.module)",
        "cuDevicePrimaryCtxRelease_v2(app.device)",
        "cuStreamBeginCapture_v2(other, 2)",
    ],
)
def test_a_signal_handler_may_end_the_process_inside_a_launch(stage: Stage, vgpu: StagedVgpu, destructor: str) -> None:
    """The thread that exits has the gate's lock itself, and gives it up to nobody. Destructors of the program, which
    come after the hook's end, may call the driver."""
    program = Program(stage, vgpu, destructor=destructor)
    program.ask("launch 6")
    program.stays_queued()
    program.ask("beside records 2000")
    time.sleep(0.05)
    program.ask("exit_on_alarm")
    stage.tell(program.process, "launch 1")
    assert program.process.wait(PATIENCE_S) == signal.SIGALRM


def test_a_stopped_process_is_not_in_the_way(stage: Stage, vgpu: StagedVgpu) -> None:
    """Its lease passes, its work waits, and runs when it is woken and gets another."""
    program = Program(stage, vgpu)
    program.ask("launch 6")
    program.stays_queued()
    stop(program.process.pid)
    epoch = program.lease(30 * MS)
    drained(stage, vgpu, epoch)
    program.process.send_signal(signal.SIGCONT)
    with vgpu.granting(20 * MS):
        eventually(program.is_done, "it runs")


def test_passed_over_with_work_queued_ahead_it_gets_another_turn(stage: Stage, vgpu: StagedVgpu) -> None:
    """A sibling came after it had queued. Its thread waits in the driver for what is queued, so none of its gates says
    that it is awake again after it has slept through its turn; it has to be said all the same."""
    program = Program(stage, vgpu)
    program.ask("launch 1")
    program.stays_queued()
    program.ask("beside synchronize")
    stop(program.process.pid)
    sibling = Endless(stage, vgpu)
    with vgpu.granting(20 * MS):

        def passed_over() -> bool:
            """Its sibling keeps the word over several leases: it counts as alone."""
            word, before = vgpu.activity.baton, vgpu.slots()[1].last_epoch
            eventually(lambda: vgpu.slots()[1].last_epoch >= before + 4, "leases come")
            return word == vgpu.activity.baton != 0 and word & 0xFF == 2

        eventually(passed_over, "the sibling has the baton to itself")
        program.process.send_signal(signal.SIGCONT)
        eventually(lambda: program.ask("seen") == "[0]", "what was queued runs")
        sibling.await_more()


def test_what_was_released_in_a_lease_that_is_over_lets_nothing_else_pass(stage: Stage, vgpu: StagedVgpu) -> None:
    """The relay releases for a process that is held up; stopped, in this case, until the lease has passed."""
    program = Program(stage, vgpu)
    program.ask("launch 1")
    program.stays_queued()
    stop(program.process.pid)
    began_ns = time.monotonic_ns()
    epoch = program.lease(400 * MS)
    eventually(lambda: time.monotonic_ns() > began_ns + 20 * MS, "the relay finds it late")
    vgpu.activity.ring()
    eventually(lambda: vgpu.slot().turn == epoch, "the relay releases")
    drained(stage, vgpu, epoch)
    program.process.send_signal(signal.SIGCONT)
    program.ask("beside launch 6")
    time.sleep(0.05)
    assert program.ask("seen") == "[]", "without a lease it waits"
    with vgpu.granting(20 * MS):
        eventually(lambda: program.ask("seen") == "[0]", "it goes on")
        eventually(program.is_done, "it runs")


def test_a_stopped_process_is_not_released_in_the_second_half_of_its_lease(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("launch 20")
    program.stays_queued()
    stop(program.process.pid)
    end_ns = time.monotonic_ns() + 10 * MS  # late is who has not begun after 5 ms, whenever the relay looks
    epoch = vgpu.lease(time.monotonic_ns(), end_ns)
    eventually(lambda: time.monotonic_ns() > end_ns - 3 * MS, "it is nearly over")
    vgpu.activity.ring()
    drained(stage, vgpu, epoch)
    assert vgpu.slot().turn != epoch
    program.process.send_signal(signal.SIGCONT)


def test_in_a_new_activity_page_a_queue_waits_for_a_lease_again(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("launch 6")
    program.stays_queued()
    vgpu.lose_everything()
    vgpu.grants.flags = GrantsFlag.CONTENDED
    vgpu.grants.window_ns = 12 * MS
    eventually(lambda: len(vgpu.slots()) == 1 and vgpu.slot().state == SlotState.ACTIVE, "it is in the new page")
    assert program.ask("synchronize") == "0"
    program.ask("beside launch 6")
    time.sleep(0.05)
    assert program.ask("seen") == "[]" or not program.is_done(), "without a lease nothing runs"
    with vgpu.granting(20 * MS):
        eventually(lambda: program.ask("seen") == "[0]", "it goes on")
        eventually(program.is_done, "it runs")


def test_a_new_server_that_refuses_does_not_leave_it_hanging(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("launch 6")
    program.stays_queued()
    vgpu.grants.grace_ns = 200 * MS
    vgpu.refusal = "not known here"
    vgpu.activity.generation = 2
    stage.fall_silent()
    assert program.ask("synchronize") == "0"


def test_a_context_that_is_released_and_lives_on_goes_on_queueing(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("hold_and_release")
    for _ in range(2):
        program.queues_and_runs()


def test_a_context_other_than_the_words_waits_in_the_gate(stage: Stage, vgpu: StagedVgpu) -> None:
    """The word was registered in the first one, and what is registered goes with its context: under the feet of what
    waits for it elsewhere."""
    program = Program(stage, vgpu)
    program.queues_and_runs()
    program.ask("enter_guest")
    program.rehearse()
    program.waits_in_the_gate()


def test_when_the_words_context_has_died_another_has_it(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu, first="enter_guest")
    program.rehearse()
    program.queues_and_runs()
    program.ask("end_guest")
    program.rehearse()
    program.queues_and_runs()
