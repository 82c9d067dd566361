"""Fixtures that several modules of tests have in common. A module takes them by name:

shared, node = nodes(2)
programs = started("programs")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from tests.integration.node import SimulatedNode


class Ends(Protocol):
    def end(self) -> None: ...


def nodes(gpus: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """One simulated node for the module, and the same node for a test, which leaves it empty."""

    @pytest.fixture(scope="module", name="shared")
    def shared() -> Iterator[SimulatedNode]:
        with SimulatedNode(gpus, hasty=True) as running:
            yield running

    @pytest.fixture(name="node")
    def node(shared: SimulatedNode) -> Iterator[SimulatedNode]:
        yield shared
        shared.clear()

    return shared, node


def started(name: str) -> Callable[..., Any]:
    """A list for the programs of a test, by that name. They are ended with the test."""

    @pytest.fixture(name=name)
    def programs() -> Iterator[list[Ends]]:
        found: list[Ends] = []
        yield found
        for program in found:
            program.end()

    return programs
