"""What a node tells of what has happened, over deaths of its own and of its servers. Real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.node import PATIENCE_S, SimulatedNode, eventually
from vgpu.node.loglines import parsed_all
from vgpu.protocol.messages import EventReading
from vgpu.spec import VgpuChanges


@pytest.fixture(scope="module")
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode(2) as running:
        yield running


def told(node: SimulatedNode, reference: str = "", *kinds: str) -> list[EventReading]:
    with node.link() as link:
        return list(link.events(reference, kinds=kinds))


def test_changes_say_by_whom_also_of_a_vgpu_that_is_gone(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="1G", name="mine")
    with node.link() as link:
        link.set("mine", VgpuChanges.parse(sm_percent=20))
        link.remove("mine")
    events = eventually(lambda: len(seen := told(node, "mine")) == 3 and seen, "three events")
    assert [event.kind for event in events] == ["created", "changed", "removed"]
    assert all(event.fields["by_uid"] == os.getuid() for event in events)
    assert all(f"by uid {os.getuid()}" in event.text for event in events)
    assert told(node, vgpu.vgpu_id, "removed") == events[2:]


def test_whoever_follows_misses_nothing_and_sees_nothing_twice(node: SimulatedNode) -> None:
    command = [sys.executable, "-m", "vgpu.ctl", "events", "-f", "-o", "json", "-n", "1000"]
    following = node.popen(command, stdout=subprocess.PIPE)
    ids = [node.create(sm_percent=1, memory_bytes="64M", gpu=str(n % 2)).vgpu_id for n in range(3)]
    with node.link() as link:
        for vgpu_id in ids:
            link.remove(vgpu_id)
    assert following.stdout is not None
    seen = []
    while not {(vgpu_id, "removed") for vgpu_id in ids} <= {(one["vgpu_id"], one["kind"]) for one in seen}:
        seen.append(json.loads(following.stdout.readline()))
    following.send_signal(signal.SIGINT)
    assert following.wait(PATIENCE_S) == 0
    assert seen == [event.model_dump(mode="json") for event in told(node)]


def test_what_happens_while_there_is_no_node_is_told_by_the_next_one(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="1G", name="kept")
    eventually(lambda: told(node, "kept", "created"), "the event")
    before = told(node)
    eventually(lambda: len(node.paths.events.read_text().splitlines()) == len(before), "it is written")
    node.kill_node()
    assert vgpu.broker_pid is not None
    os.kill(vgpu.broker_pid, signal.SIGKILL)
    eventually(lambda: '"broker-restarted"' in node.logs(), "another broker")
    node.start()
    [event] = eventually(lambda: told(node, "kept", "broker-restarted"), "the event of meanwhile")
    assert told(node) == [*before, event], "in order, and each of them once"


def test_the_node_tells_of_a_server_that_ended(node: SimulatedNode) -> None:
    pid = node.server_pid(1)
    os.kill(pid, signal.SIGKILL)
    [event] = eventually(lambda: told(node, "", "server-restarted"), "the event")
    assert (event.gpu_index, event.fields["pid"]) == (1, pid)


REFUSED = """
import os, sys
from ctypes import byref, c_size_t, c_uint64
from tests.hook.app import App
app = App()
for gib in sys.argv[1:]:
    assert app.result("cuMemAlloc_v2", byref(c_uint64()), c_size_t(int(gib) << 30)) == 2
os.kill(os.getpid(), 9)
"""


def test_a_refusal_is_told_once_with_its_size_however_soon_its_program_ends(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="1G")
    for sizes in (["5"], ["2"], ["4", "3"]):
        node.program(vgpu, REFUSED, *sizes).communicate(timeout=60)
    with node.link() as link:
        link.remove(vgpu.vgpu_id, force=True)
    events = told(node, vgpu.vgpu_id, "refused", "removed")
    assert [event.kind for event in events] == ["refused", "refused", "refused", "removed"]
    assert [(event.fields["count"], event.fields["size_bytes"]) for event in events[:3]] == [
        (1, 5 << 30), (1, 2 << 30), (2, 3 << 30)
    ]  # fmt: skip
    assert events[1].text == "an allocation of 2 GiB was refused at its limit"
    assert events[2].text == "2 allocations were refused at its limit, the last one of 3 GiB"


def test_what_was_refused_to_a_program_that_has_ended_is_known_and_a_new_server_does_not_tell_it_again(
    node: SimulatedNode,
) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="1G")
    body = REFUSED.replace("os.kill(os.getpid(), 9)", "print(flush=True); sys.stdin.readline()")
    stays = node.program(vgpu, body, "2")
    assert stays.stdout is not None
    assert stays.stdout.readline() == "\n"
    eventually(lambda: told(node, vgpu.vgpu_id, "refused"), "it is told")
    node.program(vgpu, REFUSED, "3").communicate(timeout=60)
    eventually(lambda: len(told(node, vgpu.vgpu_id, "refused")) == 2, "the other one, too")

    def known() -> tuple[int, int, int]:
        reading = node.reading(vgpu.vgpu_id)
        assert reading is not None
        return reading.processes, reading.memory_refusals, reading.memory_refused_bytes

    eventually(lambda: known() == (1, 2, 2 << 30), "one is here")
    os.kill(node.server_pid(vgpu.gpu_index), signal.SIGKILL)
    eventually(lambda: known() == (1, 1, 2 << 30), "the program is back")
    stays.communicate("\n", timeout=60)
    eventually(lambda: known() == (0, 1, 2 << 30), "and ends")
    assert len(told(node, vgpu.vgpu_id, "refused")) == 2
    with node.link() as link:
        link.remove(vgpu.vgpu_id, force=True)


def test_every_line_of_the_logs_says_whose_it_is(node: SimulatedNode) -> None:
    for path in (node.directory / "node.log", *sorted(node.paths.logs.glob("*.log"))):
        lines = list(parsed_all(path.read_text().splitlines(), path.stem))
        assert lines, path
        assert all(line.level for line in lines), path
        assert all("process" in json.loads(text) for text in path.read_text().splitlines())
