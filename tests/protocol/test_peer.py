"""What the kernel says of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vgpu.identity import Process
from vgpu.protocol.peer import is_alive, is_running, is_stopped, start_time

WITHOUT_ITS_FIRST_THREAD = """
import ctypes, sys, threading
def work():
    sys.stdin.readline()
    import os
    os._exit(0)
threading.Thread(target=work).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def began(body: str) -> tuple[subprocess.Popen[bytes], Process]:
    popen = subprocess.Popen([sys.executable, "-c", body], stdin=subprocess.PIPE)
    return popen, Process(popen.pid, start_time(popen.pid))


@pytest.fixture
def program() -> Iterator[tuple[subprocess.Popen[bytes], Process]]:
    popen, process = began(WITHOUT_ITS_FIRST_THREAD)
    yield popen, process
    popen.kill()
    popen.communicate()


def state(process: Process) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def becomes(process: Process, letter: str) -> None:
    for _ in range(3000):
        if state(process) == letter:
            return
        time.sleep(0.01)  # nobody tells
    raise AssertionError(f"{state(process)}, not {letter}")


def test_a_process_runs_for_as_long_as_it_has_a_thread(program: tuple[subprocess.Popen[bytes], Process]) -> None:
    """Of one whose first thread has ended the kernel says what it says of zombies."""
    popen, process = program
    becomes(process, "Z")
    assert is_alive(process)
    assert is_running(process)
    popen.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(process)
    assert not is_running(process)
    popen.communicate()
    assert not is_alive(process)
    assert not is_running(process)


def test_who_is_stopped_is_known() -> None:
    popen, process = began("input()")
    try:
        assert not is_stopped(process)
        popen.send_signal(signal.SIGSTOP)
        becomes(process, "T")
        assert is_stopped(process)
        assert is_running(process)
        assert not is_stopped(Process(process.pid, process.start_time + 1))
        popen.send_signal(signal.SIGCONT)
        becomes(process, "S")
        assert not is_stopped(process)
    finally:
        popen.kill()
        popen.communicate()
    assert not is_stopped(process)
