"""The requests of a server of these benchmarks. Each line of its input is one:

    {"seed": 3, "tokens": 16}   a new prompt: the answer is its first tokens
    {"tokens": 16}              the next tokens after the last answer, from the cache
    {"check": true}             sums that depend on all weights

It answers with one line of JSON. Tokens come with the milliseconds to the first and between the others.
"""

from __future__ import annotations

import json
import sys
from typing import Protocol


class Answerer(Protocol):
    def answer(self, count: int, seed: int | None) -> tuple[list[list[int]], list[float]]:
        """``count`` tokens of each sequence, and the seconds that each took."""

    def sums(self) -> list[int]: ...


def serve(server: Answerer, reserved_bytes: int) -> None:
    """Until the input ends. ``reserved_bytes``: of the GPU's memory."""
    print(json.dumps({"reserved_bytes": reserved_bytes}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "check" in request:
            print(json.dumps({"sums": server.sums()}), flush=True)
            continue
        tokens, times = server.answer(request["tokens"], request.get("seed"))
        print(json.dumps({"tokens": tokens, "ms": [round(1e3 * t, 2) for t in times]}), flush=True)
