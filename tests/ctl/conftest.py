from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ctl.fake_node import FakeNode


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNode]:
    """A node in a runtime directory of its own, which the environment points at."""
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path))
    fake = FakeNode(tmp_path)
    yield fake
    fake.close()


@pytest.fixture
def loadable(tmp_path: Path) -> Path:
    """A library every process can preload: the hook's stand-in where the hook itself does not matter."""
    ctypes.CDLL("libm.so.6")
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libm.so" in line]
    copy = tmp_path / "built.so"
    copy.write_bytes(Path(mapped[0]).read_bytes())
    return copy
