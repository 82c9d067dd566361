"""Programs with several threads and streams beside each other: whatever they do, they go on and come to an end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.node import SimulatedNode


@pytest.mark.slow
@pytest.mark.parametrize("ahead", ["1", "0"])
def test_programs_that_do_everything_at_once_beside_each_other(ahead: str) -> None:
    """``ahead``: whether their hooks queue work ahead of its lease."""
    run = [sys.executable, "-m", "vgpu.ctl", "run"]
    with SimulatedNode() as node:
        programs = [
            node.popen(
                [*run, "--sm", share, "--mem", "4G", "--", sys.executable, "-m", "tests.integration.threads", "4"],
                env=node.environment | {"VGPU_AHEAD": ahead},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for share in ("30", "70")
        ]
        try:
            for program in programs:
                out, error = program.communicate(timeout=60)
                assert program.returncode == 0, error
                assert all(int(count) > 0 for count in out.split()), out
        finally:
            for program in programs:
                program.kill()
                program.communicate()
