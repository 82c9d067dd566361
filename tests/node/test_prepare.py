"""A node's directories, before it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.supervisor import check_paths
from vgpu.paths import NodePaths
from vgpu.protocol.stream import LONGEST_PATH


def test_a_directory_whose_sockets_would_have_too_long_paths_is_refused() -> None:
    """A broker could not listen there: each creation would fail after its time-out."""
    spare = LONGEST_PATH - max(len(str(path)) for path in NodePaths(Path("/r"), Path("/s")).longest_sockets)
    check_paths(NodePaths(Path("/r" + "r" * spare), Path("/s")))
    with pytest.raises(VgpuError, match="too long for a Unix socket") as refused:
        check_paths(NodePaths(Path("/rr" + "r" * spare), Path("/s")))
    assert refused.value.code is ErrorCode.INVALID
    assert "VGPU_RUNTIME_DIR" in refused.value.hint
