"""GPU tests: skipped where no NVIDIA GPU is present, failed there under REQUIRE_GPU=1."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from benchmarks.gpu.node import Node


def gpu_present() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.get_closest_marker("gpu")]
    if not mine or gpu_present():
        return
    if os.environ.get("REQUIRE_GPU") == "1":
        raise pytest.UsageError("REQUIRE_GPU=1, but no GPU answers cuInit here")
    for item in mine:
        item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(mode="temporal") as node:
        yield node


@pytest.fixture(scope="module")
def spatial_node() -> Iterator[Node]:
    with Node(mode="spatial") as node:
        yield node
