"""One node on two simulated GPUs, and one dashboard of it, for all tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest

from tests.integration.node import PATIENCE_S, ROOT, SimulatedNode
from tests.processes import ended


@dataclass(frozen=True)
class Dashboard:
    """``url``: with a slash at its end. ``printed``: with the token."""

    url: str
    token: str
    printed: str

    def client(self, **options: object) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=f"{self.url}api/v1/", headers=headers, timeout=PATIENCE_S, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="package")
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode(2) as running:
        yield running


@contextmanager
def serving(node: SimulatedNode, *options: str, **environment: str) -> Iterator[Dashboard]:
    """A dashboard of ``node``."""
    command = [sys.executable, "-W", "error", "-m", "vgpu.ctl", "dashboard", "--listen", "127.0.0.1:0", *options]
    pipe, env = subprocess.PIPE, node.environment | environment
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=pipe, text=True) as process, ended(process):
        assert process.stdout is not None
        assert str(node.paths.control_socket) in process.stdout.readline()
        printed = process.stdout.readline().strip()
        url, _, token = printed.partition("?token=")
        yield Dashboard(url, token, printed)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


@pytest.fixture(scope="package")
def dashboard(node: SimulatedNode) -> Iterator[Dashboard]:
    with serving(node) as running:
        yield running
