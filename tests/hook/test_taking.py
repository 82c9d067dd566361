"""A lease that a process takes without waiting for GO, because the GPU is free: when it may, how far that goes."""

from __future__ import annotations

import time

import pytest

from cython_ext.readings import EventKind
from cython_ext.relay.relay import Relay
from tests.hook.programs import ENDLESS, PROLOGUE, Endless, next_event
from tests.hook.stage import MS, Stage, StagedVgpu, eventually
from tests.hook.test_graphs import UPDATES

KERNEL_MS = 0.1
TAKE_MOST_MS = 1.0

READY = 'print("ready", flush=True)\n'


class Later(Endless):
    """It launches once it is told to."""

    def __init__(self, stage: Stage, vgpu: StagedVgpu) -> None:
        self.stage = stage
        attached = (
            ENDLESS.format(ms=KERNEL_MS)
            .replace(READY, "")
            .replace("threading.Thread(", READY + "sys.stdin.readline()\nthreading.Thread(")
        )
        self.process = stage.start(PROLOGUE + attached, stage.environment(vgpu))
        assert stage.heard(self.process) == "ready"

    def begin(self) -> None:
        self.stage.tell(self.process)


def stand(vgpu: StagedVgpu) -> int:
    """A lease for a free GPU. Its epoch."""
    epoch = next(vgpu.stage.epochs)
    assert vgpu.stage.dispatcher.publish(vgpu.key, epoch, time.monotonic_ns(), None, on_want=True, alone=True)
    return epoch


def new_relay(vgpu: StagedVgpu) -> None:
    vgpu.relay = Relay(vgpu.activity, vgpu.grants, vgpu.stage.relay_page, vgpu.key, [vgpu.slot().index])


def test_it_launches_before_anybody_has_heard_of_it_but_not_for_long(stage: Stage, vgpu: StagedVgpu) -> None:
    epoch = stand(vgpu)
    program = Later(stage, vgpu)
    vgpu.relay.close()
    program.begin()
    # A host that pauses within the first launch's sample makes the second seem too long to be taken.
    eventually(lambda: program.ask()[0] >= 1, "it launches")
    eventually(program.is_held, "it has had what may be taken")
    assert program.ask()[0] <= 4 * TAKE_MOST_MS / KERNEL_MS  # a slow host hides up to three quarters of a length
    assert stage.dispatcher.outstanding(vgpu.key) == [(epoch, False)]
    slot = vgpu.slot()
    assert (slot.want, slot.last_epoch) == (True, epoch)
    new_relay(vgpu)
    assert next_event(stage, lambda e: e.kind == EventKind.WENT, "GO follows").epoch == epoch
    program.await_more()
    assert stage.dispatcher.outstanding(vgpu.key) == [(epoch, True)]


def test_on_a_gpu_that_somebody_else_wants_it_waits(stage: Stage, vgpu: StagedVgpu) -> None:
    other = stage.vgpu()
    worker = Endless(stage, other)
    other.await_want()  # and has no lease
    stand(vgpu)
    program = Later(stage, vgpu)
    vgpu.relay.close()
    program.begin()
    eventually(lambda: vgpu.slot().want, "it asks")
    assert program.is_held()
    assert program.ask() == (0, 0)
    worker.process.kill()
    eventually(lambda: vgpu.grants.plan().free_epoch != 0, "nobody else wants any more")
    program.await_start()
    new_relay(vgpu)
    program.await_more()


def test_who_has_taken_its_lease_and_must_wait_for_another_goes_on_under_the_same_one(
    stage: Stage, vgpu: StagedVgpu
) -> None:
    other = stage.vgpu()
    epoch = stand(vgpu)
    program = Later(stage, vgpu)
    vgpu.relay.close()
    program.begin()
    eventually(lambda: vgpu.slot().last_epoch == epoch, "it takes its lease")
    Endless(stage, other)
    other.await_want()
    first = other.lease(time.monotonic_ns(), time.monotonic_ns() + 20 * MS)  # granted without knowing
    new_relay(vgpu)
    vgpu.await_want()
    # What the scheduler does for whom it grants a lease: the one that stands, behind the other.
    after = ((other.key, first),) if stage.dispatcher.outstanding(other.key) else ()
    now_ns = time.monotonic_ns()
    assert stage.dispatcher.publish(vgpu.key, epoch, now_ns, now_ns + 20 * MS, after, now_ns + 60_000 * MS)
    program.await_more()
    vgpu.open()
    program.await_more()


def test_processes_of_one_vgpu_share_what_may_be_taken(stage: Stage, vgpu: StagedVgpu) -> None:
    stand(vgpu)
    programs = [Later(stage, vgpu) for _ in range(3)]
    vgpu.relay.close()
    for program in programs:
        program.begin()
    for program in programs:
        program.await_start()
    for program in programs:
        eventually(program.is_held, "it has had its part")
    # Four each at most while their length is not known, and two or three more once it is: alone, each would have eight.
    assert sum(program.ask()[0] for program in programs) <= 7 * len(programs)


CHANGED_GRAPH = (
    PROLOGUE
    + UPDATES.partition("how, _, what")[0]
    + """
graph, (node,) = with_kernels(MS)
executable = instantiated(graph)
launch(8)
app.call("cuStreamSynchronize", app.stream)
print("learned", flush=True)
sys.stdin.readline()
context = c_void_p()
app.call("cuDevicePrimaryCtxRetain", byref(context), app.device)
app.call("cuGraphExecKernelNodeSetParams_v2", executable, node, byref(kernel_params(MS)))
count = 0
def work():
    global count
    app.call("cuCtxSetCurrent", context)
    launch(1)
    count = 1
threading.Thread(target=work, daemon=True).start()
for line in sys.stdin:
    print(count, 0, flush=True)
"""
)


class Changed(Endless):
    """It launches a graph that it has changed, once it is told to."""

    def __init__(self, stage: Stage, vgpu: StagedVgpu, ms: float) -> None:
        self.stage = stage
        self.process = stage.start(CHANGED_GRAPH.replace("MS)", f"{ms})"), stage.environment(vgpu))
        with vgpu.granting(20 * MS):
            assert stage.heard(self.process) == "learned"
            eventually(lambda: not stage.dispatcher.wants(vgpu.key), "it is idle")


@pytest.mark.parametrize(("ms", "held"), [(5.0, True), (0.2, False)])
def test_a_changed_graph_counts_for_what_it_took_before(stage: Stage, vgpu: StagedVgpu, ms: float, held: bool) -> None:
    program = Changed(stage, vgpu, ms)
    stand(vgpu)
    vgpu.relay.close()
    stage.tell(program.process)
    if held:
        eventually(lambda: vgpu.slot().want, "it asks")
        assert program.is_held()
        assert program.ask() == (0, 0)
    else:
        program.await_start()
