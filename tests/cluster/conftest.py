"""One node with two simulated GPUs for the tests of a file, and containers without an engine."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster import pods, roots
from tests.integration.node import SimulatedNode


@pytest.fixture(scope="module")
def cdi_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cdi")


@pytest.fixture(scope="module")
def shared_node(cdi_folder: Path) -> Iterator[SimulatedNode]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VGPU_CDI_DIR", str(cdi_folder))
        with SimulatedNode(2) as node:
            yield node


@pytest.fixture
def node(shared_node: SimulatedNode) -> Iterator[SimulatedNode]:
    yield shared_node
    shared_node.clear()


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return roots.build_probe(tmp_path_factory.mktemp("probe"))


Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(probe: Path) -> Iterator[Run]:
    """Start ``words`` in a container with ``volumes``, and with the program ``/probe``."""
    if why := roots.is_possible():
        pytest.skip(why)
    started: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="root-") as folder:

        def run(
            volumes: Sequence[str], *words: str, uid: int = 0, remapped: bool = False, cgroup: Path | None = None
        ) -> subprocess.Popen[str]:
            root = Path(folder, str(len(started)))
            root.mkdir()
            command = roots.command(root, [*volumes, f"{probe}:/probe:ro"], words, uid=uid, remapped=remapped)
            if cgroup is not None:
                command = pods.inside(cgroup, command)
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
            return started[-1]

        yield run
        for process in started:
            process.kill()
            process.communicate()
