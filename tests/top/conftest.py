from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.top.played_node import PlayedNode


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedNode]:
    """A node in a runtime directory of its own, which the environment points at; it tells what a test has it tell."""
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path))
    node = PlayedNode(tmp_path)
    yield node
    node.close()
