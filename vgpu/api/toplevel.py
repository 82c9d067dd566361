"""``create``, ``connect``, ``list`` and ``current`` at the node that the environment names."""

from __future__ import annotations

import os

from vgpu.api.handle import Vgpu
from vgpu.api.node import Node

_node = Node()
create = _node.create
connect = _node.connect
list_vgpus = _node.list


def current() -> Vgpu | None:
    """The vGPU that this process is in (``VGPU_ID``); None: in none. Of several, the first.

    ``VgpuError``: the node does not answer, or the vGPU is gone.
    """
    first = os.environ.get("VGPU_ID", "").partition(",")[0].strip()
    return connect(first) if first else None
