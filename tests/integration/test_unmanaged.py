"""A vGPU's program that uses its GPU past the hook is named, stopped or killed; others are let be."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuserver.core.observe.unmanaged import Respond, Response, Sighting
from gpuserver.runtime.memory.unmanaged import respond, vgpu_of
from tests.integration.node import SimulatedNode, attachment, eventually
from tests.sim.conftest import LIBRARIES
from tests.tiers import slow
from vgpu.identity import Process
from vgpu.paths import NodePaths
from vgpu.protocol.peer import is_stopped, start_time

HOLD = [sys.executable, "-m", "tests.sim.programs", "hold", str(64 << 20)]
"""A context and some memory, without work: it takes no processor time."""


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
    programs = [
        subprocess.Popen(HOLD, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for env in (past, inside, stranger)
    ]
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
            program.communicate()


TWO_DRIVERS = """
import sys
from ctypes import CDLL, byref, c_int, c_size_t, c_uint64, c_void_p

def take(driver, size):
    device, context, address = c_int(), c_void_p(), c_uint64()
    assert not driver.cuInit(0) and not driver.cuDeviceGet(byref(device), 0)
    assert not driver.cuDevicePrimaryCtxRetain(byref(context), device) and not driver.cuCtxSetCurrent(context)
    assert not driver.cuMemAlloc_v2(byref(address), c_size_t(size))

take(CDLL("libcuda.so.1"), 64 << 20)
take(CDLL(sys.argv[1]), 5 << 30)
print("taken", flush=True)
input()
"""


def test_a_second_driver_in_a_program_that_has_the_hook(node: SimulatedNode, tmp_path: Path) -> None:
    """It stays what it is, a program of its vGPU: an event names it, whatever ``--unmanaged`` says."""
    vgpu = node.create(sm_percent=30, memory_bytes="1G")
    second = shutil.copy(LIBRARIES / "libcuda.so.1", tmp_path / "libcuda_other.so")
    command = [sys.executable, "-c", TWO_DRIVERS, second]
    environment = attachment([vgpu]).environment(node.environment)
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "taken\n"

        def told() -> list[str]:
            with node.link() as link:
                return [e.text for e in link.events(kinds=("unmanaged",)) if e.vgpu_id == vgpu.vgpu_id]

        eventually(told, "an event names it")
        assert f"process {program.pid} holds " in told()[0]
        assert "of 1 GiB: a library in it uses the driver past the hook" in told()[0]
        assert program.poll() is None
        program.communicate("\n")
    assert program.returncode == 0


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
    paths = NodePaths(tmp_path, tmp_path)
    for number in (1, 3):
        paths.vgpu_dir(f"vgpu-0000000{number}").mkdir(parents=True)
    link = paths.name_link(os.getuid(), "trainer")
    link.parent.mkdir(parents=True)
    link.symlink_to("vgpu-00000003")
    link.with_name("odd").symlink_to("../vgpus/vgpu-00000003")
    environment = {"PATH": os.environ["PATH"]}
    named = subprocess.Popen(["sleep", "600"], env=environment | {"VGPU_ID": "../trainer,odd,trainer"})
    own = subprocess.Popen(["sleep", "600"], env=environment | {"VGPU_ID": "vgpu-0000dead,vgpu-00000001"})
    plain = subprocess.Popen(["sleep", "600"], env=environment | {"VGPU_ID": "vgpu-../x,/etc"})
    try:
        eventually(lambda: vgpu_of(own.pid, {}, paths, {}) == "vgpu-00000001", "its environment is there")
        eventually(lambda: vgpu_of(named.pid, {}, paths, {}) == "vgpu-00000003", "its name stands for an id")
        assert vgpu_of(plain.pid, {}, paths, {}) == ""
        assert vgpu_of(plain.pid, {os.getpid(): "vgpu-00000002"}, paths, {}) == "vgpu-00000002"
    finally:
        for program in (own, plain, named):
            program.kill()
            program.wait()


def test_a_users_vgpu_is_not_named_by_another_users_process(tmp_path: Path) -> None:
    paths, uid = NodePaths(tmp_path, tmp_path), os.getuid() or 61001
    paths.vgpu_dir("vgpu-00000001").mkdir(parents=True)
    environment = {"PATH": os.environ["PATH"], "VGPU_ID": "vgpu-00000001"}
    with subprocess.Popen(["sleep", "600"], env=environment, user=None if os.getuid() else uid) as program:
        eventually(lambda: vgpu_of(program.pid, {}, paths, {"vgpu-00000001": uid}) == "vgpu-00000001", "its own")
        assert vgpu_of(program.pid, {}, paths, {}) == "vgpu-00000001", "one that is shared, or of another GPU"
        assert vgpu_of(program.pid, {}, paths, {"vgpu-00000001": uid + 1}) == ""
        program.kill()
