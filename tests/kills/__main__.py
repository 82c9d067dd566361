"""kill -9 at every moment of an allocation and of a move between card and host, and at any time, on a simulated node.

    python -m tests.kills [--rounds 300] [--random 300] [--seed 1] [--only TEXT]

Each round is a process of its own, which dies before or after one of the calls to the driver that it makes, or at no
such moment, together with its broker or GPU Server. Then the books, what the card has given and the programs beside it
must be as they were before (scene.py). Without --rounds: every moment there is, once.

``missed``: the moment did not come; not all calls are made as often each time. Exit code 1: some round failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeVar

from tests.kills.deaths import DEEDS, Deed, dies, dies_at_random, recorded
from tests.kills.fatal import Moment
from tests.kills.scene import Scene
from vgpu.errors import VgpuError

T = TypeVar("T")


class Rounds:
    """A scene, and a new one after each round that failed."""

    def __init__(self) -> None:
        self.scene = Scene().__enter__()
        self.failures = 0

    def attempt(self, what: str, deed: Callable[[Scene], T]) -> T | None:
        try:
            return deed(self.scene)
        except (AssertionError, VgpuError):
            self.failures += 1
            ended = self.scene.node.supervisor.poll()
            print(f"FAILED {what}, the node {'runs' if ended is None else f'ended with {ended}'}", flush=True)
            print(f"{traceback.format_exc()}{self.scene.node.logs()}", flush=True)
            self.close()
            self.scene = Scene().__enter__()
            return None

    def close(self) -> None:
        self.scene.__exit__(None, None, None)


def at_moments(rounds: Rounds, count: int | None, random: Random, only: str) -> None:
    """Recorded first, then died at: all of them, or so many, which are spread over the deeds."""
    found: list[tuple[float, Deed, Moment]] = []
    for deed in DEEDS:
        if only in str(deed):
            moments = rounds.attempt(f"{deed}", partial(recorded, deed=deed)) or []
            random.shuffle(moments)
            found += ((i / len(moments), deed, moment) for i, moment in enumerate(moments))
    chosen = sorted(found)[:count]
    print(f"{len(found)} moments, of which {len(chosen)} are tried", flush=True)
    tried: Counter[Deed] = Counter()
    missed: Counter[Deed] = Counter()
    for _, deed, moment in chosen:
        died = rounds.attempt(f"{deed}, {moment}", partial(dies, deed=deed, moment=moment))
        tried[deed] += 1
        missed[deed] += died is False
    for deed, times in tried.items():
        print(f"{deed!s:20}{times:6} rounds{missed[deed]:6} missed", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="at moments; default: every moment")
    parser.add_argument("--random", type=int, default=300, help="rounds at random moments")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="deeds with this in their name")
    options = parser.parse_args()
    random = Random(options.seed)
    began_s = time.monotonic()
    rounds = Rounds()
    try:
        at_moments(rounds, options.rounds, random, options.only)
        for _ in range(options.random):
            what = rounds.attempt("at random", partial(dies_at_random, random=random))
            print(f"{time.monotonic() - began_s:6.0f} s  {what}", flush=True)
    finally:
        rounds.close()
    print(f"{rounds.failures} failures, {time.monotonic() - began_s:.0f} s")
    return rounds.failures > 0


if __name__ == "__main__":
    sys.exit(main())
