"""Servers as programs of a benchmark: without a vGPU, or in one; and the wait until their host memory is pinned."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.dialogue import Dialogue
from benchmarks.node import Node, plain_environment
from vgpu.node.link import ControlLink

SERVER: Final = Path(__file__).with_name("server.py")
REQUESTS: Final = 3
TOKENS: Final = 8
PINNED_S: Final = 180.0
REST_S: Final = 10.0
ALLOCATOR: Final = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class Server(Dialogue):
    def __init__(self, prefix: list[str], environment: Mapping[str, str], arguments: list[str], name: str = "plain"):
        super().__init__([*prefix, sys.executable, *arguments], {**environment, **ALLOCATOR}, name)
        self.expected: list[Any] = []
        self.sums: Any = None

    def ask(self, seed: int, turn: int = 0, tokens: int = TOKENS) -> dict[str, Any]:
        """In an odd turn the server goes on with its last answer."""
        self.send(json.dumps({"tokens": tokens} | ({} if turn % 2 else {"seed": seed})))
        return self.answer()

    def all_answers(self) -> list[dict[str, Any]]:
        return [self.ask(seed, turn) for seed in range(REQUESTS) for turn in range(2)]

    def check(self) -> Any:
        self.send(json.dumps({"check": True}))
        return self.answer()["sums"]


def plain_server(node: Node, arguments: list[str]) -> Server:
    environment = plain_environment(node if node.simulated else None)
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("GPU", "0")
    return Server([], environment, arguments)


def server_in_vgpu(node: Node, name: str, arguments: list[str], *, sm: int, mem: str, swap: bool = True) -> Server:
    prefix = [*node.vgpuctl, "run", "--sm", str(sm), "--mem", mem, "--burst", "--name", name]
    prefix += ["--oversubscribe", "swap"] if swap else []
    return Server([*prefix, "--"], node.environment, arguments, name)


def await_pins(link: ControlLink, owned: int) -> float:
    """Wait until all that the swapped vGPUs own has pinned host memory, or nothing more is pinned. Seconds."""
    began = grown = time.monotonic()
    pinned = -1
    while (now := time.monotonic()) - began < PINNED_S and now - grown < REST_S:
        swapped = [vgpu for vgpu in link.list() if vgpu.spec.oversubscribe]
        if all(vgpu.memory_pinned_bytes >= owned for vgpu in swapped):
            break
        if (total := sum(vgpu.memory_pinned_bytes for vgpu in swapped)) > pinned:
            pinned, grown = total, now
        time.sleep(0.5)
    return time.monotonic() - began
