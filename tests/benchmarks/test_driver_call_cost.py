"""benchmarks/experiments/driver_call_cost.c, rehearsed on the simulated GPU: each call is measured in each state."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.node import Node, plain_environment

SOURCE = Path(__file__).parents[2] / "benchmarks" / "experiments" / "driver_call_cost.c"


@pytest.mark.slow
def test_each_call_is_measured_in_each_state(tmp_path: Path) -> None:
    program = tmp_path / "asking"
    subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-pthread", "-o", program, SOURCE, "-ldl"], check=True)
    with Node(simulate=1) as node:
        environment = plain_environment(node)
        answer = subprocess.run(
            [program, "1"], env=environment, check=True, capture_output=True, text=True, timeout=120
        ).stdout
    states = Counter(
        (name.strip(), state) for line in answer.splitlines() if (state := line[46:54].strip()) and (name := line[:46])
    )
    del states["ns more for each launch", "GPU"]
    assert {name for name, _ in states} >= {"cuEventQuery, complete", "cuStreamQuery", "cuEventRecord", "a full fence"}
    assert {state for _, state in states} == {"idle", "close", "queued"}
    assert set(states.values()) == {2}  # alone, and while another thread asks
