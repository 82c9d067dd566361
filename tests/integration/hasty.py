"""``python -m vgpu.node``, but a GPU Server that is killed again and again is started at once each time: its pauses are
no part of what is tested, and growing ones are what a test would mostly wait for."""

from __future__ import annotations

from vgpu.node import __main__ as node
from vgpu.node import servers

if __name__ == "__main__":
    servers.LONGEST_PAUSE_S = 0.1  # type: ignore[misc]
    node.main()
