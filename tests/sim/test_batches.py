"""Batches and arrays of the simulated driver: moved as asked for, refused as cuda.h says."""

from __future__ import annotations

from tests.sim.conftest import Node

SUCCESS, INVALID_VALUE, INVALID_HANDLE = 0, 1, 400
NONE_OF_THEM = (1 << 64) - 1


def test_batches_of_copies(node: Node) -> None:
    answer = node.run("copies", module="tests.sim.batches")
    assert answer.pop("good") == [SUCCESS, NONE_OF_THEM]
    assert answer.pop("copied")
    assert answer.pop("flags") == [INVALID_VALUE, NONE_OF_THEM]
    assert answer.pop("default stream") == [INVALID_HANDLE, NONE_OF_THEM]
    assert (answer.pop("beyond"), answer.pop("destroyed")) == (INVALID_VALUE, INVALID_HANDLE)
    assert answer == {key: [INVALID_VALUE, 1] for key in answer}  # the second was wrong, and nothing was queued


def test_batches_of_prefetches(node: Node) -> None:
    answer = node.run("prefetches", module="tests.sim.batches")
    assert (answer.pop("one place"), answer.pop("two places")) == (SUCCESS, SUCCESS)
    assert set(answer.values()) == {INVALID_VALUE}
