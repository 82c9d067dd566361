"""Which of a node's GPUs new vGPUs get, with real processes."""

from __future__ import annotations

import pytest

from tests.integration.commands import vgpuctl
from tests.integration.node import SimulatedNode
from vgpu.enums import PlacementName
from vgpu.spec import VgpuSpec

WANTED = {
    # With 30 % of both, each: GPU after GPU, or one GPU until it is full.
    PlacementName.SPREAD: [0, 1, 0, 1],
    PlacementName.PACK: [0, 0, 0, 1],
    # The third on GPU 0 would leave 10 %, which no such vGPU can use.
    PlacementName.FIT: [0, 0, 1, 1],
}


@pytest.mark.parametrize("placement", list(PlacementName))
def test_auto_goes_by_the_nodes_placement(placement: PlacementName) -> None:
    with SimulatedNode(2, "temporal", "--placement", placement) as node, node.link() as link:
        size = VgpuSpec.parse(sm_percent="30", fraction="0.3")
        made = [link.create(size).gpu_index for _ in WANTED[placement]]
        assert made == WANTED[placement]


def test_a_dry_run_makes_nothing_and_says_why() -> None:
    with SimulatedNode(2, "temporal", "--placement", "pack") as node:
        node.create("1", sm_percent=50, memory_bytes="1G")
        said = vgpuctl(node, "create", "--sm", "30", "--mem", "8G", "--dry-run").stdout.splitlines()
        assert said[0].split() == ["TRY", "GPU", "LEFT", "SCORE", "BECAUSE"]
        assert [line.split()[:2] for line in said[1:3]] == [["1", "1"], ["2", "0"]]
        assert said[3].startswith("policy pack;")
        said = vgpuctl(node, "create", "--sm", "80", "--mem", "8G", "--dry-run").stdout.splitlines()
        assert said[2].split()[0] == "1"
        assert said[2].endswith("no room: it lacks 30 % of its time")
        vgpuctl(node, "create", "--sm", "80", "--mem", "8G", "--gpu", "1", "--dry-run", code=4)
        with node.link() as link:
            assert len(link.list()) == 1
