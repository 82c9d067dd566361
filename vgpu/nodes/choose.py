"""The order in which the GPUs of several nodes are tried for a new vGPU, pure. The node that is asked decides."""

from __future__ import annotations

from collections.abc import Mapping

from vgpu.placement.box import ranked
from vgpu.protocol.messages import Snapshot
from vgpu.spec import VgpuSpec


def order(policy: str, nodes: Mapping[str, Snapshot], spec: VgpuSpec) -> list[tuple[str, int]]:
    """Node and index of each GPU that serves, best first. The mix of ``fit`` is what all nodes have promised."""
    gpus = [(name, gpu) for name, snapshot in nodes.items() for gpu in snapshot.gpus if gpu.state == "serving"]
    vgpus = [vgpu for snapshot in nodes.values() for vgpu in snapshot.vgpus]
    places = {id(gpu): (name, gpu.index) for name, gpu in gpus}  # two nodes may say one UUID, where they are simulated
    return [places[id(rank.gpu)] for rank in ranked(policy, [gpu for _, gpu in gpus], vgpus, spec)]
