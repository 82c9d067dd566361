"""Root's node, started under umask 077: other users reach their own vGPUs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.node import ROOT, SimulatedNode

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root's node serves other users")
OTHER = 65534


@pytest.fixture(scope="module")
def node() -> Iterator[SimulatedNode]:
    before = os.umask(0o077)
    try:
        with SimulatedNode() as running:
            os.umask(before)
            running.directory.chmod(0o755)
            yield running
    finally:
        os.umask(before)


def test_a_user_makes_a_vgpu_and_knocks_at_its_broker(node: SimulatedNode) -> None:
    def as_other() -> None:
        from tests.integration.process import attach_request, knock

        os.setgroups([])
        os.setgid(OTHER)
        os.setuid(OTHER)
        vgpu = node.create(sm_percent=10, memory_bytes="1G")
        reply, _ = knock(node.paths.broker_socket(vgpu.vgpu_id), attach_request())
        assert reply["ok"], reply
        assert os.access(node.paths.runtime / "sim" / "gpu0", os.R_OK | os.W_OK)
        with node.link() as link:
            link.remove(vgpu.vgpu_id, force=True)

    if not (child := os.fork()):
        try:
            as_other()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_modes_are_what_they_are_under_any_umask(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10, memory_bytes="1G")
    runtime = node.paths.runtime
    expected = {
        runtime: 0o755,
        runtime / "control.sock": 0o666,
        runtime / "gpus": 0o700,
        runtime / "vgpus": 0o711,
        node.paths.vgpu_dir(vgpu.vgpu_id): 0o711,
        runtime / "sim": 0o755,
        runtime / "sim" / "gpu0": 0o666,
        node.paths.state: 0o700,
    }
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in expected} == expected


def test_a_place_that_others_cannot_reach_is_named(node: SimulatedNode) -> None:
    code = "from pathlib import Path; from client_hook.reach import closed_directories; import sys"
    code += "; print(*closed_directories(Path(sys.argv[1])))"
    node.directory.chmod(0o700)
    try:
        command = [sys.executable, "-c", code, str(node.paths.runtime)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert str(node.directory) in done.stdout.split()
    finally:
        node.directory.chmod(0o755)
