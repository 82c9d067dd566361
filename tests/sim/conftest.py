"""A simulated node of one's own for each test, and programs that run on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cython_ext.simengine import Engine, create_gpus

LIBRARIES = Path(__file__).parents[2] / "cython_ext" / "lib" / "sim"
ROOT = Path(__file__).parents[2]


@dataclass
class Node:
    folder: Path
    uuids: list[str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def environment(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "VGPU_", "LD_PRELOAD"))}
        return kept | {"VGPU_SIM_DIR": str(self.folder), "LD_LIBRARY_PATH": str(LIBRARIES)} | more

    def start(
        self, *arguments: str, module: str = "tests.sim.programs", within: Sequence[str] = (), **more: str
    ) -> subprocess.Popen[str]:
        """``within``: a command that starts another one, and is given the program's."""
        process = subprocess.Popen(
            [*within, sys.executable, "-m", module, *arguments],
            env=self.environment(**more),
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def answer(self, process: subprocess.Popen[str], text: str | None = None) -> Any:
        """The last line that a program prints, once it has ended well."""
        output, _ = process.communicate(text, timeout=90)
        assert process.returncode == 0
        return json.loads(output.splitlines()[-1])

    def run(self, *arguments: str, **more: str) -> Any:
        return self.answer(self.start(*arguments, **more))

    def engine(self, index: int = 0) -> Engine:
        return Engine(self.folder, index)

    def wait_until(self, condition: Callable[[Engine], bool]) -> None:
        """Look at the first GPU until something is so; the bound is for a machine under load."""
        engine = self.engine()
        for _ in range(3000):
            engine.refresh()
            if condition(engine):
                return
            time.sleep(0.01)
        raise AssertionError(f"never came: contexts {engine.contexts()}")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, create_gpus(tmp_path, 2, memory_bytes=8 << 30))
    yield node
    for process in node.started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
