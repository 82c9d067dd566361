"""What the ``Checkpointer`` of each vendor promises, on the simulated driver; tests/runtime/test_checkpoint.py has the
steps, and tests/integration/test_suspension.py whole programs.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cython_ext.simengine import create_gpus
from gpuserver.device.base import Checkpointer
from gpuserver.device.pidfd import Target
from gpuserver.device.vendors import VENDORS
from tests.device.conformance.places import LIBRARIES
from vgpu.identity import Process
from vgpu.protocol.peer import start_time


@pytest.fixture(params=VENDORS)
def checkpointer(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpointer:
    create_gpus(tmp_path, 1)
    monkeypatch.setenv("VGPU_SIM_DIR", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(LIBRARIES))
    return VENDORS[request.param].checkpointer()


def test_a_driver_that_can_suspend_says_so(checkpointer: Checkpointer) -> None:
    outcome = checkpointer.run("probe")
    assert (outcome.reason, outcome.stuck) == ("", ())


def test_a_driver_that_does_not_start_is_a_reason(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VGPU_SIM_DIR")
    assert checkpointer.run("probe").reason


@pytest.mark.parametrize("action", ["suspend", "resume"])
def test_a_process_that_has_ended_is_done(checkpointer: Checkpointer, action: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        gone = Process(process.pid, start_time(process.pid))
        process.kill()
    outcome = checkpointer.run(action, [Target(gone, None)])  # type: ignore[arg-type]
    assert (outcome.reason, outcome.stuck) == ("", ())


@pytest.mark.parametrize("action", ["suspend", "resume"])
def test_a_process_without_the_driver_is_refused_and_named(checkpointer: Checkpointer, action: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        target = Target(Process(process.pid, start_time(process.pid)), frozenset({os.getuid()}))
        outcome = checkpointer.run(action, [target])  # type: ignore[arg-type]
        process.kill()
    assert str(process.pid) in outcome.reason
    assert outcome.seconds >= 0
