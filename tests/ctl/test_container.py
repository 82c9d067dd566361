"""``vgpuctl container run``: which words are ours, which are the engine's, and what an engine is asked. The engine is a
script that writes down its words; tests/cluster/test_engines.py has a real one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.node import SimulatedNode, eventually
from vgpu.errors import VgpuError
from vgpu.integrations.engines import Engine, find

VGPUCTL = str(Path(sys.executable).with_name("vgpuctl"))
ENGINE = """#!{python}
import json, sys
state = {state!r}
with open(state, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    sys.exit({code})
print({containers!r} if "--all" in sys.argv else "")  # none of them runs
sys.exit({answers})
"""


@pytest.fixture(scope="module")
def shared_node() -> Iterator[SimulatedNode]:
    with SimulatedNode(1) as node:
        yield node


@pytest.fixture
def node(shared_node: SimulatedNode) -> Iterator[SimulatedNode]:
    yield shared_node
    shared_node.clear()


def engine(folder: Path, name: str = "docker", *, code: int = 0, containers: str = "", answers: int = 0) -> Path:
    """A command that runs nothing. ``answers``: its exit code when it lists containers."""
    path = folder / name
    state = str(folder / "words")
    path.write_text(
        ENGINE.format(python=sys.executable, state=state, code=code, containers=containers, answers=answers)
    )
    path.chmod(0o755)
    return path


def words(folder: Path) -> list[str]:
    """Those of the engine's ``run``."""
    lines = [json.loads(line) for line in (folder / "words").read_text().splitlines()]
    return next(line for line in lines if line[0] == "run")


def run(node: SimulatedNode, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = node.popen([VGPUCTL, "container", "run", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["image"], ["image"]),
        (["--rm", "image", "python", "--sm", "3"], ["--rm", "image", "python", "--sm", "3"]),
        (["--", "-v", "a:b", "image"], ["-v", "a:b", "image"]),
        (["--name", "a", "image", "--name", "b"], ["--name=a", "image", "--name", "b"]),
        (["-d", "image"], ["--detach", "image"]),
        (["--env=A=1", "image"], ["--env=A=1", "image"]),
    ],
)
def test_words_after_our_options_are_the_engines(
    node: SimulatedNode, tmp_path: Path, given: list[str], passed: list[str]
) -> None:
    ran = run(node, "--sm=30", "--mem", "2G", "--engine", str(engine(tmp_path)), *given)
    assert ran.returncode == 0, ran.stderr
    said = words(tmp_path)
    assert said[-len(passed) :] == passed
    assert said[1] == "--label"
    assert said.count("-v") == 6 + passed.count("-v")
    with node.link() as link:
        assert not link.list()


def test_the_exit_code_is_the_engines_and_nothing_stays(node: SimulatedNode, tmp_path: Path) -> None:
    """Also where the engine does not answer afterwards."""
    for answers in (0, 1):
        ran = run(node, "--sm", "30", "--engine", str(engine(tmp_path, code=125, answers=answers)), "image")
        assert ran.returncode == 125
        with node.link() as link:
            assert not link.list()


def test_the_vgpu_stays_while_the_engine_has_the_container(node: SimulatedNode, tmp_path: Path) -> None:
    command = engine(tmp_path, containers="train")
    ran = run(node, "--sm", "30", "--engine", str(command), "--name", "train", "image")
    assert "still exists" in ran.stderr
    with node.link() as link:
        (vgpu,) = link.list()
    assert vgpu.claim is not None
    assert vgpu.claim.labels["engine"] == str(command)
    engine(tmp_path, containers="")

    def is_gone() -> bool:
        with node.link() as link:
            return not link.list()

    eventually(is_gone, "the keeper removes it")


def test_a_missing_image_or_engine_makes_no_vgpu(node: SimulatedNode, tmp_path: Path) -> None:
    assert "which image?" in run(node, "--sm", "30").stderr
    assert "there is no container engine 'no-such'" in run(node, "--sm", "30", "--engine", "no-such", "image").stderr
    with node.link() as link:
        assert not link.list()


def test_an_engine_that_answers_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VgpuError, match="no container engine is installed"):
        find()
    engine(tmp_path, "docker", answers=1)
    assert find().name == "docker", "the only one"
    engine(tmp_path, "podman")
    assert find().name == "podman"
    assert find("docker").name == "docker"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("docker", ["--gpus", "device=GPU-1"]), ("podman", ["--device", "nvidia.com/gpu=GPU-1"])],
)
def test_the_gpu_itself_comes_from_nvidias_toolkit(name: str, expected: list[str]) -> None:
    command = Engine(f"/usr/bin/{name}").run_command(["image"], "vgpu-1", ["a:b:ro"], "GPU-1")
    assert command == [
        f"/usr/bin/{name}",
        "run",
        "--label",
        "vgpu.dev/vgpu=vgpu-1",
        "-v",
        "a:b:ro",
        *expected,
        "image",
    ]
