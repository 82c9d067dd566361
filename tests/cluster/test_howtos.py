"""The commands and files of the pages on containers, with podman in place of every engine.

``IMAGE`` is an image with a probe, which stands for ``nvidia-smi`` too. There is no device of the GPU itself: it is
simulated.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster import engines
from tests.cluster.test_engines import Place, placed
from tests.integration.node import ROOT, eventually

pytestmark = pytest.mark.slow
IMAGE = "localhost/howto:1"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
STANDS_FOR = {
    "IMAGE": IMAGE,
    "python train.py": "/bin/sleep 1000",
    "nvidia-smi": "/probe",
    " --device nvidia.com/gpu=all": "",
}


def page(name: str) -> str:
    return (ROOT / "docs" / "howto" / f"{name}.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def here(text: str) -> str:
    for word, stand_in in STANDS_FOR.items():
        text = text.replace(word, stand_in)
    return text


def commands(block: str) -> list[str]:
    return [here(line.removeprefix("$ ")) for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture(scope="module")
def imported(probe: Path) -> Iterator[Place]:
    with placed("podman", probe) as place:
        tar = place.command.with_name("howto.tar")
        subprocess.run(["tar", "-C", place.image[1].removesuffix(":O"), "-cf", tar, "."], check=True)
        made = place.engine("import", str(tar), IMAGE)
        assert made.returncode == 0, made.stderr
        yield place


@pytest.fixture
def place(imported: Place) -> Iterator[Place]:
    yield imported
    imported.clear()


def typed(place: Place, line: str) -> str:
    """What ``line`` prints in a shell that finds the test's podman and this vgpuctl."""
    pipe = subprocess.PIPE
    shell = place.node.popen(["/bin/sh", "-c", f"PATH={place.command.parent}:{PATH}; {line}"], stdout=pipe, stderr=pipe)
    out, error = shell.communicate(timeout=120)
    assert shell.returncode == 0, f"{line}\n{out}{error}"
    return str(out)


def test_podman_with_a_vgpu_that_goes_with_its_container(place: Place) -> None:
    run, execute, ls, rm = commands(blocks(page("podman"), "console")[0])
    typed(place, run)
    assert "devices 1 total 8192" in typed(place, execute)
    assert "train" in typed(place, ls)
    typed(place, rm)
    eventually(place.is_empty, "the vGPU goes with the container")


def test_podman_with_a_device(place: Place) -> None:
    create, run, run_as_user, rm = commands(blocks(page("podman"), "console")[1])
    typed(place, create)
    for line in (run, run_as_user):
        assert "--device vgpu.dev/vgpu=shared" in line
        assert "devices 1 total 4096" in typed(place, line)
    typed(place, rm)
    assert place.is_empty()


def compose_file(place: Place, folder: Path) -> Path:
    """The first one of the page. The service waits, so that the test can go into its container."""
    [text] = [block for block in blocks(page("docker-compose"), "yaml") if "vgpu.dev" in block]
    path = folder / "compose.yaml"
    path.write_text(here(text).replace("      - nvidia.com/gpu=all\n", "") + "    network_mode: none\n")
    return path


def test_the_device_of_the_compose_file_is_one(place: Place, tmp_path: Path) -> None:
    [create] = commands(blocks(page("docker-compose"), "console")[0])
    typed(place, create)
    [device] = re.findall(r"vgpu\.dev/vgpu=\S+", compose_file(place, tmp_path).read_text())
    assert "devices 1 total 8192" in place.run("--device", device)


def test_podman_compose_takes_the_compose_file(place: Place, tmp_path: Path) -> None:
    if shutil.which("podman-compose", path=PATH) is None:
        why = "podman-compose is not installed; make engines gets it"
        pytest.fail(why) if engines.REQUIRED else pytest.skip(why)
    [create] = commands(blocks(page("docker-compose"), "console")[0])
    _, down, rm = commands(blocks(page("docker-compose"), "console")[1])
    typed(place, create)
    compose = f"podman-compose -f {compose_file(place, tmp_path)}"
    typed(place, f"{compose} up --detach")
    name = place.engine("ps", "--format", "{{.Names}}").stdout.strip()
    assert "devices 1 total 8192" in place.engine("exec", name, "/probe").stdout
    typed(place, down.replace("docker compose", compose))
    typed(place, rm)
    assert place.is_empty()


def test_the_flags_for_an_older_engine_bring_the_vgpu(place: Place) -> None:
    place.create(name="train")
    [command] = re.findall(r"`(vgpuctl container flags \w+)`", page("docker-compose"))
    assert "devices 1 total 8192" in typed(place, f"podman run --rm $({command}) {IMAGE} /probe")


def test_the_hooks_of_jupyterhub(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.node.environment.items():
        if name.startswith("VGPU_"):
            monkeypatch.setenv(name, value)
    [hooks] = [block for block in blocks(page("jupyterhub"), "python") if "def give_vgpu" in block]
    config: dict[str, Any] = {"c": SimpleNamespace(Spawner=SimpleNamespace())}
    exec(compile(hooks, "jupyterhub_config.py", "exec"), config)
    give, take = config["c"].Spawner.pre_spawn_hook, config["c"].Spawner.post_stop_hook
    user = SimpleNamespace(id=7, name="ada@example.org")
    spawner = SimpleNamespace(user=user, volumes={}, read_only_volumes={})
    give(spawner)
    [made] = place.vgpus()
    give(SimpleNamespace(user=user, volumes={}, read_only_volumes={}))
    assert [vgpu.vgpu_id for vgpu in place.vgpus()] == [made.vgpu_id]
    flags = [f"-v={source}:{target}:ro" for source, target in spawner.read_only_volumes.items()]
    flags += [f"-v={source}:{target}" for source, target in spawner.volumes.items()]
    assert "devices 1 total 4096" in place.run(*flags, "--user", "1000")
    take(SimpleNamespace(user=SimpleNamespace(id=8, name="other")))
    assert [vgpu.vgpu_id for vgpu in place.vgpus()] == [made.vgpu_id]
    take(spawner)
    assert place.is_empty()
