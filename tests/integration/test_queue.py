"""The queue with real processes: order, refusals, clients that die, a node that restarts, a GPU that is kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.commands import vgpuctl
from tests.integration.node import ROOT, SimulatedNode, eventually
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.tenancy import QueueReading
from vgpu.quotas.quota import Quotas
from vgpu.spec import VgpuChanges, VgpuSpec

HOUR_NS = 3600 * 10**9


@pytest.fixture
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode(1) as made:
        yield made


def waiting(node: SimulatedNode) -> tuple[QueueReading, ...]:
    with node.link() as link:
        return link.queue()


def await_waiting(node: SimulatedNode, number: int) -> tuple[QueueReading, ...]:
    """The queue, once it has so many requests, all with their reason."""
    return eventually(
        lambda: found if len(found := waiting(node)) == number and all(one.reason for one in found) else None,
        f"the wait of {number}",
    )


def create(node: SimulatedNode, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "vgpu.ctl", "create", "--mem", "1G", *words]
    return node.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_request_gets_its_vgpu_when_another_goes(node: SimulatedNode) -> None:
    first = node.create(sm_percent=80, memory_bytes="1G")
    asking = create(node, "--sm", "50", "--name", "second", "--wait")
    (one,) = await_waiting(node, 1)
    assert (one.position, one.spec.name, one.kept_gpu) == (1, "second", None)
    assert one.reason == "GPU 0 has 20 % of its time and 139 GiB of its memory left"
    with node.link() as link:
        assert link.meter().waiting == 1
        link.remove(first.vgpu_id)
    out, _ = asking.communicate(timeout=60)
    assert asking.returncode == 0
    made = node.reading(out.strip())
    assert made is not None
    assert made.name == "second"
    assert waiting(node) == ()


def test_what_never_fits_is_refused_at_once_and_a_wait_ends(node: SimulatedNode) -> None:
    never = vgpuctl(node, "create", "--sm", "10", "--mem", "400G", "--wait", code=4)
    assert "no GPU ever has room" in never.stderr
    with node.link() as link:
        link.set_quotas(Quotas.model_validate({"user": {"0": {"sm": 30}, "root": {"sm": 30}}}))
        with pytest.raises(VgpuError) as refused:
            link.create(VgpuSpec.parse(sm_percent=40, memory_bytes="1G"), queue_ns=HOUR_NS)
        assert refused.value.code is ErrorCode.QUOTA
        link.set_quotas(Quotas())
    node.create(sm_percent=80, memory_bytes="1G")
    late = vgpuctl(node, "create", "--sm", "50", "--mem", "1G", "--wait", "1s", code=4)
    assert "there was no room for 1s: GPU 0 has 20 %" in late.stderr
    assert vgpuctl(node, "create", "--sm", "50", "--mem", "1G", "--wait=7", code=2).stderr.startswith("vgpuctl: --wait")


def test_a_client_that_dies_leaves_the_queue_and_gets_nothing(node: SimulatedNode) -> None:
    first = node.create(sm_percent=80, memory_bytes="1G")
    asking = [create(node, "--sm", "50", "--wait") for _ in range(3)]
    await_waiting(node, 3)
    asking[0].kill()
    asking[1].send_signal(signal.SIGINT)
    await_waiting(node, 1)
    with node.link() as link:
        link.remove(first.vgpu_id)
    out, _ = asking[2].communicate(timeout=60)
    with node.link() as link:
        assert [vgpu.vgpu_id for vgpu in link.list()] == [out.strip()]


def test_requests_wait_in_the_order_of_their_arrival_and_ls_and_queue_show_it(node: SimulatedNode) -> None:
    blocking = node.create(sm_percent=100, memory_bytes="1G")
    asking = []
    for number in range(3):
        asking.append(create(node, "--sm", "60", "--name", f"job{number}", "--wait"))
        await_waiting(node, number + 1)
    assert [one.spec.name for one in waiting(node)] == ["job0", "job1", "job2"]
    table = vgpuctl(node, "queue").stdout
    assert [line.split()[0] for line in table.splitlines()] == ["NEXT", "1", "2", "3"]
    assert len(json.loads(vgpuctl(node, "queue", "-o", "json").stdout)) == 3
    done, last = [], blocking.vgpu_id
    for one in asking:
        with node.link() as link:
            link.remove(last)
        last = one.communicate(timeout=60)[0].strip()
        done.append(last)
    with node.link() as link:
        assert [vgpu.name for vgpu in link.list()] == ["job2"]
    assert len(set(done)) == 3


@pytest.mark.slow
def test_a_restarted_node_keeps_the_places_of_those_that_come_back(node: SimulatedNode) -> None:
    blocking = node.create(sm_percent=100, memory_bytes="1G")
    asking = []
    for number in range(4):
        asking.append(create(node, "--sm", "90", "--name", f"job{number}", "--wait", "1h"))
        await_waiting(node, number + 1)
    before = {one.spec.name: one.since_unix_s for one in waiting(node)}
    asking.pop(1).kill()
    await_waiting(node, 3)
    for number in (signal.SIGKILL, signal.SIGTERM):
        node.supervisor.send_signal(number)
        node.supervisor.wait(60)
        node.start()
        now = await_waiting(node, 3)
        assert [one.spec.name for one in now] == ["job0", "job2", "job3"]
        assert all(one.since_unix_s == before[one.spec.name] for one in now)
    with node.link() as link:
        link.remove(blocking.vgpu_id)
    assert asking[0].communicate(timeout=60)[0].startswith("vgpu-")


@pytest.mark.slow
def test_a_gpu_is_kept_for_a_large_request_that_has_waited_for_long() -> None:
    with SimulatedNode(2, "temporal", "--queue", '{"patience": "3s"}') as node:
        held = [node.create(str(gpu), sm_percent=50, memory_bytes="1G") for gpu in (0, 0, 1, 1)]
        large = create(node, "--sm", "100", "--name", "large", "--wait")
        await_waiting(node, 1)
        with node.link() as link:
            link.remove(held[0].vgpu_id)
        eventually(lambda: [one.kept_gpu for one in waiting(node)] == [0], "the GPU that is kept")
        # Neither a request of the queue nor one that does not wait gets what is free there.
        small = create(node, "--sm", "20", "--wait")
        await_waiting(node, 2)
        assert (
            "is kept for a request that has waited"
            in vgpuctl(node, "create", "--sm", "20", "--mem", "1G", "--gpu", "0", code=4).stderr
        )
        # No vGPU grows there, or moves there.
        with node.link() as link:
            for change in (
                lambda: link.set(held[1].vgpu_id, VgpuChanges.parse(sm_percent=60)),
                lambda: link.migrate(held[3].vgpu_id, "0"),
            ):
                with pytest.raises(VgpuError, match="is kept for a request") as refused:
                    change()
                assert refused.value.code is ErrorCode.NO_ROOM
        with node.link() as link:
            link.remove(held[1].vgpu_id)
        assert large.communicate(timeout=60)[0].startswith("vgpu-")
        with node.link() as link:
            link.remove(held[2].vgpu_id)
        assert small.communicate(timeout=60)[0].startswith("vgpu-")


def test_run_waits_and_takes_a_time_or_none(node: SimulatedNode) -> None:
    first = node.create(sm_percent=80, memory_bytes="1G")
    for words in (["--wait"], ["--wait", "10m"], ["--wait=10m"]):
        argv = [sys.executable, "-m", "vgpu.ctl", "run", "--allow-unhooked", "--sm", "50", "--mem", "1G"]
        program = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "--wait", "x"]
        running = node.popen([*argv, *words, *program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
        await_waiting(node, 1)
        with node.link() as link:
            link.remove(first.vgpu_id)
        out, errors = running.communicate(timeout=60)
        assert (running.returncode, out) == (0, "['--wait', 'x']\n"), errors
        first = node.create(sm_percent=80, memory_bytes="1G")


@pytest.mark.slow
def test_a_hundred_at_once_all_get_their_turn_and_never_too_many() -> None:
    with SimulatedNode(2) as node:

        def one(number: int) -> str:
            with node.link() as link:
                made = link.create(VgpuSpec.parse(sm_percent=40, memory_bytes="1G"), queue_ns=HOUR_NS)
                assert sum(vgpu.spec.sm_percent or 0 for vgpu in link.list()) <= 200
                link.remove(made.vgpu_id)
                return made.vgpu_id

        with ThreadPoolExecutor(50) as pool:
            found = list(pool.map(one, range(100)))
        assert len(set(found)) == 100
        with node.link() as link:
            assert link.list() == ()
            assert link.queue() == ()
