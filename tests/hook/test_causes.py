"""Why a process gets no vGPU: each cause is provoked, and the one line on stderr names it and what helps."""

from __future__ import annotations

import os
import socket

import pytest

from tests.hook.stage import Stage

START = """
import ctypes, os, resource, struct
cuda = ctypes.CDLL("libcuda.so.1")
"""
INIT = """
print(cuda.cuInit(0))
"""
DESCRIPTORS = """
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    for fd in taken[:LEFT]:
        os.close(fd)
"""
NO_MEMORY = "resource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))"
FORBIDDEN = """
number = {"x86_64": 41, "aarch64": 198}[os.uname().machine]      # socket
rows = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in rows))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(rows), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
"""
OTHER_USER = "os.setgroups([]), os.setgid(65534), os.setuid(65534)"


@pytest.mark.parametrize(
    ("provoke", "says"),
    [
        pytest.param(DESCRIPTORS.replace("LEFT", "0"), "no file descriptor left", id="no descriptor"),
        pytest.param(DESCRIPTORS.replace("LEFT", "2"), "no file descriptor left", id="none for the pages"),
        pytest.param(NO_MEMORY, "no memory is left", id="no memory"),
        pytest.param(FORBIDDEN, "seccomp", id="seccomp"),
        pytest.param(
            OTHER_USER,
            "belongs to another user",
            id="another user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
        ),
    ],
)
def test_the_programs_own_causes(stage: Stage, provoke: str, says: str) -> None:
    vgpu = stage.vgpu()
    vgpu.directory.chmod(0o700)
    ran = stage.run(START + provoke + INIT, stage.environment(vgpu))
    (line,) = ran.stderr.splitlines()
    assert ran.stdout.strip() in ("100", "304")
    assert says in line
    assert vgpu.vgpu_id in line


@pytest.mark.slow
def test_a_broker_that_has_ended_and_no_other_starts(stage: Stage) -> None:
    """The node is there, so the program waits, but not for ever."""
    vgpu = stage.vgpu()
    (vgpu.directory / "broker.sock").unlink()
    with socket.socket(socket.AF_UNIX) as node:
        node.bind(str(stage.runtime / "control.sock"))
        node.listen(200)
        ran = stage.run(START + INIT, stage.environment(vgpu))
    assert (ran.stdout, len(ran.stderr.splitlines())) == ("304\n", 1)
    assert "its broker has ended, and none has taken its place within 10 s: vgpuctl logs" in ran.stderr


def test_a_broker_that_closes_the_connection(stage: Stage) -> None:
    vgpu = stage.vgpu()
    vgpu._answer = lambda link: None  # type: ignore[method-assign]
    ran = stage.run(START + INIT, stage.environment(vgpu))
    assert (ran.stdout, len(ran.stderr.splitlines())) == ("304\n", 1)
    assert "its broker closed the connection without an answer: vgpuctl logs" in ran.stderr


def test_another_version(stage: Stage) -> None:
    """What comes as its grants page is none: a page of the same kind whose beginning is another's."""
    vgpu = stage.vgpu()
    answer = vgpu._answer

    def swapped(link: socket.socket) -> None:
        grants, vgpu.grants = vgpu.grants, vgpu.activity  # type: ignore[assignment]
        vgpu.reply_changes = {"generation": 1}
        try:
            answer(link)
        finally:
            vgpu.grants = grants

    vgpu._answer = swapped  # type: ignore[method-assign]
    ran = stage.run(START + INIT, stage.environment(vgpu))
    assert "install the hook of the node's version" in ran.stderr


def test_a_time_namespace(stage: Stage) -> None:
    vgpu = stage.vgpu()
    vgpu.reply_changes = {"now_ns": 1}
    ran = stage.run(START + INIT, stage.environment(vgpu))
    assert "start this program outside its time namespace" in ran.stderr
