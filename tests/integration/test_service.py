"""The node as a service: what a configuration file makes of it, and what it tells systemd."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.node import PATIENCE_S, SimulatedNode
from vgpu.errors import VgpuError
from vgpu.node.__main__ import run
from vgpu.node.servers import Sharing
from vgpu.paths import NodePaths
from vgpu.protocol.messages import GpuStatus

FILE = """
[serve]
simulate = 2
period = "20ms"
window = "9ms"

[gpu.1]
mode = "spatial"
period = "40ms"
"""


class Service(SimulatedNode):
    """The same, started by ``vgpuctl serve`` with a configuration file and a service manager that listens."""

    def __init__(self) -> None:
        super().__init__()
        (self.directory / "config.toml").write_text(FILE)
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(self.directory / "notify"))
        self.manager.settimeout(PATIENCE_S)
        self.environment |= {
            "VGPU_CONFIG": str(self.directory / "config.toml"),
            "NOTIFY_SOCKET": str(self.directory / "notify"),
        }
        # The command line goes before the file.
        self.argv = [sys.executable, "-P", "-m", "vgpu.ctl", "serve", "--window", "5ms"]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service() as node, closing(node.manager):
        yield node


@pytest.fixture(scope="module")
def gpus(service: Service) -> list[GpuStatus]:
    with service.link() as link:
        return list(link.gpus())


def test_it_is_ready_once_it_answers(service: Service) -> None:
    assert service.manager.recv(100) == b"READY=1"
    with service.link() as link:
        assert {gpu.state for gpu in link.gpus()} == {"serving"}


def test_each_gpu_is_shared_as_the_file_says(gpus: list[GpuStatus]) -> None:
    assert [(gpu.index, gpu.mode, gpu.period_ns) for gpu in gpus] == [
        (0, "temporal", 20_000_000),
        (1, "spatial", 40_000_000),
    ]


def test_the_command_line_goes_before_the_file(gpus: list[GpuStatus]) -> None:
    assert {gpu.window_ns for gpu in gpus} == {5_000_000}


def test_servers_have_no_word_with_the_service_manager(service: Service) -> None:
    environment = Path(f"/proc/{service.server_pid()}/environ").read_bytes().split(b"\0")
    assert not [variable for variable in environment if variable.startswith(b"NOTIFY_SOCKET=")]


def test_it_says_that_it_stops(service: Service) -> None:
    """Last: the node is gone after it."""
    service.supervisor.send_signal(signal.SIGTERM)
    assert service.manager.recv(100) == b"STOPPING=1"
    assert service.supervisor.wait(PATIENCE_S) == 0


def test_a_file_for_gpus_that_are_not_here_is_refused(tmp_path: Path) -> None:
    paths = NodePaths(tmp_path / "run", tmp_path / "state")
    with pytest.raises(VgpuError, match="there is no GPU 3"):
        run(paths, Sharing(), {3: Sharing("spatial")}, simulate=1)
