"""A user who runs no node of their own asks the system's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ctl.fake_node import FakeNode
from vgpu import paths
from vgpu.node.link import ControlLink, client_socket


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The user's own runtime directory, and the system's."""
    own, system = tmp_path / "own", tmp_path / "system"
    (own / "vgpu").mkdir(parents=True)
    system.mkdir()
    monkeypatch.delenv("VGPU_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    monkeypatch.setattr(paths, "SYSTEM_RUNTIME", system)
    monkeypatch.setattr(paths.os, "getuid", lambda: 1000)
    return own / "vgpu", system


def test_the_own_node_goes_before_the_systems(places: tuple[Path, Path]) -> None:
    own, system = places
    assert client_socket() == own / "control.sock"  # neither is there: the own one could be started
    nodes = [FakeNode(system)]
    assert client_socket() == system / "control.sock"
    (own / "control.sock").touch()  # of a node that is gone
    assert client_socket() == system / "control.sock"
    (own / "control.sock").unlink()
    nodes.append(FakeNode(own))
    assert client_socket() == own / "control.sock"
    for node in nodes:
        node.close()


def test_a_link_finds_the_systems_node(places: tuple[Path, Path]) -> None:
    node = FakeNode(places[1])
    with ControlLink() as link:
        assert link.welcome.pid
    node.close()


def test_what_the_environment_names_is_asked(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode(places[1])
    monkeypatch.setenv("VGPU_RUNTIME_DIR", "/nonexistent")
    assert client_socket() == Path("/nonexistent/control.sock")
    node.close()
