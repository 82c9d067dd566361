"""``--owner``: root makes vGPUs for other users."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vgpu
from tests.integration.node import ROOT, SimulatedNode
from tests.integration.users import ALICE, BOB, as_user, needs_root, opened
from vgpu.errors import VgpuError
from vgpu.spec import VgpuSpec

pytestmark = needs_root
VGPUCTL = Path(sys.executable).with_name("vgpuctl")
SPEC = VgpuSpec.parse(sm_percent=5, memory_bytes="512M", name="hers")


@pytest.fixture(scope="module")
def shared() -> Iterator[SimulatedNode]:
    with SimulatedNode() as running:
        yield opened(running)


@pytest.fixture
def node(shared: SimulatedNode) -> Iterator[SimulatedNode]:
    yield shared
    shared.clear()


def vgpuctl(node: SimulatedNode, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(VGPUCTL), *arguments],
        env=node.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_the_vgpu_belongs_to_the_user(node: SimulatedNode) -> None:
    made = vgpuctl(node, "create", "--sm", "5", "--mem", "512M", "--owner", str(ALICE))
    vgpu_id = made.stdout.strip()
    reading = node.reading(vgpu_id)
    assert reading is not None, made.stderr
    assert reading.owner_uid == ALICE
    assert node.paths.broker_socket(vgpu_id).stat().st_uid == ALICE

    def removes() -> Any:
        with node.link() as link:
            try:
                return link.remove(vgpu_id).vgpu_id
            except VgpuError as error:
                return error.code

    assert as_user(BOB, removes) == "not-yours"
    assert as_user(ALICE, removes) == vgpu_id


def test_the_python_api_takes_a_name(node: SimulatedNode) -> None:
    with vgpu.Node(node.paths.control_socket).create(sm=5, mem="512M", owner="nobody") as v:
        assert v.stats().reading["owner_uid"] == 65534


def test_only_root_names_another_user(node: SimulatedNode) -> None:
    def makes(owner_uid: int) -> Any:
        with node.link() as link:
            try:
                return link.create(SPEC, owner_uid=owner_uid).owner_uid
            except VgpuError as error:
                return [error.code, error.message]

    code, message = as_user(BOB, lambda: makes(ALICE))
    assert (code, message) == ("not-yours", f"--owner: only root makes vGPUs for other users, and you are uid {BOB}")
    assert as_user(BOB, lambda: makes(BOB)) == BOB


def test_names_are_of_the_owner_and_requests_find_their_vgpu_again(node: SimulatedNode) -> None:
    with node.link() as link:
        first = link.create(SPEC, owner_uid=ALICE, request_id="one", confirm=False)
        assert link.create(SPEC, owner_uid=BOB).owner_uid == BOB
        with pytest.raises(VgpuError, match="has the name 'hers' already"):
            link.create(SPEC, owner_uid=ALICE)
        link.confirm(first)
    with node.link() as later:
        assert later.create(SPEC, owner_uid=ALICE, request_id="one").vgpu_id == first.vgpu_id
        later.confirm(first)


def test_a_user_that_does_not_exist(node: SimulatedNode) -> None:
    done = vgpuctl(node, "create", "--sm", "5", "--owner", "no such user")
    assert done.returncode == 2
    assert "there is no user 'no such user'" in done.stderr
