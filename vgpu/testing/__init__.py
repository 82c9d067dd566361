"""For tests of programs that use a GPU: a simulated node, and a plugin of pytest (docs/reference/python.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:  # pytest imports this package at its start
    from typing import Literal

    from vgpu.api.node import Node


@contextmanager
def simulated_node(gpus: int = 1, mode: Literal["temporal", "spatial"] = "temporal") -> Iterator[Node]:
    """A node with simulated GPUs beside any other node of this machine, with directories of its own. It ends with the
    block, and its vGPUs with it. ``VgpuError``: it does not start."""
    from vgpu.testing.node import started

    with started(gpus, mode) as node:
        yield node
