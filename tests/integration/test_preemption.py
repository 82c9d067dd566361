"""Preemption on a simulated node: vGPUs of lower priority are suspended for a request, and come back by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.commands import vgpuctl
from tests.integration.node import SimulatedNode, eventually
from tests.integration.worker import GIB, Worker, state
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.claims import Claim
from vgpu.protocol.messages import VgpuStatus
from vgpu.protocol.tenancy import QueueReading
from vgpu.queueing.rules import QueueRules
from vgpu.quotas.quota import Quotas
from vgpu.spec import VgpuSpec

RULES = '{"preempt": "suspend", "preempt_after": "1s"}'


@pytest.fixture
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode(1, "temporal", "--queue", RULES, hasty=True) as made:
        yield made


@pytest.fixture
def programs() -> Iterator[list[Worker]]:
    started: list[Worker] = []
    yield started
    for program in started:
        program.end()


def create(node: SimulatedNode, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "vgpu.ctl", "create", "--mem", "60G", "--wait", *words]
    return node.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def made_by(asking: subprocess.Popen[str]) -> str:
    out, errors = asking.communicate(timeout=120)
    assert asking.returncode == 0, errors
    return out.strip()


def waiting(node: SimulatedNode) -> tuple[QueueReading, ...]:
    with node.link() as link:
        return link.queue()


def remove(node: SimulatedNode, vgpu_id: str) -> None:
    with node.link() as link:
        link.remove(vgpu_id, force=True)


def awake(node: SimulatedNode, vgpu: VgpuStatus) -> bool:
    return state(node, vgpu) in {"idle", "waiting", "running"}


@pytest.mark.slow
def test_a_lower_one_stands_still_for_a_higher_one_and_goes_on_where_it_was(
    node: SimulatedNode, programs: list[Worker]
) -> None:
    low = node.create(sm_percent=70, memory_bytes="100G", priority="low")
    normal = node.create(sm_percent=20, memory_bytes="20G")
    programs += [Worker(node, low, 30 * GIB), Worker(node, normal, GIB)]
    for program in programs:
        program.goes_on()
    high = made_by(create(node, "--sm", "60", "--priority", "high"))
    reading = node.reading(low.vgpu_id)
    assert reading is not None
    assert (reading.state, awake(node, normal)) == ("suspended", True)
    assert reading.preempted is not None
    assert (reading.preempted.by_uid, reading.preempted.priority) == (os.getuid(), "high")
    assert programs[0].stands_still()
    programs[1].goes_on()
    listed = eventually(lambda: waiting(node), "its place in the queue")
    assert [(one.vgpu_id, one.reason) for one in listed] == [(low.vgpu_id, "GPU 0 has no room for it")]
    assert low.vgpu_id in vgpuctl(node, "queue").stdout
    assert "preempted" in vgpuctl(node, "ls").stdout
    assert "preempted for a request" in vgpuctl(node, "inspect", low.vgpu_id).stdout
    assert "for a request by" in vgpuctl(node, "events", "--kind", "preempted").stdout
    with node.link() as link, pytest.raises(VgpuError) as refused:
        link.resume(low.vgpu_id)
    assert refused.value.code is ErrorCode.NO_ROOM
    remove(node, high)
    eventually(lambda: awake(node, low), "its return")
    for program in programs:
        program.goes_on()
    assert waiting(node) == ()
    back = node.reading(low.vgpu_id)
    assert back is not None
    assert (back.preempted, back.reason) == (None, "")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["node", "server"])
def test_a_kill_of_node_or_gpu_server_loses_no_preempted_vgpu(
    node: SimulatedNode, programs: list[Worker], victim: str
) -> None:
    low = node.create(sm_percent=70, memory_bytes="100G", priority="low")
    programs.append(Worker(node, low, GIB))
    high = made_by(create(node, "--sm", "60", "--priority", "high"))
    assert state(node, low) == "suspended"
    if victim == "node":
        node.supervisor.kill()
        node.supervisor.wait(60)
        node.start()
    else:
        os.kill(node.server_pid(), signal.SIGKILL)
        eventually(lambda: state(node, low) == "restarting", "its server is gone")
    eventually(lambda: state(node, low) == "suspended", "it is still preempted")
    eventually(lambda: [one.vgpu_id for one in waiting(node)] == [low.vgpu_id], "its place in the queue")
    remove(node, high)
    eventually(lambda: awake(node, low), "its return")
    programs[0].goes_on()


@pytest.mark.slow
def test_what_is_not_lower_is_never_preempted_and_a_person_keeps_the_last_word(node: SimulatedNode) -> None:
    equal = node.create(sm_percent=90, memory_bytes="1G", priority="high")
    asking = create(node, "--sm", "60", "--priority", "high")
    eventually(lambda: waiting(node) and waiting(node)[0].reason, "its wait")
    remove(node, equal.vgpu_id)
    remove(node, made_by(asking))
    # Off again, by a reload: what waits does so until there is room.
    low = node.create(sm_percent=90, memory_bytes="1G", priority="low")
    with node.link() as link:
        link.set_quotas(Quotas(), QueueRules())
        asking = create(node, "--sm", "60", "--priority", "high")
        eventually(lambda: waiting(node), "its wait")
        assert awake(node, low)
        link.set_quotas(Quotas(), QueueRules.from_option(RULES))
        high = made_by(asking)
        assert state(node, low) == "suspended"
        link.suspend(low.vgpu_id)  # from now on its owner's
        eventually(lambda: not waiting(node), "it does not wait any more")
        link.remove(high)
        assert state(node, low) == "suspended"
        link.resume(low.vgpu_id)
        assert awake(node, low)


@pytest.mark.slow
def test_only_what_is_needed_on_one_gpu_and_never_one_of_a_claim() -> None:
    with SimulatedNode(2, "temporal", "--queue", RULES) as node:
        spec = VgpuSpec.parse(sm_percent=90, memory_bytes="1G", priority="low")
        with node.link() as link:
            claimed = link.create(spec, gpu="0", claim=Claim("slurm", "7"))
        first = node.create("1", sm_percent=40, memory_bytes="1G", priority="normal")
        second = node.create("1", sm_percent=40, memory_bytes="1G", priority="low")
        high = made_by(create(node, "--sm", "50", "--priority", "high"))
        assert (state(node, second), awake(node, first), awake(node, claimed)) == ("suspended", True, True)
        reading = node.reading(high)
        assert reading is not None
        assert reading.gpu_index == 1
        eventually(lambda: waiting(node), "its place in the queue")
        remove(node, first.vgpu_id)
        eventually(lambda: awake(node, second), "its return, beside the request's vGPU")


@pytest.mark.slow
def test_a_client_that_leaves_gives_its_room_back(node: SimulatedNode, programs: list[Worker]) -> None:
    """The node is killed in the middle, and the client with it: no request is left for which the vGPU stands still."""
    low = node.create(sm_percent=70, memory_bytes="100G", priority="low")
    programs.append(Worker(node, low, 8 * GIB))
    asking = create(node, "--sm", "60", "--priority", "high")
    eventually(lambda: not awake(node, low), "its suspension")
    node.supervisor.kill()
    asking.kill()
    asking.wait()
    node.supervisor.wait(60)
    node.start()
    # If the vGPU of the request was made meanwhile, it goes with its client.
    eventually(lambda: awake(node, low), "its return", 180)
    programs[0].goes_on()
    with node.link() as link:
        assert [vgpu.vgpu_id for vgpu in link.list()] == [low.vgpu_id]
