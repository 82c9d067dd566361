"""What the long-lived processes of a node import: each module costs its share of every start, and of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("process", "unneeded"),
    [
        ("vgpu.node.__main__", ("rich", "pygments", "typer", "psutil")),
        ("gpuserver.__main__", ("rich", "pygments", "typer", "psutil")),
        ("vgpu.broker.template", ("rich", "structlog", "asyncio", "psutil", "pynvml", "vgpu.protocol.messages")),
        ("vgpu.broker.__main__", ("rich", "structlog", "asyncio", "psutil", "pynvml", "vgpu.protocol.messages")),
    ],
)
def test_a_process_imports_nothing_that_it_does_not_need(process: str, unneeded: tuple[str, ...]) -> None:
    script = f"import sys, {process}; print(*[m for m in {unneeded!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_rich_can_be_imported_after_the_loggers() -> None:
    """They hide it from structlog alone."""
    script = "import vgpu.loggers, rich.console; assert rich.console.Console"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
