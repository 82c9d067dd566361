"""``vgpuctl container`` with an engine that runs nothing: what happens to the vGPU, by the engine's answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.integration.node import SimulatedNode, eventually
from vgpu.ctl.integrations.quick import OTHERS, VALUED, parsed
from vgpu.integrations import keeper
from vgpu.integrations.claims import Claim
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuSpec

VGPUCTL = str(Path(sys.executable).with_name("vgpuctl"))
GONE, SILENT = "true", "exit 1"


def engine(folder: Path, run: str, listed: str) -> Path:
    """``run``, ``listed``: what its commands ``run`` and ``ps`` do, in shell."""
    path = folder / "engine"
    path.write_text(f'#!/bin/sh\n[ "$1" = run ] && {{ {run}; }}\n{listed}\n')
    path.chmod(0o755)
    return path


def container(node: SimulatedNode, *words: str) -> tuple[int, str]:
    """Exit code and errors of ``vgpuctl container``."""
    argv = [VGPUCTL, "container", *words]
    ran = subprocess.run(argv, env=node.environment, capture_output=True, text=True, timeout=60, check=False)
    return ran.returncode, ran.stderr


def vgpus(node: SimulatedNode) -> list[VgpuStatus]:
    with node.link() as link:
        return link.list()


@pytest.mark.parametrize(
    ("code", "listed", "left"),
    [(0, GONE, 0), (1, GONE, 0), (1, SILENT, 1), (125, SILENT, 0), (0, "echo one", 1)],
    ids=["it ended", "it failed", "the engine does not answer", "no engine answers", "it still exists"],
)
def test_a_vgpu_goes_when_its_container_is_known_to_be_gone(
    node: SimulatedNode, tmp_path: Path, code: int, listed: str, left: int
) -> None:
    path = engine(tmp_path, f"exit {code}", listed)
    made = container(node, "run", "--sm", "10", "--mem", "1G", "--engine", str(path), "IMAGE")
    assert made[0] == code
    assert len(vgpus(node)) == left
    engine(tmp_path, "true", GONE)
    eventually(lambda: not vgpus(node), "the keeper removes it")


def test_a_running_container_is_not_said_to_have_ended(node: SimulatedNode, tmp_path: Path) -> None:
    """``-d`` among the words of the engine."""
    path = engine(tmp_path, "exit 0", "echo one")
    assert container(node, "run", "--sm", "10", "--mem", "1G", "--engine", str(path), "--rm", "-d", "IMAGE") == (0, "")
    engine(tmp_path, "exit 0", '[ "$2" = --filter ] || echo one')  # it exists, and does not run
    _, said = container(node, "run", "--sm", "10", "--mem", "1G", "--engine", str(path), "IMAGE")
    assert "the container has ended and still exists" in said
    engine(tmp_path, "true", GONE)
    eventually(lambda: not vgpus(node), "both go")


def test_the_engine_of_another_users_claim_is_not_run(node: SimulatedNode, tmp_path: Path) -> None:
    """Any user may name any program there."""
    path = engine(tmp_path, "true", f"touch {tmp_path}/ran")
    with node.link() as link:
        spec = VgpuSpec.parse(sm_percent="10", memory_bytes="1G")
        link.create(spec, claim=Claim("container", "x", labels={"engine": str(path)}), owner_uid=1000)
    assert container(node, "ls")[0] == 0
    assert not (tmp_path / "ran").exists()
    assert len(vgpus(node)) == 1


def test_a_keeper_whose_vgpu_and_engine_are_gone_ends(node: SimulatedNode, tmp_path: Path) -> None:
    path = engine(tmp_path, "exit 0", "echo one")
    container(node, "run", "--sm", "10", "--mem", "1G", "--engine", str(path), "-d", "IMAGE")
    (vgpu,) = vgpus(node)
    assert keeper.is_kept(vgpu)
    path.unlink()
    with node.link() as link:
        link.remove(vgpu.vgpu_id, force=True)
    eventually(lambda: not keeper.is_kept(vgpu), "the keeper ends")


# --- the quick way


def test_the_quick_way_knows_each_option() -> None:
    from vgpu.ctl.integrations.container import container_app, register

    register(typer.Typer())
    command = next(one for one in container_app.registered_commands if one.name == "run")
    declared = {
        name
        for parameter in command.callback.__signature__.parameters.values()  # type: ignore[union-attr]
        for option in getattr(parameter.annotation, "__metadata__", ())
        for name in [*getattr(option, "param_decls", ())] or [f"--{parameter.name.replace('_', '-')}"]
        if name.startswith("-")
    }
    assert declared - {"--detach", "-d"} <= VALUED.keys() | OTHERS | {f"--no-{name[2:]}" for name in OTHERS}


def test_the_quick_way_divides_a_command_line() -> None:
    own = ["--sm", "30", "--mem=8G", "--engine", "podman", "-d"]
    found = ({"sm": "30", "mem": "8G", "engine": "podman", "detach": "yes"}, ["--rm", "IMAGE", "--sm", "1"])
    assert parsed([*own, "--rm", "IMAGE", "--sm", "1"]) == found
    assert parsed([*own, "--", "IMAGE"]) == (found[0], ["IMAGE"])
    for words in ([*own], ["--sm"], ["--burst", "IMAGE"], ["--help"], ["--mem-limit=9G", "IMAGE"]):
        assert parsed(words) is None
