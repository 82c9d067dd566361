"""The doors of st-vgpu, each in a few lines of a document: the code runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import vgpu
from tests.api.test_testing import run
from tests.integration.node import ROOT, SimulatedNode, eventually

MOST_LINES = 5
"""Of a block, apart from imports: each door is short enough to be typed."""
TRAIN = """
import ctypes, os
assert os.environ["VGPU_ID"].startswith("vgpu-")
assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
"""
WANDB = "def log(metrics): print(sorted(metrics))"
LIGHTNING = """
class Callback: ...


class Trainer:
    is_global_zero, global_step = True, 50

    def __init__(self, callbacks):
        self.loggers = [self]
        for callback in callbacks:
            assert isinstance(callback, Callback)
            callback.on_train_start(self, None)
            callback.on_train_batch_end(self, None, None, None, 49)

    def log_metrics(self, metrics, step): print(sorted(metrics))
"""
"""Stand-ins for packages that are not installed: they print what they are given."""


def page(name: str) -> str:
    [found] = [ROOT / name] if (ROOT / name).exists() else ROOT.glob(f"docs/**/{name}")
    return found.read_text()


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page(name), re.M | re.S)


def commands(block: str) -> str:
    """What a person types of a console block, as a script."""
    return "\n".join(line.removeprefix("$ ") for line in block.splitlines() if line.startswith(("$ ", "      ")))


def block_with(name: str, language: str, words: str) -> str:
    [found] = [block for block in blocks(name, language) if words in block]
    return found


PYTHON = [(name, block) for name in ("README.md", "python.md") for block in blocks(name, "python")]
SHELL = [
    block_with("quickstart-pytorch.md", "console", words)
    for words in ("--name trainer -o env", "run --sm 30 --mem 8G -- python -m vgpu.workload")
]
DOORS = ["vgpu.require(", "v.run(", "await v.run(", "pytest.mark.vgpu", "simulated_node()", "VgpuStats(", "wandb.log("]


@pytest.fixture
def folder(node: SimulatedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user: with a ``train.py``, and with stand-ins for loggers."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "wandb.py").write_text(WANDB)
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").touch()
    (tmp_path / "lightning" / "pytorch.py").write_text(LIGHTNING)
    monkeypatch.setitem(node.environment, "PATH", f"{Path(sys.executable).parent}:{node.environment['PATH']}")
    monkeypatch.setitem(node.environment, "PYTHONPATH", f"{tmp_path}:{ROOT}")
    return tmp_path


def ran(node: SimulatedNode, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=node.environment, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )


@pytest.mark.parametrize("block", [block for _, block in PYTHON], ids=[f"{n}-{i}" for i, (n, _) in enumerate(PYTHON)])
def test_python(node: SimulatedNode, folder: Path, block: str) -> None:
    inside = "VgpuStats(" in block or "wandb" in block
    if "def test_" in block:
        done = run(folder, block)
    else:
        (folder / "program.py").write_text(block)
        in_vgpu = ("vgpuctl", "run", "--sm", "10", "--mem", "1G", "--") if inside else ()
        done = ran(node, folder, *in_vgpu, "python", "program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not inside or "vgpu/memory_limit_bytes" in done.stdout
    eventually(lambda: not vgpu.list(), "the vGPU's end")


@pytest.mark.parametrize("block", SHELL, ids=["create and set", "run"])
def test_shell(node: SimulatedNode, folder: Path, block: str) -> None:
    done = ran(node, folder, "bash", "-ec", commands(block))
    assert done.returncode == 0, done.stdout + done.stderr
    eventually(lambda: not vgpu.list(), "the vGPU's end")


def test_a_kernel_that_finds_its_vgpu_by_name(node: SimulatedNode, folder: Path) -> None:
    pytest.importorskip("ipykernel")
    block = commands(block_with("quickstart-jupyter.md", "console", "ipykernel install"))
    done = ran(node, folder, "bash", "-ec", f"export JUPYTER_DATA_DIR={folder}/data HOME={folder}; {block}")
    assert done.returncode == 0, done.stdout + done.stderr
    [spec] = folder.rglob("kernel.json")
    assert '"VGPU_ID": "notebook"' in spec.read_text()
    assert "libvgpu_hook.so" in spec.read_text()


@pytest.mark.parametrize("block", [*(block for _, block in PYTHON), *SHELL, *blocks("python.md", "ipython")])
def test_a_door_is_short(block: str) -> None:
    lines = [line for line in block.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(lines) <= MOST_LINES


@pytest.mark.parametrize("door", DOORS)
def test_every_door_is_there(door: str) -> None:
    assert any(door in block for _, block in PYTHON)
