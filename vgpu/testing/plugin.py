"""The plugin of pytest: the marker ``vgpu``, and the fixtures ``vgpu`` and ``vgpu_node``.

pytest imports this module at each start, so it imports the API only where a test asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vgpu.api.handle import Vgpu
    from vgpu.api.node import Node

_MARKER = "vgpu(sm=10, mem='2G', ...): the test has a vGPU of its own; programs that it starts run there"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vgpu")
    group.addoption(
        "--vgpu-node",
        choices=("simulated", "running"),
        default="simulated",
        help="where tests have their vGPUs: on a simulated node (default), or on the node that runs",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def pytest_itemcollected(item: pytest.Item) -> None:
    names = getattr(item, "fixturenames", None)
    if names is not None and "vgpu" not in names and item.get_closest_marker("vgpu"):
        names.insert(0, "vgpu")


@pytest.fixture(scope="session")
def vgpu_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node for all tests of this process, so one for each worker of xdist."""
    from vgpu.api.node import Node

    if request.config.getoption("--vgpu-node") == "running":
        yield Node()
        return
    from vgpu.testing import simulated_node

    with simulated_node() as node:
        yield node


@pytest.fixture
def vgpu(request: pytest.FixtureRequest, vgpu_node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vgpu]:
    """The vGPU of a test that is marked ``vgpu``. Programs that the test starts run in it, by ``os.environ``."""
    marker = request.node.get_closest_marker("vgpu")
    if marker is None:
        pytest.fail("how much of a GPU? Mark the test: @pytest.mark.vgpu(sm=10, mem='2G')", pytrace=False)
    with vgpu_node.create(*marker.args, **marker.kwargs) as made:
        for name, value in made.environ_changes().items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        yield made
