"""Whose sockets are those of a vGPU: a process that only names it has to be one that its broker would admit."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuserver.core.admission.registry import Owner
from gpuserver.runtime.lifecycle.ports import survey
from tests.integration.users import ALICE, BOB, needs_root
from vgpu.paths import NodePaths

NAME = "vgpu-0000000a"
GROUP = 61003


@pytest.fixture
def paths(tmp_path: Path) -> NodePaths:
    paths = NodePaths(tmp_path, tmp_path)
    paths.vgpu_dir(NAME).mkdir(parents=True)
    return paths


@pytest.fixture
def listener() -> Iterator[subprocess.Popen[str]]:
    """A program of another user that names the vGPU."""
    pipe = subprocess.PIPE
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            ["/bin/sh", "-c", "echo 1; read line"],
            env={"VGPU_ID": NAME},
            pass_fds=[server.fileno()],
            user=ALICE,
            group=ALICE,
            extra_groups=[GROUP],
            cwd="/",
            stdin=pipe,
            stdout=pipe,
            text=True,
        ) as popen,
    ):
        assert popen.stdout is not None
        assert popen.stdout.readline() == "1\n"
        yield popen
        popen.communicate()


@needs_root
@pytest.mark.parametrize(
    ("owner", "counts"),
    [
        (Owner(ALICE), True),
        (Owner(BOB), False),
        (Owner(BOB, GROUP), True),
        (Owner(BOB, GROUP + 1), False),
        (Owner(BOB, ALICE), True),
    ],
)
def test_a_process_that_names_a_vgpu(
    paths: NodePaths, listener: subprocess.Popen[str], owner: Owner, *, counts: bool
) -> None:
    found = survey(NAME, (), paths, owner)
    assert (listener.pid in found.holders.values()) is counts


def test_a_process_that_names_no_vgpu(paths: NodePaths) -> None:
    assert not survey(NAME, (), paths, Owner(os.getuid())).holders
