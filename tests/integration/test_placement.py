"""Which of a node's GPUs new vGPUs get, with real processes."""

from __future__ import annotations

import pytest

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
