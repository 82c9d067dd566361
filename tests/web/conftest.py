"""One node on two simulated GPUs, and one dashboard of it, for all tests of this folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.integration.node import PATIENCE_S, ROOT, SimulatedNode, eventually
from tests.processes import ended
from tests.web.fake_engine import FakeEngine, listening


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


IMAGES = """
[image.train]
image = "example/train:1"
command = ["python", "train.py"]
sm = 30
mem = "1G"
network = "none"

[image.beside]
image = "example/serve:1"
sm = "10%"
mode = "spatial"
"""


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[FakeEngine]:
    with tempfile.TemporaryDirectory(prefix="engine-", dir="/tmp") as folder:
        engine = FakeEngine(Path(folder))
        with listening(engine):
            yield engine


@pytest.fixture(scope="module")
def served(
    node: SimulatedNode, shared_engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dashboard]:
    config = tmp_path_factory.mktemp("config") / "config.toml"
    config.write_text(f'[dashboard]\ncontainers = "{shared_engine.address}"\n{IMAGES}')
    with serving(node, VGPU_CONFIG=str(config)) as dashboard:
        yield dashboard


@pytest.fixture
def engine(shared_engine: FakeEngine, node: SimulatedNode) -> Iterator[FakeEngine]:
    yield shared_engine
    shared_engine.containers.clear()
    shared_engine.bodies.clear()
    shared_engine.asked.clear()
    shared_engine.refuses.clear()
    shared_engine.podman = False
    shared_engine.images |= {"example/train:1", "example/serve:1"}
    shared_engine.more_log.clear()
    eventually(lambda: not claimed(node), "the keepers remove the vGPUs")


def claimed(node: SimulatedNode) -> list[str]:
    """The names of the vGPUs of containers."""
    with node.link() as link:
        return [vgpu.name or "" for vgpu in link.list() if vgpu.claim is not None and vgpu.claim.kind == "container"]
