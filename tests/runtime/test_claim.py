"""A GPU has one server on this machine, whichever user's node it belongs to."""

from __future__ import annotations

import os
import signal
import uuid as uuids
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpuserver.device.claim import claim
from vgpu.errors import ErrorCode, VgpuError

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def gpu() -> str:
    return f"GPU-{uuids.uuid4()}"


@contextmanager
def server_of(uid: int, gpu: str, *, stubborn: bool = False) -> Iterator[int]:
    """A process of ``uid`` that has claimed ``gpu``; ``stubborn``: SIGTERM does not end it."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.setgid(uid)
        os.setuid(uid)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else signal.SIG_DFL)
        kept = claim(gpu, take=False)
        os.write(writing, b"x")
        while kept.fileno() >= 0:
            signal.pause()
    os.read(reading, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_second_server_is_refused_until_the_first_has_gone(gpu: str) -> None:
    with server_of(os.getuid(), gpu) as pid:
        for _ in range(300):  # nobody fills its backlog by asking
            with pytest.raises(VgpuError, match=rf"served already, by uid {os.getuid()} \(pid {pid}\)") as refused:
                claim(gpu, take=True)
        assert refused.value.code is ErrorCode.EXISTS
        claim(f"{gpu}-another", take=False).close()
    claim(gpu, take=False).close()


@as_root
def test_root_is_told_whose_it_is(gpu: str) -> None:
    with server_of(OTHER, gpu), pytest.raises(VgpuError, match=f"by uid {OTHER} ") as refused:
        claim(gpu, take=False)
    assert refused.value.hint.endswith("vgpuctl serve --take")


@as_root
def test_root_takes_a_gpu_from_another_users_server(gpu: str) -> None:
    with server_of(OTHER, gpu) as pid:
        held = claim(gpu, take=True)
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status == signal.SIGTERM  # type: ignore[union-attr]
        held.close()


@as_root
def test_a_user_does_not_take_what_root_serves(gpu: str) -> None:
    with server_of(0, gpu):
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.setuid(OTHER)
            try:
                claim(gpu, take=True)
            except VgpuError as error:
                os.write(writing, f"{error.message}|{error.hint}".encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading) as said:
            told = said.read()
    assert "is served already, by uid 0" in told
    assert "|vgpuctl create makes a vGPU on root's node" in told
