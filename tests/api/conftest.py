"""One simulated node for the tests of a file, which is the environment's node, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.node import SimulatedNode


@pytest.fixture(scope="module")
def shared() -> Iterator[SimulatedNode]:
    with SimulatedNode() as running:
        yield running


@pytest.fixture
def node(shared: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedNode]:
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(shared.paths.runtime))
    monkeypatch.delenv("VGPU_ID", raising=False)
    yield shared
    shared.clear()
