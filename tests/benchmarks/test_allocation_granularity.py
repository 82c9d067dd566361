"""What allocations take from the card, asked of the simulated driver: that the questions are the right ones."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.node import Node, plain_environment

MIB = 1 << 20


@pytest.mark.slow
def test_the_simulated_driver_takes_what_the_real_one_was_seen_to_take() -> None:
    with Node(simulate=1) as node:
        answers = subprocess.run(
            [sys.executable, "-m", "benchmarks.experiments.allocation_granularity", "--json"],
            env=plain_environment(node),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout.splitlines()
    told = {answer.pop("question"): answer for answer in map(json.loads, answers)}
    assert [question for question, answer in told.items() if "refused" in answer] == []
    taken = {question: answer["taken"] // MIB for question, answer in told.items() if "taken" in answer}
    # On an H200, 2026-11-23: docs/reference/performance.md
    assert [taken[f"cuMemAlloc {size}"] for size in ("1 B", "2 MiB", "2097153 B", "1 GiB", "1073741825 B")] == [
        *(2, 2, 4, 1024, 1026)
    ]
    many = ("4096 × 256 B", "4096 × 4 KiB", "256 × 256 KiB", "256 × 1048064 B", "64 × 1049088 B", "64 × 3 MiB")
    assert [taken[f"cuMemAlloc {several}"] for several in many] == [2, 16, 64, 256, 128, 256]
    assert taken["cuMemAllocPitch 100 B × 100000"] == 50
    steps = ("made", "instantiated", "uploaded", "launched", "what it left freed", "destroyed", "trimmed")
    assert [taken[f"graph: {step}"] for step in steps] == [0, 0, 128, 128, 128, 128, 0]
    mixed = [answer for question, answer in told.items() if question.startswith("pieces")]
    assert len(mixed) == 11
    assert all(answer["taken"] == answer["touched"] for answer in mixed[:9])
    assert [answer["taken"] // MIB for answer in mixed[8:]] == [0, 64, 72]
