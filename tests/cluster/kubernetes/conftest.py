"""Beside the node of ``tests/cluster``: a kubelet, an API server and a driver for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kubernetes.cluster import FakeCluster, FakeKubelet, Process
from tests.integration.node import SimulatedNode


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def kubelet() -> Iterator[FakeKubelet]:
    folder = Path(tempfile.mkdtemp(prefix="kubelet-"))  # pytest's own paths are too long for sockets
    yield FakeKubelet(folder)
    shutil.rmtree(folder)


@pytest.fixture
def driver(node: SimulatedNode, kubelet: FakeKubelet, cluster: FakeCluster) -> Iterator[Process]:
    with Process(node, kubelet, cluster) as driver:
        kubelet.register()
        yield driver
