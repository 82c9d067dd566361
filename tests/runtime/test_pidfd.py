"""Who is signalled, suspended or resumed: the very process, while it runs as a user who may be in the vGPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpuserver.device.nvidia.checkpoint import ANOTHER_USER, REASONS, each
from gpuserver.device.pidfd import Target, opened, send
from vgpu.identity import Process
from vgpu.protocol.peer import start_time


@pytest.fixture
def child() -> Iterator[Process]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as running:
        yield Process(running.pid, start_time(running.pid))
        running.kill()


def test_the_very_process_of_a_user_of_the_vgpu(child: Process) -> None:
    with opened(Target(child, frozenset({os.getuid()}))) as pidfd:
        assert pidfd >= 0
    with opened(Target(child, None)):
        pass
    with opened(Target(child, frozenset({4001}), os.getgid())):
        pass


@pytest.mark.parametrize("gone", ["a number used again", "no number", "larger than any"])
def test_a_number_that_is_another_process_s_by_now(child: Process, gone: str) -> None:
    named = {"a number used again": Process(child.pid, child.start_time + 1), "no number": Process(0, 0)}
    target = Target(named.get(gone, Process(2**40, 1)), None)
    with pytest.raises(ProcessLookupError), opened(target):
        pytest.fail("it was opened")
    assert not send(target.process, signal.SIGKILL)
    assert each([target], lambda pid: pytest.fail("the driver was asked")) == []


def test_a_process_that_runs_as_another_user(child: Process) -> None:
    target = Target(child, frozenset({4001, 4002}), 4003)
    with pytest.raises(PermissionError, match="another user than the vGPU's"), opened(target):
        pytest.fail("it was opened")
    (refusal,) = each([target], lambda pid: pytest.fail("the driver was asked"))
    assert str(refusal) == f"process {child.pid}: {REASONS[ANOTHER_USER]}"


def test_whom_a_signal_may_reach() -> None:
    process = Process(7, 70)
    assert Target.of(process, 1000, 5, 0) == Target(process, None), "it was root's, and may have become anybody's"
    assert Target.of(process, 1000, 5, 1001) == Target(process, frozenset({1000, 1001}), 5)
    assert Target.of(process, 1000, -1, -1) == Target(process, frozenset({1000}), -1)


@pytest.mark.parametrize("uids", [None, frozenset({0, 1000})])
def test_as_an_argument(uids: frozenset[int] | None) -> None:
    target = Target(Process(7, 70), uids, 5)
    assert Target.parse(target.text) == target
