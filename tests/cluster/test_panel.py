"""The containers of the dashboard with real engines at their Unix sockets, podman and Docker: programs in vGPUs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.cluster import engines
from tests.cluster.test_engines import Place, placed
from tests.integration.node import eventually
from tests.processes import ended
from tests.web.conftest import serving
from vgpu.config import ImageConfig
from vgpu.web.containers import engine as engine_api

pytestmark = pytest.mark.slow
IMAGE = "localhost/probe:1"
IMAGES = f"""
[image.probe]
image = "{IMAGE}"
command = ["/bin/sh", "-c", "echo begin; /probe 1024 8192; echo loud >&2; sleep 1000"]
sm = 30
mem = "8G"
network = "none"

[image.short]
image = "{IMAGE}"
command = ["/probe"]
sm = 10
mem = "1G"
network = "none"

[image.missing]
image = "localhost/missing:1"
sm = 10
"""
SAID = "init 0 context 0 devices 1 total 8192 allocated 0 allocated 2"


@pytest.fixture(scope="module", params=["podman", "docker"])
def shared_place(request: pytest.FixtureRequest, probe: Path) -> Iterator[Place]:
    with placed(request.param, probe) as place:
        yield place


@pytest.fixture(scope="module")
def socket(shared_place: Place) -> Iterator[str]:
    """Of the engine, which has ``IMAGE``."""
    folder = shared_place.command.parent
    if shared_place.command.name == "docker":
        assert shared_place.engine("tag", shared_place.image[-1], IMAGE).returncode == 0
        yield f"unix://{folder / 's'}"
        return
    tar = folder / "root.tar"
    subprocess.run(["tar", "-C", shared_place.image[1].removesuffix(":O"), "-cf", tar, "."], check=True)
    imported = shared_place.engine("import", str(tar), IMAGE)
    assert imported.returncode == 0, imported.stderr
    path = folder / "podman.sock"
    command = [shared_place.command, "system", "service", "--time=0", f"unix://{path}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as service, ended(service):
        eventually(path.exists, "podman listens")
        yield f"unix://{path}"


@pytest.fixture(scope="module")
def client(shared_place: Place, socket: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    config = tmp_path_factory.mktemp("config") / "config.toml"
    config.write_text(IMAGES)
    with ExitStack() as stack:
        dashboard = stack.enter_context(serving(shared_place.node, "--containers", socket, VGPU_CONFIG=str(config)))
        yield stack.enter_context(dashboard.client())


@pytest.fixture
def panel(shared_place: Place, client: httpx.Client) -> Iterator[httpx.Client]:
    yield client
    shared_place.remove(*shared_place.engine("ps", "--all", "--format", "{{.Names}}").stdout.split())
    try:
        eventually(shared_place.is_empty, "the keepers remove the vGPUs")
    finally:
        shared_place.node.clear()


def log(panel: httpx.Client, name: str, *, until: Sequence[str] = ()) -> list[tuple[str, str]]:
    """What the log says, to its end; with ``until`` it is followed until all of that is there. The two streams of a
    program have no order between them."""
    found = []
    with panel.stream("GET", f"containers/{name}/logs", params={"follow": str(bool(until)).lower()}) as answer:
        for line in answer.iter_lines():
            told = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if "text" in told:
                found.append((told["stream"], told["text"]))
            if until and all(one in "".join(text for _, text in found) for one in until):
                break
    return found


def test_a_program_of_a_started_container_is_in_its_vgpu(panel: httpx.Client, shared_place: Place) -> None:
    made = panel.post("containers", json={"image": "probe", "name": "one"})
    assert made.status_code == 201, made.text
    (vgpu,) = shared_place.vgpus()
    assert (made.json()["state"], made.json()["vgpus"], vgpu.name) == ("running", [vgpu.vgpu_id], "one")
    said = log(panel, "one", until=(SAID, "loud"))
    assert {stream for stream, _ in said} == {"stdout", "stderr"}
    assert "".join(text for stream, text in said if stream == "stdout") == f"begin\n{SAID}\n"
    assert "devices 1 total 8192" in shared_place.engine("exec", "one", "/probe").stdout
    inspected = json.loads(shared_place.engine("inspect", "one").stdout)[0]
    assert inspected["HostConfig"]["Privileged"] is False
    assert inspected["HostConfig"]["NetworkMode"] == "none"
    assert {mount["Destination"] for mount in inspected["Mounts"]} >= {f"/run/vgpu/here/{vgpu.vgpu_id}"}
    assert "one" in shared_place.vgpuctl("container", "ls").communicate(timeout=120)[0]
    assert panel.post("containers/one/stop").json()["state"] == "exited"
    assert panel.get("containers/one").json()["state"] == "exited"
    assert [vgpu.name for vgpu in shared_place.vgpus()] == ["one"]
    assert panel.post("containers/one/start").json()["state"] == "running"
    said_again = log(panel, "one", until=(SAID, "loud"))
    refused = panel.delete("containers/one")
    assert (refused.status_code, refused.json()["error"]) == (409, "container one is running")
    assert panel.delete("containers/one?force=true").status_code == 200
    eventually(shared_place.is_empty, "the vGPU goes with the container")
    assert said_again


def test_the_log_of_a_container_that_ended_has_an_end(panel: httpx.Client) -> None:
    assert panel.post("containers", json={"image": "short", "name": "short"}).status_code == 201
    eventually(lambda: panel.get("containers/short").json()["state"] == "exited", "it ends")
    assert "".join(text for _, text in log(panel, "short", until=("never",))).startswith("init 0 context 0 devices 1")


def test_an_image_that_is_not_there_leaves_nothing(panel: httpx.Client, shared_place: Place) -> None:
    refused = panel.post("containers", json={"image": "missing"})
    assert refused.status_code == 404, refused.text
    assert "localhost/missing:1" in refused.json()["error"]
    assert refused.json()["hint"] == "pull it with the engine's own command: docker pull localhost/missing:1"
    assert shared_place.is_empty()


def test_a_container_of_another_is_shown_by_its_programs_alone(panel: httpx.Client, shared_place: Place) -> None:
    """A device or a mount leaves no label: the kernel's cgroup of the attached process names the container."""
    vgpu = shared_place.create()
    run = ["run", "--detach", "--interactive", "--network", "none"]
    shared_place.engine(*run, "--name", "stranger", IMAGE, "/bin/sleep", "1000")
    with shared_place.node.link() as link:
        device = [f"--volume={mount}" for mount in link.inspect(vgpu.vgpu_id).mounts]
    if engines.knows_devices(shared_place.command):
        device = [f"--device=vgpu.dev/vgpu={vgpu.vgpu_id}"]
    shared_place.engine(*run, "--name", "guest", *device, IMAGE, "/probe", "64", "wait")

    def shown() -> list[tuple[str, list[str]]]:
        return [(one["name"], one["vgpus"]) for one in panel.get("containers").json()]

    eventually(lambda: shown() == [("guest", [vgpu.vgpu_id])], "it is shown once its program is attached")
    assert panel.delete("containers/stranger?force=true").status_code == 404
    assert panel.delete("containers/guest?force=true").status_code == 200
    with shared_place.node.link() as link:
        link.remove(vgpu.vgpu_id, force=True)


def test_podman_takes_the_request_for_docker_too(panel: httpx.Client, shared_place: Place) -> None:
    if shared_place.command.name != "podman":
        pytest.skip("all other tests of this file send it to Docker itself")
    vgpu = shared_place.create(name="plain")
    with shared_place.node.link() as link:
        volumes = link.inspect(vgpu.vgpu_id).mounts
    image = ImageConfig.model_validate({"image": IMAGE, "command": ("/probe",), "sm": 30, "network": "none"})
    body = engine_api.docker_body(image, {"vgpu.dev/vgpu": vgpu.vgpu_id}, volumes, "")
    transport = httpx.HTTPTransport(uds=str(shared_place.command.with_name("podman.sock")))
    with httpx.Client(transport=transport, base_url="http://engine", trust_env=False) as podman:
        made = podman.post("/containers/create", params={"name": "plain"}, json=body)
        assert made.status_code == 201, made.text
    assert panel.post("containers/plain/start").status_code == 200
    eventually(lambda: "devices 1 total 8192" in "".join(text for _, text in log(panel, "plain")), "it says so")
    with shared_place.node.link() as link:
        link.remove(vgpu.vgpu_id, force=True)
