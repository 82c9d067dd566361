"""Containers on the dashboard, with an engine that runs nothing: what the dashboard asks it for, and what never."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.node import PATIENCE_S, ROOT, SimulatedNode, eventually
from tests.web.conftest import Dashboard, claimed
from tests.web.fake_engine import FakeEngine, frame
from vgpu.config import ImageConfig
from vgpu.errors import ErrorCode
from vgpu.integrations.engines import LABEL
from vgpu.protocol.codec import ProtocolError
from vgpu.web.containers.engine import docker_body, podman_body
from vgpu.web.containers.frames import Frames, Output


@pytest.fixture
def api(served: Dashboard, engine: FakeEngine) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def said(answer: httpx.Response, status: int, code: ErrorCode) -> str:
    told = answer.json()
    assert (answer.status_code, told["code"]) == (status, code), answer.text
    return f"{told['error']} → {told['hint']}"


@pytest.mark.parametrize("podman", [False, True], ids=["docker", "podman"])
def test_a_container_of_the_list_starts_in_a_vgpu_that_goes_with_it(
    api: httpx.Client, engine: FakeEngine, node: SimulatedNode, podman: bool
) -> None:
    engine.podman = podman
    answer = api.post("containers", json={"image": "train", "name": "first"})
    assert answer.status_code == 201, answer.text
    made = answer.json()
    with node.link() as link:
        vgpu = next(one for one in link.list() if one.name == "first")
        volumes = link.inspect(vgpu.vgpu_id).mounts
    assert (made["name"], made["entry"], made["state"], made["vgpus"]) == ("first", "train", "running", [vgpu.vgpu_id])
    assert (vgpu.attach, vgpu.claim and vgpu.claim.kind, vgpu.memory_limit_bytes) == ("mount", "container", 1 << 30)
    labels = {LABEL: vgpu.vgpu_id, "vgpu.dev/image": "train"}
    image = ImageConfig.model_validate(
        {"image": "example/train:1", "command": ("python", "train.py"), "sm": 30, "mem": "1G", "network": "none"}
    )
    expected = podman_body("first", image, labels, volumes, "") if podman else docker_body(image, labels, volumes, "")
    assert engine.bodies == [json.loads(json.dumps(expected))]
    assert api.delete("containers/first?force=true").status_code == 200
    eventually(lambda: not claimed(node), "the vGPU goes with the container")


def test_a_container_without_a_name_has_that_of_its_entry(api: httpx.Client, engine: FakeEngine) -> None:
    made = api.post("containers", json={"image": "train"}).json()
    assert made["name"].startswith("train-")
    assert engine.containers[made["id"]]["Labels"][LABEL] == made["vgpus"][0]


def test_an_entry_may_ask_for_a_gpu_in_a_mode(api: httpx.Client, node: SimulatedNode, engine: FakeEngine) -> None:
    refused = said(api.post("containers", json={"image": "beside"}), 409, ErrorCode.MODE)
    assert refused == "no GPU is in spatial mode → vgpuctl gpu set GPU --mode spatial"
    eventually(lambda: not claimed(node), "nothing is left")
    with node.link() as link:
        link.set_gpu("1", mode="spatial")
        try:
            made = api.post("containers", json={"image": "beside"}).json()
            assert link.inspect(made["vgpus"][0]).vgpu.gpu_index == 1
            api.delete(f"containers/{made['id']}?force=true")
            eventually(lambda: not claimed(node), "the vGPU goes")
        finally:
            link.set_gpu("1", mode="temporal")


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({"image": "example/train:1"}, 404, ErrorCode.NOT_FOUND, "no image 'example/train:1' to start → there are"),
        ({"image": "train", "mounts": ["/:/host"]}, 400, ErrorCode.INVALID, "mounts: Extra inputs are not permitted"),
        ({"image": "train", "privileged": True}, 400, ErrorCode.INVALID, "privileged: Extra inputs are not permitted"),
        ({"image": "train", "command": ["sh"]}, 400, ErrorCode.INVALID, "command: Extra inputs are not permitted"),
        ({"image": "train", "name": "a b"}, 400, ErrorCode.INVALID, "'a b' is not a name"),
        ({"image": "train", "name": "../../x"}, 400, ErrorCode.INVALID, "'../../x' is not a name"),
        ({"image": "train", "name": "00000001"}, 400, ErrorCode.INVALID, "looks like a vGPU's id"),
        ({"image": ["train"]}, 400, ErrorCode.INVALID, "image: should be a text"),
        ({}, 400, ErrorCode.INVALID, "image: is missing"),
        ([], 400, ErrorCode.INVALID, "should be keys and values"),
    ],
)  # fmt: skip
def test_a_page_chooses_an_entry_and_a_name_and_nothing_else(
    api: httpx.Client, engine: FakeEngine, body: object, status: int, code: ErrorCode, words: str
) -> None:
    assert words in said(api.post("containers", json=body), status, code)
    assert engine.asked == []


def test_what_may_be_started_is_told(api: httpx.Client) -> None:
    train, beside = api.get("images").json()
    assert (train["name"], train["sm_percent"], train["memory_bytes"], train["mode"]) == ("train", 30.0, 1 << 30, None)
    assert (beside["name"], beside["memory_bytes"], beside["mode"]) == ("beside", None, "spatial")
    assert api.get("labels").json()["engine"].startswith("unix:///")


def test_a_container_without_a_vgpu_is_out_of_reach(api: httpx.Client, engine: FakeEngine) -> None:
    stranger = engine.add("stranger")
    assert api.get("containers").json() == []
    for ref in (stranger, "stranger", stranger[:12]):
        refused = [
            api.get(f"containers/{ref}"),
            api.get(f"containers/{ref}/logs"),
            api.post(f"containers/{ref}/start"),
            api.post(f"containers/{ref}/stop"),
            api.delete(f"containers/{ref}?force=true"),
        ]
        for answer in refused:
            assert "has a vGPU" in said(answer, 404, ErrorCode.NOT_FOUND)
    assert engine.asked == []


def test_a_container_stops_starts_again_and_goes(api: httpx.Client, engine: FakeEngine) -> None:
    mine = engine.add("mine", vgpu_dev__vgpu="vgpu-1")
    assert api.post("containers/mine/stop").json()["state"] == "exited"
    assert engine.containers[mine]["State"] == "exited"
    assert api.post(f"containers/{mine[-6:]}/start").status_code == 404
    assert api.post(f"containers/{mine[:62]}/start").json()["state"] == "running"
    assert said(api.delete("containers/mine"), 409, ErrorCode.IN_USE) == "container mine is running → stop it first"
    assert api.delete("containers/mine?force=true").json()["id"] == mine
    assert engine.asked == [
        f"POST /containers/{mine}/stop",
        f"POST /containers/{mine}/start",
        f"DELETE /containers/{mine}",
    ]


def test_what_the_engine_refuses_is_said_and_leaves_no_vgpu(
    api: httpx.Client, engine: FakeEngine, node: SimulatedNode
) -> None:
    engine.refuses = {".*/create": (409, "the name is in use")}
    told = said(api.post("containers", json={"image": "train"}), 409, ErrorCode.IN_USE)
    assert "the container engine refuses: the name is in use" in told
    assert claimed(node) == []
    engine.refuses = {".*/start": (500, "OCI runtime error")}
    assert "OCI runtime error" in said(api.post("containers", json={"image": "train"}), 503, ErrorCode.UNAVAILABLE)
    assert engine.containers == {}
    assert claimed(node) == []


@pytest.mark.parametrize("podman", [False, True], ids=["docker", "podman"])
def test_an_image_that_the_engine_lacks_is_not_pulled(api: httpx.Client, engine: FakeEngine, podman: bool) -> None:
    engine.podman = podman
    engine.images.remove("example/train:1")
    told = said(api.post("containers", json={"image": "train"}), 404, ErrorCode.NOT_FOUND)
    assert "does not have the image example/train:1" in told
    assert "docker pull example/train:1" in told
    assert engine.asked == []


def test_a_node_without_room_is_asked_no_further(api: httpx.Client, engine: FakeEngine, node: SimulatedNode) -> None:
    for _ in range(6):
        assert api.post("containers", json={"image": "train"}).status_code == 201
    full = said(api.post("containers", json={"image": "train"}), 409, ErrorCode.NO_ROOM)
    assert "the largest that fits" in full
    assert len(engine.bodies) == len(claimed(node)) == 6


def events(api: httpx.Client, path: str) -> Iterator[tuple[str, dict[str, object]]]:
    with api.stream("GET", path) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        for line in lines:
            if line.startswith("event: "):
                yield line.removeprefix("event: "), json.loads(next(lines).removeprefix("data: "))


def test_a_log_is_told_as_it_comes(api: httpx.Client, engine: FakeEngine) -> None:
    mine = engine.add("mine", vgpu_dev__vgpu="vgpu-1")
    engine.logs[mine] = frame(1, b"one\n") + frame(2, "zwölf\n".encode())
    assert list(events(api, "containers/mine/logs")) == [
        ("output", {"stream": "stdout", "text": "one\n"}),
        ("output", {"stream": "stderr", "text": "zwölf\n"}),
        ("end", {}),
    ]
    following = events(api, "containers/mine/logs?follow=true")
    assert [next(following)[1]["text"] for _ in range(2)] == ["one\n", "zwölf\n"]
    engine.more_log.set()
    assert list(following) == [("output", {"stream": "stdout", "text": "and on\n"}), ("end", {})]


def test_what_is_no_log_is_a_failure(api: httpx.Client, engine: FakeEngine) -> None:
    mine = engine.add("mine", vgpu_dev__vgpu="vgpu-1")
    engine.logs[mine] = b"HTTP/1.1 200 OK\r\n"
    [(kind, told)] = events(api, "containers/mine/logs")
    assert (kind, told["code"]) == ("failure", ErrorCode.PROTOCOL)
    said(api.get("containers/mine/logs?tail=-1"), 400, ErrorCode.INVALID)


def test_nobody_reaches_containers_without_the_token(served: Dashboard, engine: FakeEngine) -> None:
    for method, path in (("GET", "containers"), ("POST", "containers"), ("GET", "images"), ("DELETE", "containers/x")):
        assert httpx.request(method, f"{served.url}api/v1/{path}", timeout=PATIENCE_S).status_code == 401
    assert engine.asked == []


def test_a_dashboard_without_an_engine_has_no_such_routes(dashboard: Dashboard) -> None:
    with dashboard.client() as client:
        assert client.get("containers").status_code == 404
        assert client.get("labels").json()["engine"] == ""


def test_an_engine_that_is_away_is_said_to_be(node: SimulatedNode, api: httpx.Client, engine: FakeEngine) -> None:
    away = engine.path.rename(engine.path.with_name("away"))
    try:
        told = said(api.get("containers"), 503, ErrorCode.UNREACHABLE)
    finally:
        away.rename(engine.path)
    assert f"the container engine at {engine.address} does not answer" in told
    assert "systemctl start docker" in told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--containers", "/run/docker.sock"], "--containers: '/run/docker.sock' is no socket of an engine"),
        (["--containers", "tcp://127.0.0.1:2375"], "write unix:///run/docker.sock"),
        (["--containers", "unix:///nowhere.sock"], "--containers: no container engine answers at /nowhere.sock"),
        (["--containers", "unix:///nowhere.sock", "--no-token"], "each program here would be as root"),
    ],
)
def test_a_dashboard_says_at_once_what_is_wrong_with_its_engine(
    node: SimulatedNode, options: list[str], words: str
) -> None:
    command = [sys.executable, "-m", "vgpu.ctl", "dashboard", "--listen", "127.0.0.1:0", *options]
    done = subprocess.run(command, env=node.environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert words in done.stderr


def test_a_gpu_itself_is_asked_for_as_the_engine_understands_it() -> None:
    image = ImageConfig.model_validate({"image": "example/train:1", "sm": 30})
    docker = docker_body(image, {}, ["/a:/b:ro"], "GPU-1")
    assert docker == {
        "Image": "example/train:1",
        "Labels": {},
        "HostConfig": {"Binds": ["/a:/b:ro"], "DeviceRequests": [{"DeviceIDs": ["GPU-1"], "Capabilities": [["gpu"]]}]},
    }
    podman = podman_body("one", image, {}, ["/a:/b:ro", "/c:/c"], "GPU-1")
    assert podman["devices"] == [{"path": "nvidia.com/gpu=GPU-1"}]
    assert podman["mounts"] == [
        {"type": "bind", "source": "/a", "destination": "/b", "options": ["rbind", "ro"]},
        {"type": "bind", "source": "/c", "destination": "/c", "options": ["rbind", "rw"]},
    ]


TEXTS = st.lists(st.tuples(st.sampled_from([1, 2]), st.text(min_size=1)), max_size=8)


@given(texts=TEXTS, cuts=st.lists(st.integers(1, 20), min_size=1))
def test_a_log_is_the_same_however_it_is_cut(texts: list[tuple[int, str]], cuts: list[int]) -> None:
    data = b"".join(frame(stream, text.encode("utf-8", "replace")) for stream, text in texts)
    frames, found = Frames(terminal=False), {"stdout": "", "stderr": ""}
    while data:
        for cut in cuts:
            for output in frames.feed(data[:cut]):
                found[output.stream] += output.text
            data = data[cut:]
    for number, stream in ((1, "stdout"), (2, "stderr")):
        expected = b"".join(text.encode("utf-8", "replace") for one, text in texts if one == number)
        assert found[stream] == expected.decode()


def test_the_output_of_a_terminal_has_no_frames() -> None:
    assert list(Frames(terminal=True).feed(b"\x01\x00\x00\x00hello")) == [Output("stdout", "\x01\x00\x00\x00hello")]
    with pytest.raises(ProtocolError, match="begins no frame"):
        list(Frames(terminal=False).feed(b"hello, world"))
