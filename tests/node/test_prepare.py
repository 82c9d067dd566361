"""A node's directories, before it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.supervisor import prepare
from vgpu.paths import NodePaths
from vgpu.protocol.stream import LONGEST_PATH


def test_a_directory_whose_sockets_would_have_too_long_paths_is_refused(tmp_path: Path) -> None:
    """A broker could not listen there: each creation would fail after its time-out."""
    paths = NodePaths(tmp_path / "run", tmp_path / "state")
    spare = LONGEST_PATH - max(len(str(path)) for path in paths.longest_sockets)
    long = NodePaths(tmp_path / ("r" * (3 + spare + 1)), tmp_path / "state")
    with pytest.raises(VgpuError, match="too long for a Unix socket") as refused:
        prepare(long)
    assert refused.value.code is ErrorCode.INVALID
    assert "VGPU_RUNTIME_DIR" in refused.value.hint
    assert not long.runtime.exists()
