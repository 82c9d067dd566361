"""The HTTP API of a node on simulated GPUs, over real HTTP: the models, words and refusals of the control link."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from tests.ctl.fake_node import process_reading
from tests.integration.node import PATIENCE_S, ROOT, SimulatedNode, eventually
from tests.web.conftest import Dashboard
from vgpu.errors import ErrorCode
from vgpu.protocol.messages import GpuStatus, ProcessReading, Snapshot, VgpuDetail, VgpuStatus
from vgpu.protocol.trace import TraceChunk
from vgpu.web.api import STATUS_OF, Labels, named
from vgpu.web.history import History


@pytest.fixture(scope="module")
def api(dashboard: Dashboard) -> Iterator[httpx.Client]:
    with dashboard.client() as client:
        yield client


@pytest.fixture(scope="module")
def vgpu(api: httpx.Client) -> VgpuStatus:
    answer = api.post(
        "vgpus?gpu=0", json={"sm_percent": "30%", "memory_bytes": "1G", "name": "over-http", "ttl_ns": "8h"}
    )
    assert answer.status_code == 201, answer.text
    return VgpuStatus.model_validate(answer.json())


def ctl(node: SimulatedNode, *arguments: str) -> object:
    command = [sys.executable, "-m", "vgpu.ctl", *arguments, "-o", "json"]
    return json.loads(subprocess.check_output(command, env=node.environment, cwd=ROOT))


def refused(answer: httpx.Response, status: int, code: ErrorCode) -> str:
    said = answer.json()
    assert (answer.status_code, said["code"]) == (status, code), answer.text
    assert set(said) == {"code", "error", "hint"}
    return f"{said['error']} → {said['hint']}"


def test_a_vgpu_is_made_as_people_write_it_and_told_as_vgpuctl_tells_it(
    node: SimulatedNode, api: httpx.Client, vgpu: VgpuStatus
) -> None:
    assert (vgpu.spec.sm_percent, vgpu.memory_limit_bytes, vgpu.spec.ttl_ns) == (30.0, 1 << 30, 8 * 3600 * 10**9)
    told, printed = api.get("vgpus").json(), ctl(node, "ls")
    assert isinstance(printed, list)
    assert set(told[0]) == set(printed[0])
    assert [one["vgpu_id"] for one in told] == [one["vgpu_id"] for one in printed]


def test_every_reading_is_the_control_links_model(api: httpx.Client, vgpu: VgpuStatus) -> None:
    assert {gpu.index for gpu in map(GpuStatus.model_validate, api.get("gpus").json())} == {0, 1}
    assert Snapshot.model_validate(api.get("snapshot").json()).gpus[0].simulated
    assert VgpuDetail.model_validate(api.get("vgpus/over-http").json()).vgpu.vgpu_id == vgpu.vgpu_id
    assert list(map(ProcessReading.model_validate, api.get("processes").json())) == []
    assert api.get("status").json()["simulated"]
    labels = Labels.model_validate(api.get("labels").json())
    assert labels.host == socket.gethostname()
    assert labels.users == {str(os.getuid()): pwd.getpwuid(os.getuid()).pw_name}
    assert labels.commands == {}

    def happened() -> bool:  # the node hears of it from the server, as everybody does from the node
        return "created" in {event["kind"] for event in api.get("events", params={"vgpu": vgpu.vgpu_id}).json()}

    eventually(happened, "the event")
    History.model_validate(api.get("history?seconds=60").json())


def test_a_label_is_the_command_line_of_the_first_program(vgpu: VgpuStatus) -> None:
    with subprocess.Popen(["/bin/sleep", "1000"]) as program:
        try:
            attached = [
                ProcessReading.model_validate(
                    process_reading(vgpu_id=vgpu.vgpu_id, slot=slot, pid=pid, command=command)
                )
                for slot, pid, command in ((1, 1 << 22, "second"), (0, program.pid, "/bin/sleep"))
            ]
            wanted = {vgpu.vgpu_id: "sleep 1000"}  # the kernel has no command line in the first instant of a program
            eventually(lambda: named([vgpu], attached).commands == wanted, "the command line")
        finally:
            program.kill()


def test_a_vgpu_is_changed_suspended_resumed_moved(api: httpx.Client, vgpu: VgpuStatus) -> None:
    changed = api.patch("vgpus/over-http", json={"sm_percent": 40, "memory_bytes": "2G"}).json()
    assert (changed["guarantee_ratio"], changed["memory_limit_bytes"]) == (0.4, 2 << 30)
    at = time.time() + 3600
    answer = api.post("vgpus/over-http/suspend", params={"resume_at_unix_s": at}).json()
    assert (answer["state"], answer["resume_at_unix_s"]) == ("suspended", at)
    for triggers, says in ((["call", "tcp:1"], "listens on port 1,"), (["udp:80"], "is no trigger")):
        answered = api.post("vgpus/over-http/suspend", params={"resume_on": triggers})
        assert says in refused(answered, 400, ErrorCode.INVALID)
    assert api.post("vgpus/over-http/resume").json()["state"] == "idle"
    assert api.post("vgpus/over-http/migrate?gpu=1").json()["gpu_index"] == 1


def test_a_gpu_is_changed(api: httpx.Client) -> None:
    assert api.patch("gpus/1", json={"period_ns": "60ms"}).json()["period_ns"] == 60_000_000
    assert "nothing to change" in refused(api.patch("gpus/1", json={}), 400, ErrorCode.INVALID)
    endless = refused(api.patch("gpus/1", json={"window_ns": "3h"}), 400, ErrorCode.INVALID)
    assert endless.startswith("--window: 3h is not between 250µs and 100ms")


def test_what_the_node_refuses_is_refused_in_its_words(api: httpx.Client, vgpu: VgpuStatus) -> None:
    assert "there is no vGPU 'nobody' → see: vgpuctl ls" in refused(api.get("vgpus/nobody"), 404, ErrorCode.NOT_FOUND)
    for gpu in ("0", "1"):
        api.post(f"vgpus?gpu={gpu}", json={"sm_percent": 10, "memory_bytes": "64M", "name": f"filler-{gpu}"})
    full = api.post("vgpus", json={"sm_percent": 100, "memory_bytes": "1G"})
    assert "the largest that fits: --sm 90" in refused(full, 409, ErrorCode.NO_ROOM)
    taken = api.post("vgpus", json={"sm_percent": 5, "memory_bytes": "1G", "name": "over-http"})
    assert "already" in refused(taken, 409, ErrorCode.EXISTS)
    ambiguous = api.get("vgpus/vgpu-")
    refused(ambiguous, 409, ErrorCode.AMBIGUOUS)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"sm_percent": "0.3"}, "--sm: 0.3 is less than 1 percent: for the fraction 0.3 of a GPU write 30"),
        ({"sm_percent": 30, "memory_bytes": "8 apples"}, "--mem: '8 apples' is not a size"),
        ({"memory_bytes": "8G"}, "how much compute is missing"),
        ({"sm_percent": 30, "memroy_bytes": "8G"}, "memroy_bytes: Extra inputs are not permitted"),
        ([], "should be keys and values"),
    ],
)
def test_what_makes_no_sense_is_explained_in_one_line(api: httpx.Client, body: object, words: str) -> None:
    said = refused(api.post("vgpus", json=body), 400, ErrorCode.INVALID)
    assert words in said
    assert "\n" not in said


def test_no_route_of_that_name_is_said_as_everything_is(api: httpx.Client) -> None:
    refused(api.get("nothing"), 404, ErrorCode.NOT_FOUND)
    refused(api.put("vgpus"), 405, ErrorCode.INVALID)


def test_every_code_has_its_status() -> None:
    assert set(STATUS_OF) == set(ErrorCode)


def test_the_description_names_every_route_and_its_page_needs_no_other_host(
    dashboard: Dashboard, api: httpx.Client
) -> None:
    described = api.get(f"{dashboard.url}api/openapi.json").json()
    assert "post" in described["paths"]["/api/v1/vgpus"]
    assert {"VgpuSpec", "VgpuChanges", "VgpuStatus", "Refused"} <= set(described["components"]["schemas"])
    page = api.get(f"{dashboard.url}api/docs").text
    assert "//" not in page.replace("<!doctype", "")
    for file in ("swagger-ui-bundle.js", "swagger-ui.css"):
        assert api.get(f"{dashboard.url}api/swagger/{file}").status_code == 200


def messages(api: httpx.Client, path: str, wanted: set[str]) -> dict[str, dict[str, object]]:
    """One message of each of these kinds."""
    found: dict[str, dict[str, object]] = {}
    with api.stream("GET", path) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        with closing(lines):  # type: ignore[type-var]
            for line in lines:
                kind = line.removeprefix("event: ")
                if kind in wanted:
                    found[kind] = json.loads(next(lines).removeprefix("data: "))
                if set(found) == wanted:
                    return found
    raise AssertionError(f"the stream ended; it said {set(found)} of {wanted}")


def test_a_stream_tells_how_things_stand_and_what_happens(api: httpx.Client, vgpu: VgpuStatus) -> None:
    said = messages(api, "stream", {"link", "snapshot", "event"})
    assert said["link"]["connected"] is True

    def told() -> bool:
        """The first thing that a page is told may be of the time before it was open."""
        snapshot = Snapshot.model_validate(messages(api, "stream", {"snapshot"})["snapshot"])
        return vgpu.vgpu_id in {one.vgpu_id for one in snapshot.vgpus}

    eventually(told, "pages are told of the vGPU")


def test_a_timeline_tells_leases_while_somebody_looks(api: httpx.Client) -> None:
    for _ in range(2):  # the second one is recorded anew
        chunk = TraceChunk.model_validate(messages(api, "gpus/0/timeline", {"chunk"})["chunk"])
        assert chunk.gpu.simulated
    refused(api.get("gpus/7/timeline"), 404, ErrorCode.NOT_FOUND)


def test_nobody_is_told_anything_without_the_token(dashboard: Dashboard) -> None:
    for path in ("api/v1/vgpus", "api/v1/stream", "api/openapi.json", "api/docs", ""):
        assert httpx.get(dashboard.url + path, timeout=PATIENCE_S).status_code == 401
    assert httpx.delete(f"{dashboard.url}api/v1/vgpus/over-http", timeout=PATIENCE_S).status_code == 401


def test_a_vgpu_is_removed(api: httpx.Client, vgpu: VgpuStatus) -> None:
    for name in ("over-http", "filler-0", "filler-1"):
        assert api.delete(f"vgpus/{name}").status_code == 200
    refused(api.get(f"vgpus/{vgpu.vgpu_id}"), 404, ErrorCode.NOT_FOUND)


@pytest.mark.parametrize(
    "body",
    [
        '{"sm_percent": 10, "ttl_ns": 10000000000000000000000000000000000000000}',
        '{"sm_percent": 10, "ttl_ns": 9223372036854775807}',
        '{"sm_percent": 10, "ttl_ns": 1e400}',
        '{"sm_percent": NaN}',
        '{"sm_percent": 10, "memory_bytes": 18446744073709551616}',
        '{"sm_percent": 10, "ttl_ns": %s}' % ("9" * 5000),
        '{"sm_percent": 10, "share_group": "a\\u0000b"}',
    ],
)
def test_a_number_or_text_beyond_its_bounds_is_refused_with_a_code(api: httpx.Client, body: str) -> None:
    refused(api.post("vgpus", content=body, headers={"Content-Type": "application/json"}), 400, ErrorCode.INVALID)


@pytest.mark.parametrize(
    "path",
    ["events?since_unix_s=inf", "events?since_unix_s=nan", "gpus/99999999999999999999/timeline", f"vgpus/{'x' * 5000}"],
)
def test_a_query_beyond_its_bounds_is_refused_with_a_code(api: httpx.Client, path: str) -> None:
    refused(api.get(path), 400, ErrorCode.INVALID)
