"""A vGPU's program that uses its GPU past the hook is named, stopped or killed; others are let be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuserver.core.unmanaged import Respond, Response, Sighting
from gpuserver.runtime.unmanaged import respond, vgpu_of
from tests.integration.node import SimulatedNode, attachment, eventually
from tests.tiers import slow
from vgpu.identity import Process
from vgpu.protocol.peer import is_stopped, start_time

WORK = [sys.executable, "-m", "vgpu.workload", "--seconds", "600"]


@pytest.fixture(params=[Response.REPORT, Response.KILL, *slow(Response.SUSPEND)])
def node(request: pytest.FixtureRequest) -> Iterator[SimulatedNode]:
    with SimulatedNode(1, "temporal", "--unmanaged", request.param) as node:
        yield node


def test_a_program_past_the_hook(node: SimulatedNode, request: pytest.FixtureRequest) -> None:
    response = request.node.callspec.params["node"]
    vgpu = node.create(sm_percent=30, memory_bytes="4G")
    inside = attachment([vgpu]).environment(node.environment)
    past = inside | {"LD_PRELOAD": ""}
    stranger = {name: value for name, value in past.items() if name != "VGPU_ID"}
    programs = [subprocess.Popen(WORK, env=env, stdout=subprocess.DEVNULL) for env in (past, inside, stranger)]
    caught, *others = programs

    def told() -> list[str]:
        with node.link() as link:
            return [event.text for event in link.events(kinds=("unmanaged",))]

    try:
        eventually(lambda: bool(told()), "an event tells")
        (text,) = told()
        assert f"process {caught.pid} (python" in text
        assert vgpu.vgpu_id in text
        if response is Response.KILL:
            assert caught.wait(60) == -signal.SIGKILL
        elif response is Response.SUSPEND:
            assert is_stopped(Process(caught.pid, start_time(caught.pid)))
        else:
            assert text.endswith("nothing here limits it")
        for other in others:
            assert other.poll() is None
            assert not is_stopped(Process(other.pid, start_time(other.pid)))
    finally:
        for program in programs:
            program.kill()
            program.wait()


def test_a_process_of_another_user_or_start_gets_no_signal() -> None:
    program = subprocess.Popen(["sleep", "600"])
    try:
        began = start_time(program.pid)
        for process, uid in ((Process(program.pid, began - 1), os.getuid()), (Process(program.pid, began), 12345)):
            text = respond(Respond(Sighting(process, uid, "sleep", 0, "vgpu-1"), Response.KILL))
            assert "not killed: another process has its pid" in text
        assert program.poll() is None
    finally:
        program.kill()
        program.wait()


def test_it_is_tied_to_a_vgpu_by_its_environment_or_a_parents(tmp_path: Path) -> None:
    vgpus = tmp_path
    (vgpus / "vgpu-00000001").mkdir()
    environment = {"PATH": os.environ["PATH"]}
    own = subprocess.Popen(["sleep", "600"], env=environment | {"VGPU_ID": "vgpu-0000dead,vgpu-00000001"})
    plain = subprocess.Popen(["sleep", "600"], env=environment | {"VGPU_ID": "vgpu-../x,/etc"})
    try:
        eventually(lambda: vgpu_of(own.pid, {}, vgpus) == "vgpu-00000001", "its environment is there")
        assert vgpu_of(plain.pid, {}, vgpus) == ""
        assert vgpu_of(plain.pid, {os.getpid(): "vgpu-00000002"}, vgpus) == "vgpu-00000002"
    finally:
        for program in (own, plain):
            program.kill()
            program.wait()
