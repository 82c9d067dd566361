"""GPUs that are drained, and plans of migrations that are carried out, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.integration.commands import vgpuctl
from tests.integration.node import SimulatedNode, eventually
from vgpu.errors import ErrorCode, VgpuError


def places(node: SimulatedNode) -> dict[str, int]:
    with node.link() as link:
        return {vgpu.vgpu_id: vgpu.gpu_index for vgpu in link.list()}


def test_a_drained_gpu_takes_no_vgpu_and_its_own_move() -> None:
    with SimulatedNode(2) as node:
        first, second = (node.create("0", sm_percent=30, memory_bytes="1G") for _ in range(2))
        done = vgpuctl(node, "gpu", "drain", "0")
        assert done.stdout.splitlines()[-1] == "GPU 0 is drained, and has no vGPU"
        assert places(node) == {first.vgpu_id: 1, second.vgpu_id: 1}
        assert node.create(sm_percent=10, memory_bytes="1G").gpu_index == 1
        with pytest.raises(VgpuError, match="drained") as refused:
            node.create("0", sm_percent=10, memory_bytes="1G")
        assert refused.value.code is ErrorCode.NO_ROOM
        with node.link() as link:
            with pytest.raises(VgpuError, match="drained"):
                link.migrate(second.vgpu_id, "0")
            assert [event.kind for event in link.events(kinds=("drained",))] == ["drained"]
        assert "drained" in vgpuctl(node, "gpu", "ls").stdout
        # The GPU Server's successor knows it.
        with node.link() as link:
            pid = link.gpus()[0].server_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

        def again() -> bool:
            with node.link() as link:
                gpu = link.gpus()[0]
            return gpu.state == "serving" and gpu.server_pid != pid

        eventually(again, "the next GPU Server")
        with pytest.raises(VgpuError, match="drained"):
            node.create("0", sm_percent=10, memory_bytes="1G")
        assert vgpuctl(node, "gpu", "undrain", "0").stdout == "GPU 0 takes vGPUs\n"
        assert node.create(sm_percent=10, memory_bytes="1G").gpu_index == 0


@pytest.mark.slow
def test_what_has_no_room_stays_and_the_drain_waits_for_it() -> None:
    with SimulatedNode(2) as node:
        large = node.create("0", sm_percent=60, memory_bytes="1G")
        blocking = node.create("1", sm_percent=60, memory_bytes="1G")
        done = vgpuctl(node, "gpu", "drain", "0", code=4)
        assert f"{large.vgpu_id} stays on GPU 0: no other GPU has room for it" in done.stderr
        argv = [sys.executable, "-m", "vgpu.ctl", "gpu", "drain", "0", "--wait"]
        waiting = node.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with node.link() as link:
            link.remove(blocking.vgpu_id)
        out, errors = waiting.communicate(timeout=60)
        assert waiting.returncode == 0, errors
        assert out.splitlines()[-1] == "GPU 0 is drained, and has no vGPU"
        assert places(node) == {large.vgpu_id: 1}
        # All GPUs drained: nothing is made anywhere, and a request waits.
        vgpuctl(node, "gpu", "drain", "1", "--stay", code=4)
        refused = vgpuctl(node, "create", "--sm", "10", "--mem", "1G", code=4)
        assert "every GPU of this node is drained" in refused.stderr
        late = vgpuctl(node, "create", "--sm", "10", "--mem", "1G", "--wait", "1s", code=4)
        assert "no GPU that it may have takes vGPUs now" in late.stderr


@pytest.mark.slow
def test_a_plan_makes_room_for_a_large_vgpu() -> None:
    with SimulatedNode(2) as node:
        for gpu in (0, 1):
            node.create(str(gpu), sm_percent=40, memory_bytes="1G")
        with pytest.raises(VgpuError):
            node.create(sm_percent=80, memory_bytes="1G")
        plan = json.loads(vgpuctl(node, "gpu", "defragment", "--sm", "80", "--mem", "1G", "-o", "json").stdout)
        assert len(plan["moves"]) == 1
        assert set(places(node).values()) == {0, 1}
        done = vgpuctl(node, "gpu", "defragment", "--sm", "80", "--mem", "1G", "--apply").stdout
        assert f"then GPU {plan['gpu']} has room for --sm 80 --mem 1GiB: 1 migration" in done
        assert len(set(places(node).values())) == 1
        assert node.create(sm_percent=80, memory_bytes="1G").gpu_index == plan["gpu"]
        none = vgpuctl(node, "gpu", "defragment", "--sm", "90", "--mem", "1G", code=4)
        assert "no plan makes room for --sm 90 --mem 1GiB" in none.stderr
        assert "it is the size of one vGPU" in vgpuctl(node, "gpu", "defragment", "--mem", "1G", code=2).stderr
