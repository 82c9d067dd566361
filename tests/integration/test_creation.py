"""A vGPU that no client will receive does not stay, and one that was made for a process goes with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from tests.integration.node import ROOT, SimulatedNode, eventually
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuSpec

SPEC = VgpuSpec.parse(sm_percent=5, memory_bytes="512M", name="mine")
NAMELESS = VgpuSpec.parse(sm_percent=1, memory_bytes="256M")
PATIENCE_S = 60.0
VGPUCTL = Path(sys.executable).with_name("vgpuctl")
ASKER = """
import sys
from vgpu.node.link import ControlLink
from vgpu.spec import VgpuSpec
with ControlLink() as link:
    vgpu = link.create(VgpuSpec.parse(sm_percent=5, memory_bytes="512M"), lifetime="process")
print(vgpu.vgpu_id, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[SimulatedNode]:
    with SimulatedNode(hasty=True) as running:
        yield running


@pytest.fixture
def node(shared: SimulatedNode) -> Iterator[SimulatedNode]:
    yield shared
    shared.clear()


def vgpus(node: SimulatedNode) -> list[VgpuStatus] | None:
    """None while a server restarts."""
    with suppress(VgpuError), node.link() as link:
        if all(gpu.state == "serving" for gpu in link.gpus()):
            return list(link.list())
    return None


def ids_are_in(node: SimulatedNode, allowed: tuple[list[str], ...]) -> bool:
    found = vgpus(node)
    return found is not None and [vgpu.vgpu_id for vgpu in found] in allowed


def becomes_empty(node: SimulatedNode) -> None:
    eventually(lambda: vgpus(node) == [], "the vGPU's end", PATIENCE_S)
    assert not any(node.paths.broker_socket("x").parent.parent.iterdir())


def asker_of(node: SimulatedNode) -> tuple[subprocess.Popen[str], str]:
    """A process, and the id of the vGPU that is to end with it."""
    asker = subprocess.Popen(
        [sys.executable, "-c", ASKER],
        env=node.environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asker.stdout is not None
    return asker, asker.stdout.readline().strip()


def kill(asker: subprocess.Popen[str]) -> None:
    asker.kill()
    asker.communicate()


def test_asking_again_with_the_same_id_finds_the_same_vgpu(node: SimulatedNode) -> None:
    request_id = uuid4().hex
    with node.link() as first, node.link() as second, ThreadPoolExecutor() as pool:
        asked = [pool.submit(link.create, SPEC, request_id=request_id) for link in (first, second)]
        made = {future.result().vgpu_id for future in asked}
    with node.link() as later:
        made.add(later.create(SPEC, request_id=request_id).vgpu_id)
        assert {vgpu.vgpu_id for vgpu in later.list()} == made
    assert len(made) == 1


def test_a_vgpu_goes_with_the_link_unless_it_is_confirmed(node: SimulatedNode) -> None:
    with node.link() as link:
        link.create(SPEC, confirm=False)
    becomes_empty(node)
    with node.link() as link:
        link.confirm(link.create(SPEC, confirm=False))
    assert node.create(sm_percent=1, memory_bytes="256M").vgpu_id
    found = vgpus(node)
    assert found is not None
    assert len(found) == 2


def test_a_client_that_leaves_in_the_middle_leaves_nothing(node: SimulatedNode) -> None:
    for pause_s in (0.0, 0.01, 0.05):
        link = node.link()
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(link.create, SPEC, confirm=False)
            time.sleep(pause_s)
            link.hang_up()
            with suppress(VgpuError):
                asked.result()
        link.close()
        becomes_empty(node)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_create_that_is_killed_leaves_nothing_that_it_did_not_name(node: SimulatedNode, number: signal.Signals) -> None:
    for pause_s in (0.25, 0.4):
        create = subprocess.Popen(
            [str(VGPUCTL), "create", "--sm", "5", "--mem", "512M"],
            env=node.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        time.sleep(pause_s)
        create.send_signal(number)
        named = create.communicate()[0].split()
        allowed = ([], named)
        eventually(partial(ids_are_in, node, allowed), "the end", PATIENCE_S)
        node.clear()


def test_a_node_that_dies_in_the_middle_leaves_nothing() -> None:
    with SimulatedNode() as node:
        link = node.link()
        link.create(SPEC, confirm=False)
        node.kill_node()
        node.start()
        becomes_empty(node)
        link.close()


def test_a_server_that_dies_before_the_confirmation_still_knows_the_vgpu(node: SimulatedNode) -> None:
    with node.link() as link:
        made = link.create(SPEC, confirm=False)
        os.kill(node.server_pid(), signal.SIGKILL)
        link.confirm(made)
    os.kill(node.server_pid(), signal.SIGKILL)
    found = eventually(lambda: vgpus(node), "the server's return", PATIENCE_S)
    assert [vgpu.vgpu_id for vgpu in found] == [made.vgpu_id]


def test_a_vgpu_ends_with_the_process_that_asked_for_it(node: SimulatedNode) -> None:
    asker, vgpu_id = asker_of(node)
    reading = node.reading(vgpu_id)
    assert reading is not None
    assert (reading.lifetime, reading.asker_pid) == ("process", asker.pid)
    attached = node.attach(vgpu_id)
    eventually(lambda: (reading := node.reading(vgpu_id)) and reading.processes == 1, "it attaches")
    kill(asker)
    time.sleep(0.5)
    assert node.reading(vgpu_id) is not None, "a process is attached"
    attached.kill()
    becomes_empty(node)


def test_a_server_that_was_killed_still_watches_the_process(node: SimulatedNode) -> None:
    asker, vgpu_id = asker_of(node)
    os.kill(node.server_pid(), signal.SIGKILL)
    found = eventually(lambda: vgpus(node), "the server's return", PATIENCE_S)
    assert [vgpu.vgpu_id for vgpu in found] == [vgpu_id]
    kill(asker)
    becomes_empty(node)


def test_creations_go_on_side_by_side(node: SimulatedNode) -> None:
    def create(spec: VgpuSpec) -> str | ErrorCode:
        with node.link() as link:
            try:
                return link.create(spec).vgpu_id
            except VgpuError as error:
                return error.code

    with ThreadPoolExecutor(24) as pool:
        made = list(pool.map(create, [NAMELESS] * 20 + [SPEC] * 4))
    assert len({one for one in made[:20] if not isinstance(one, ErrorCode)}) == 20
    assert sorted(str(one) for one in made[20:] if isinstance(one, ErrorCode)) == ["exists"] * 3
