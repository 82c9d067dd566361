"""``vgpu.testing``: a simulated node, and the plugin of pytest in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vgpu
from tests.integration.node import ROOT
from vgpu.testing import simulated_node

SUITE = """
import os, subprocess, sys
import pytest

PROGRAM = "import os; print(os.environ['VGPU_ID'], 'libvgpu_hook' in open('/proc/self/maps').read())"

def of_a_program():
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()

@pytest.mark.vgpu(sm=10, mem="2G")
@pytest.mark.parametrize("number", range(4))
def test_marked(number, vgpu, vgpu_node):
    assert of_a_program() == [vgpu.id, "True"]
    assert [one.id for one in vgpu_node.list()] == [vgpu.id]
    assert vgpu.stats().memory_limit_bytes == 2 << 30

@pytest.mark.vgpu(sm=10, mem="1G")
class TestMarked:
    def test_without_arguments(self):
        assert of_a_program()[0] == os.environ["VGPU_ID"]

def test_unmarked():
    assert "VGPU_ID" not in os.environ

def test_node_alone(vgpu_node):
    assert vgpu_node.list() == []
"""
UNUSED = """
import sys
def test_it():
    heavy = {"vgpu.api.node", "vgpu.errors", "pydantic", "trio", "typer", "msgpack", "client_hook"}
    assert not heavy & set(sys.modules)
"""


def run(folder: Path, suite: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_suite.py").write_text(suite)
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "VGPU_ALLOW_PID_NAMESPACE": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "VGPU"))} | own
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "vgpu.testing.plugin"]
    return subprocess.run(
        [*command, "--strict-markers", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_a_simulated_node_has_directories_of_its_own() -> None:
    with simulated_node(gpus=2) as node:
        assert node.path is not None
        with node.create(sm=10, mem="1G", gpu=1) as v:
            assert v.stats().gpu_index == 1
            assert v.run([sys.executable, "-c", ""]).returncode == 0
        folder = node.path.parent.parent
        assert folder.exists()
    assert not folder.exists()
    with pytest.raises(vgpu.VgpuError) as caught:
        node.list()
    assert caught.value.code is vgpu.ErrorCode.UNREACHABLE


@pytest.mark.parametrize("options", [(), ("-p", "xdist.plugin", "-n", "2")], ids=["alone", "xdist"])
def test_marked_tests_have_vgpus(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(tmp_path, SUITE, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout


def test_a_test_that_is_not_marked_says_what_is_missing(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_it(vgpu): pass\n")
    assert done.returncode == 1
    assert "how much of a GPU? Mark the test" in done.stdout


def test_the_plugin_imports_nothing_where_no_test_uses_it(tmp_path: Path) -> None:
    done = run(tmp_path, UNUSED)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pytest_finds_the_plugin() -> None:
    assert 'entry-points.pytest11]\nvgpu = "vgpu.testing.plugin"' in (ROOT / "pyproject.toml").read_text()
