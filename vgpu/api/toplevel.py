"""``create``, ``connect`` and ``list`` at the node that the environment names."""

from __future__ import annotations

from vgpu.api.node import Node

_node = Node()
create = _node.create
connect = _node.connect
list_vgpus = _node.list
