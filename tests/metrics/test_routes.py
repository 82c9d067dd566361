"""/metrics and /healthz, of a node that answers, one that answers nonsense, and one that is not there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from tests.ctl.fake_node import FakeNode, gpu_reading
from tests.metrics.meterings import busy
from vgpu.errors import ErrorCode, VgpuError
from vgpu.metrics.serve import application
from vgpu.metrics.source import Source


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    fake = FakeNode(tmp_path)
    fake.answers["meter"] = lambda request: busy(2).model_dump(mode="json")
    fake.answers["gpus"] = lambda request: {"gpus": [gpu_reading().model_dump(mode="json")]}
    yield fake
    fake.close()


def got(directory: Path, path: str, **headers: str) -> httpx.Response:
    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(application(directory / "control.sock"))
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as browser:
            return await browser.get(path, headers=headers)

    return trio.run(get)


def test_the_format_is_the_one_that_is_asked_for(node: FakeNode, tmp_path: Path) -> None:
    plain = got(tmp_path, "/metrics")
    assert plain.status_code == 200
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert 'vgpu_tokens_total{gpu="0",name="job-1"' in plain.text
    assert 'vgpu_node_info{version="9.9.9"} 1.0' in plain.text
    wanted = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"  # as Prometheus asks
    modern = got(tmp_path, "/metrics", accept=wanted)
    assert modern.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert modern.text.endswith("# EOF\n")
    assert "# TYPE vgpu_tokens counter\n" in modern.text


def test_without_a_node_both_answer_and_say_so(tmp_path: Path) -> None:
    answer = got(tmp_path, "/metrics")
    assert answer.status_code == 200
    assert "\nvgpu_node_up 0.0\n" in answer.text
    healthy = got(tmp_path, "/healthz")
    assert (healthy.status_code, healthy.json()["status"]) == (503, "down")
    assert str(tmp_path) in healthy.json()["reason"]


def failing(request: Any) -> dict[str, Any]:
    raise VgpuError(ErrorCode.INTERNAL, "out of order")


@pytest.mark.parametrize("answer", [failing, lambda request: {"snapshot": "nonsense"}])
def test_a_node_that_cannot_tell_is_not_up(node: FakeNode, tmp_path: Path, answer: Any) -> None:
    node.answers["meter"] = node.answers["gpus"] = answer
    assert "\nvgpu_node_up 0.0\n" in got(tmp_path, "/metrics").text
    assert got(tmp_path, "/healthz").json()["status"] == "down"


def test_health_names_the_gpus_that_are_not_served(node: FakeNode, tmp_path: Path) -> None:
    healthy = got(tmp_path, "/healthz")
    assert (healthy.status_code, healthy.json()["status"]) == (200, "ok")
    gpus = [gpu_reading(), gpu_reading(index=1, state="restarting", reason="its server ended")]
    node.answers["gpus"] = lambda request: {"gpus": [gpu.model_dump(mode="json") for gpu in gpus]}
    degraded = got(tmp_path, "/healthz")
    assert degraded.status_code == 503
    assert degraded.json() == {
        "status": "degraded",
        "reason": "not served: GPU 1",
        "gpus": [
            {"index": 0, "state": "serving", "reason": ""},
            {"index": 1, "state": "restarting", "reason": "its server ended"},
        ],
    }


def test_a_node_that_is_silent_is_not_waited_for_without_end(node: FakeNode, tmp_path: Path) -> None:
    over = threading.Event()

    def silent(request: Any) -> dict[str, Any]:
        over.wait(30)
        return {}

    node.answers["meter"] = silent
    seen = trio.run(Source(tmp_path / "control.sock", answer_s=0.05).see)
    over.set()
    assert seen.error is not None
    assert seen.error.code is ErrorCode.TIMEOUT


def test_scrapes_at_the_same_time_ask_one_question_at_a_time(node: FakeNode, tmp_path: Path) -> None:
    """Ten that come while the node thinks about an earlier one share the next answer, which is not older than they."""
    thinking, over = threading.Event(), threading.Event()

    def slow(request: Any) -> dict[str, Any]:
        thinking.set()
        assert over.wait(30)
        return busy(1).model_dump(mode="json")

    node.answers["meter"] = slow

    async def scrape() -> None:
        source = Source(tmp_path / "control.sock")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.see)
            await trio.to_thread.run_sync(thinking.wait)
            for _ in range(10):
                nursery.start_soon(source.see)
            await trio.testing.wait_all_tasks_blocked()
            over.set()

    trio.run(scrape)
    assert [request.op for request in node.asked] == ["meter", "meter"]
