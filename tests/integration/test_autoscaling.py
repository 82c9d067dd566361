"""The node changes the sizes of vGPUs by their demand, with real processes and programs under the hook."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from benchmarks.node import Node
from tests.gpu.scaled import course
from tests.integration.node import SimulatedNode, eventually
from tests.integration.worker import Spoken
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import EventReading, VgpuStatus
from vgpu.spec import VgpuChanges, VgpuSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
GIB = 1 << 30

PROGRAM = """
import sys, threading, time
from ctypes import byref, c_size_t, c_uint64, c_void_p
from tests.hook.app import App
app = App()
context = c_void_p()
app.call("cuCtxGetCurrent", byref(context))
kernel = app.kernel(5.0)
wanted = int(sys.argv[1])
def work():
    # Each 100 ms, `wanted` kernels of 5 ms; what is late is caught up on, within limits.
    app.call("cuCtxSetCurrent", context)
    due = time.monotonic()
    while True:
        for _ in range(wanted):
            kernel.launch()
        app.synchronize()
        due = max(due + 0.1, time.monotonic() - 0.2)
        time.sleep(max(0.0, due - time.monotonic()))
threading.Thread(target=work, daemon=True).start()
print("started", flush=True)
for line in sys.stdin:
    word, number = line.split()
    if word == "load":
        wanted = int(number)
        print("done", flush=True)
    else:
        print(app.result("cuMemAlloc_v2", byref(c_uint64()), c_size_t(int(number))), flush=True)
"""


class Loaded(Spoken):
    """A program that needs 5 % of the GPU for each of so many kernels."""

    def __init__(self, node: SimulatedNode, vgpu: VgpuStatus, kernels: int) -> None:
        super().__init__(node, vgpu, PROGRAM, str(kernels))

    def load(self, kernels: int) -> None:
        self.say(f"load {kernels}")
        assert self.heard() == "done"

    def allocate(self, size: int) -> int:
        self.say(f"allocate {size}")
        return int(self.heard())


@pytest.fixture(scope="module")
def pair() -> Iterator[SimulatedNode]:
    with SimulatedNode(2) as running:
        yield running


@pytest.fixture
def node(pair: SimulatedNode) -> Iterator[SimulatedNode]:
    yield pair
    pair.clear()


def size(node: SimulatedNode, vgpu: VgpuStatus) -> float:
    """Its percent of compute; 0: the node does not say just now."""
    reading = node.reading(vgpu.vgpu_id)
    return 0.0 if reading is None else reading.spec.compute_ratio * 100


def more_memory(node: SimulatedNode, vgpu: VgpuStatus, before: int) -> int:
    """Its memory if it is more than before, else 0."""
    reading = node.reading(vgpu.vgpu_id)
    return 0 if reading is None or reading.memory_limit_bytes <= before else reading.memory_limit_bytes


def events(node: SimulatedNode, vgpu: VgpuStatus, kind: str) -> list[EventReading]:
    with node.link() as link:
        return [event for event in link.events(vgpu.vgpu_id) if event.kind == kind]


def test_a_share_grows_with_the_demand_and_shrinks_after_it(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent="10..40", memory_bytes="1G")
    assert vgpu.spec.compute_ratio == 0.1
    program = Loaded(node, vgpu, 1)
    program.load(5)
    eventually(lambda: size(node, vgpu) >= 25, "the share grows to the demand")
    with node.link() as link:  # what a person sees: the present value, and the bounds
        assert link.inspect(vgpu.vgpu_id).vgpu.spec.sm_range_percent == (10.0, 40.0)
    program.load(16)
    eventually(lambda: size(node, vgpu) == 40, "it grows to the upper bound")
    eventually(lambda: events(node, vgpu, "replica-wanted"), "beyond it, a replica is wanted")
    reading = eventually(lambda: node.reading(vgpu.vgpu_id), "a reading")
    assert reading.replicas_wanted == 1
    program.load(0)
    eventually(lambda: size(node, vgpu) == 10, "it shrinks to the lower bound")
    eventually(lambda: node.reading(vgpu.vgpu_id).replicas_wanted == 0, "no replica is wanted")  # type: ignore[union-attr]
    texts = [event.text for event in events(node, vgpu, "scaled")]
    assert all("its programs need" in text for text in texts)
    assert "--sm 10 to" in texts[0]


def test_a_share_by_hand_ends_the_range_and_another_range_begins_it(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent="10..40", memory_bytes="1G..2G")
    Loaded(node, vgpu, 8)
    eventually(lambda: size(node, vgpu) > 10, "it grows")
    with node.link() as link:
        by_hand = link.set(vgpu.vgpu_id, VgpuChanges.parse(sm_percent="15"))
        assert by_hand.spec.sm_range_percent is None
        assert by_hand.spec.memory_range_bytes == (GIB, 2 * GIB)
        again = link.set(vgpu.vgpu_id, VgpuChanges.parse(sm_percent="5..20"))
        assert again.spec.sm_percent == 15
    eventually(lambda: size(node, vgpu) == 20, "it grows within the new bounds")


def test_memory_grows_before_it_is_full(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent="10", memory_bytes="2G..8G")
    program = Loaded(node, vgpu, 0)
    assert program.allocate(1200 << 20) == 0
    assert program.allocate(200 << 20) == 0
    grown = eventually(lambda: more_memory(node, vgpu, 2 * GIB), "it grows before it is full")
    assert program.allocate(5 * GIB) != 0
    eventually(lambda: more_memory(node, vgpu, grown), "it grows by what was refused")
    assert program.allocate(5 * GIB) == 0


def test_a_vgpu_moves_where_its_gpu_is_full_and_the_other_is_not(node: SimulatedNode) -> None:
    vgpu = node.create("0", sm_percent="20..60", memory_bytes="1G")
    node.create("0", sm_percent="80", memory_bytes="1G")
    program = Loaded(node, vgpu, 10)
    eventually(lambda: (node.reading(vgpu.vgpu_id) or vgpu).gpu_index == 1, "it moves to the other GPU")
    eventually(lambda: size(node, vgpu) >= 50, "it grows there")
    assert any("moves to GPU 1: GPU 0 has no room" in event.text for event in events(node, vgpu, "scaled"))
    assert program.popen.poll() is None


def test_without_room_on_any_gpu_a_replica_is_wanted(node: SimulatedNode) -> None:
    vgpu = node.create("0", sm_percent="20..60", memory_bytes="1G")
    for gpu, percent in (("0", "80"), ("1", "70")):
        node.create(gpu, sm_percent=percent, memory_bytes="1G")
    Loaded(node, vgpu, 10)
    [wanted] = eventually(lambda: events(node, vgpu, "replica-wanted"), "a replica is wanted")
    assert "GPU 0 has no room" in wanted.text
    assert wanted.fields["wanted"] == 1
    assert size(node, vgpu) == 20
    with node.link() as link:
        [shown] = [one for one in link.meter().snapshot.vgpus if one.vgpu_id == vgpu.vgpu_id]
        assert shown.replicas_wanted == 1
        assert all(gpu.guaranteed_ratio <= 1 for gpu in link.gpus())


def test_a_new_vgpu_gets_what_others_have_beyond_their_guarantee(node: SimulatedNode) -> None:
    vgpu = node.create("0", sm_percent="20..60", memory_bytes="1G")
    Loaded(node, vgpu, 16)
    eventually(lambda: size(node, vgpu) == 60, "it grows to its upper bound")
    with pytest.raises(VgpuError) as refused:
        node.create("0", sm_percent="81", memory_bytes="1G")
    assert refused.value.code is ErrorCode.NO_ROOM
    node.create("0", sm_percent="75", memory_bytes="1G")
    [given] = [event for event in events(node, vgpu, "scaled") if "another vGPU" in event.text]
    assert "--sm 60 to 25" in given.text


def test_killed_nodes_and_servers_change_no_bounds(pair: SimulatedNode) -> None:
    vgpu = pair.create("0", sm_percent="10..40", memory_bytes="1G")
    program = Loaded(pair, vgpu, 8)
    eventually(lambda: size(pair, vgpu) > 10, "it grows")
    pair.kill_node()
    os.kill(int(program.popen.pid), 0)
    pair.start()
    eventually(lambda: size(pair, vgpu) == 40, "it grows on under the next node")
    os.kill(pair.server_pid(), signal.SIGKILL)
    program.load(0)
    eventually(lambda: size(pair, vgpu) == 10, "it shrinks under the next GPU Server")
    reading = eventually(lambda: pair.reading(vgpu.vgpu_id), "a reading")
    assert reading.spec.sm_range_percent == (10.0, 40.0)
    pair.clear()


def test_the_gpu_test_of_it_runs_on_a_simulated_gpu() -> None:
    """tests/gpu/test_autoscale.py, whose latencies mean something on a GPU alone."""
    with Node(simulate=1) as simulated:
        found = course(simulated)
    print(found)
    assert found.grown_percent > 40
    assert found.shrunk_percent == 20


def test_bounds_go_with_no_other_rule_for_the_size(node: SimulatedNode) -> None:
    for fields in ({"burst": True}, {"quota_limit_percent": "50"}, {"overcommit": True}):
        with pytest.raises(VgpuError, match="exclude each other"):
            VgpuSpec.parse(sm_percent="20..60", **fields)
    vgpu = node.create(sm_percent="20..60", memory_bytes="1G")
    with node.link() as link, pytest.raises(VgpuError) as refused:
        link.set(vgpu.vgpu_id, VgpuChanges(burst=True))
    assert refused.value.code is ErrorCode.INVALID
    with node.link() as link, pytest.raises(VgpuError) as refused:
        link.set_gpu(str(vgpu.gpu_index), mode="spatial")
    assert refused.value.code is ErrorCode.MODE
