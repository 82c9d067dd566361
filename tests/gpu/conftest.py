"""GPU tests: skipped where no NVIDIA GPU is present, failed there under REQUIRE_GPU=1."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from benchmarks.node import Node


def gpu_count() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.get_closest_marker("gpu")]
    if not mine or gpu_count():
        return
    if os.environ.get("REQUIRE_GPU") == "1":
        raise pytest.UsageError("REQUIRE_GPU=1, but no GPU answers cuInit here")
    for item in mine:
        item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture
def two_gpus() -> None:
    if gpu_count() < 2:
        message = f"two GPUs are needed, {gpu_count()} are here"
        if int(os.environ.get("REQUIRE_GPUS", "0")) >= 2:
            pytest.fail(message)
        pytest.skip(message)


class Place:
    """One node at a time: a GPU has one GPU Server on a machine."""

    def __init__(self) -> None:
        self._mode = ""
        self._node: Node | None = None

    def node(self, mode: str) -> Node:
        if self._node is None or self._mode != mode:
            self.close()
            self._mode, self._node = mode, Node(mode=mode).__enter__()
        return self._node

    def close(self) -> None:
        if self._node is not None:
            self._node.__exit__(None, None, None)
            self._node = None


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.close()


@pytest.fixture
def node(place: Place) -> Node:
    return place.node("temporal")


@pytest.fixture
def spatial_node(place: Place) -> Node:
    return place.node("spatial")
