"""A node for whoever brings none of their own: one simulated GPU, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.node import SimulatedNode


@pytest.fixture(scope="module")
def shared() -> Iterator[SimulatedNode]:
    with SimulatedNode() as running:
        yield running


@pytest.fixture
def node(shared: SimulatedNode) -> Iterator[SimulatedNode]:
    yield shared
    shared.clear()
