"""What the extender does where the API server refuses, answers late or not at all. The API server is a dictionary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import trio

from tests.cluster.kubernetes.cluster import gpu_pod
from tests.cluster.kubernetes.test_extender_reservations import MEM, node
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.kubernetes.extender import assumed
from vgpu.integrations.kubernetes.extender.messages import Binding
from vgpu.integrations.kubernetes.extender.objects import ChangedError, Listed
from vgpu.integrations.kubernetes.extender.process import Extender


class Server:
    """Has the methods of ``Objects`` that the extender calls. ``after`` and ``before``: what happens at the next write
    of a kind, such as a lost answer."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.version = 0
        self.found = {pod["metadata"]["name"]: pod for pod in pods}
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}
        for pod in pods:
            self._changed(pod)

    def _changed(self, pod: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        pod["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(pod)

    def pods(self) -> Listed:
        return Listed(list(copy.deepcopy(self.found).values()), str(self.version))

    def nodes(self) -> Listed:
        return Listed([node("n1", 1, 8)], str(self.version))

    def pod(self, _: str, name: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.found.get(name))

    def touch(self, name: str) -> None:
        self._changed(self.found[name])

    def _write(self, kind: str, pod: Mapping[str, Any]) -> dict[str, Any] | None:
        self.before.pop(kind, lambda: None)()
        here = self.found.get(pod["metadata"]["name"])
        if here is not None and here["metadata"]["resourceVersion"] != pod["metadata"]["resourceVersion"]:
            raise ChangedError("the pod")
        return here

    def annotate(self, pod: Mapping[str, Any], annotations: Mapping[str, str | None]) -> dict[str, Any] | None:
        here = self._write("annotate", pod)
        if here is None:
            return None
        both = {**here["metadata"].get("annotations", {}), **annotations}
        here["metadata"]["annotations"] = {name: value for name, value in both.items() if value is not None}
        changed = self._changed(here)
        self.after.pop("annotate", lambda: None)()
        return changed

    def bind(self, pod: Mapping[str, Any], name: str) -> bool:
        here = self._write("bind", pod)
        if here is None:
            return False
        here["spec"]["nodeName"] = name
        self._changed(here)
        self.after.pop("bind", lambda: None)()
        return True


def lost() -> None:
    raise VgpuError(ErrorCode.UNREACHABLE, "the API server does not answer")


def asked(name: str) -> Binding:
    return Binding.model_validate({"PodName": name, "PodNamespace": "team-a", "Node": "n1"})


def played(server: Server, play: Callable[[Extender], Any]) -> None:
    async def main() -> None:
        extender = Extender(server, "pack", 120.0)  # type: ignore[arg-type]
        await extender.read()
        await play(extender)

    trio.run(main)


@pytest.fixture
def server() -> Server:
    return Server(gpu_pod("a", {MEM: 8}), gpu_pod("b", {MEM: 7}))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["annotate", "bind"])
def test_a_gpu_stays_promised_where_no_answer_came(server: Server, kind: str, when: str) -> None:
    """Whether the request was carried out or not."""

    async def play(extender: Extender) -> None:
        getattr(server, when)[kind] = lost
        assert await extender.bind(asked("a")) == "the API server does not answer"
        assert "asked for" in await extender.bind(asked("b"))
        assert await extender.bind(asked("a")) == ""
        assert server.found["a"]["spec"]["nodeName"] == "n1"
        assert [held.assigned for held in extender.reservations.held("n1")] == [False]
        server.found["a"]["metadata"]["annotations"][assumed.ASSIGNED] = "true"
        server.touch("a")
        await extender.read()
        assert [held.assigned for held in extender.reservations.held("n1")] == [True]

    played(server, play)


def test_a_gpu_that_stays_promised_is_given_back_in_the_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(extender: Extender) -> None:
        server.after["annotate"] = lost
        await extender.bind(asked("a"))
        clock = extender.reservations.held("n1")[0].assumed_s
        await extender.give_back_overdue()
        assert len(extender.reservations.held("n1")) == 1
        monkeypatch.setattr("time.time", lambda: clock + 121)
        await extender.give_back_overdue()
        assert extender.reservations.held("n1") == []
        assert server.found["a"]["metadata"]["annotations"] == {}
        assert await extender.bind(asked("b")) == ""

    played(server, play)


def test_a_pod_whose_status_changes_meanwhile_is_read_again(server: Server) -> None:
    async def play(extender: Extender) -> None:
        server.before["annotate"] = lambda: server.touch("a")
        assert await extender.bind(asked("a")) == ""

    played(server, play)


def test_a_pod_that_changes_between_annotation_and_bind_is_bound_at_the_next_try(server: Server) -> None:
    async def play(extender: Extender) -> None:
        server.before["bind"] = lambda: server.touch("a")
        assert await extender.bind(asked("a")) == ""
        assert assumed.ASSUMED in server.found["a"]["metadata"]["annotations"]

    played(server, play)


def test_a_pod_that_is_deleted_meanwhile_holds_nothing(server: Server) -> None:
    async def play(extender: Extender) -> None:
        server.before["bind"] = lambda: server.found.pop("a") and None
        assert await extender.bind(asked("a")) == "the pod team-a/a is gone"
        assert extender.reservations.held("n1") == []
        assert await extender.bind(asked("b")) == ""

    played(server, play)


def test_two_requests_for_one_pod_are_one_bind(server: Server) -> None:
    async def play(extender: Extender) -> None:
        answers: list[str] = []

        async def bind() -> None:
            answers.append(await extender.bind(asked("a")))

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(bind)
        assert sorted(answers) == ["", "team-a/a is being bound by an earlier request"]

    played(server, play)
