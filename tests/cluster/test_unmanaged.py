"""Programs of real containers that use the GPU past the hook: the messages name the container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import engines
from tests.cluster.test_engines import Place, placed
from tests.integration.node import eventually

pytestmark = pytest.mark.slow
LIBRARY = "/run/vgpu/lib"


@pytest.fixture(scope="module")
def podman(probe: Path) -> Iterator[Place]:
    with placed("podman", probe) as place:
        yield place


@pytest.fixture
def place(podman: Place) -> Iterator[Place]:
    yield podman
    podman.clear()


def told(place: Place, kind: str) -> list[str]:
    with place.node.link() as link:
        return [event.text for event in link.events(kinds=(kind,))]


def test_a_program_past_the_hook_is_of_the_vgpu_of_its_container(place: Place) -> None:
    loader = engines.own_loader(Path(place.image[1].removesuffix(":O")))
    vgpu = place.create()
    device = ("--device", f"vgpu.dev/vgpu={vgpu.vgpu_id}")
    run = ("run", "--name", "one", "--interactive", "--detach", *device, *place.image)
    container = place.engine(*run, "/probe", "64", "wait").stdout.strip()
    eventually(lambda: "allocated 0" in place.engine("logs", "one").stdout, "its first program attaches")
    past = ("--env", f"LD_LIBRARY_PATH={LIBRARY}", "--env", "VGPU_SIM_DIR=/run/vgpu/here/sim")
    ran = place.engine("exec", "--interactive", "--detach", *past, "one", loader, "/probe", "128", "wait")
    assert ran.returncode == 0, ran.stderr
    (text,) = eventually(lambda: told(place, "unmanaged"), "an event names it")
    assert f"uid 0, container {container[:12]}) of {vgpu.vgpu_id} uses " in text
    assert text.endswith("past the hook: nothing here limits it")


def test_a_program_in_no_vgpu_is_named_with_its_container(place: Place) -> None:
    loader = engines.own_loader(Path(place.image[1].removesuffix(":O")))
    vgpu = place.create()
    with place.node.link() as link:
        mounts = link.inspect(vgpu.vgpu_id).mounts
    flags = [
        flag for mount in mounts if "libvgpu_hook" not in mount and vgpu.vgpu_id not in mount for flag in ("-v", mount)
    ]
    flags += ["--env", f"LD_LIBRARY_PATH={LIBRARY}", "--env", "VGPU_SIM_DIR=/run/vgpu/here/sim"]
    run = ("run", "--interactive", "--detach", *flags, *place.image)
    container = place.engine(*run, loader, "/probe", "64", "wait").stdout.strip()
    named = f", container {container[:12]}) uses "
    eventually(lambda: any(named in text for text in told(place, "outside")), "an event names it")
