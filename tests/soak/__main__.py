"""A soak of a node with simulated GPUs: random requests, programs, deaths, pauses and hostile peers, for hours.

    python -m tests.soak --minutes 60 --seed 1

After each stretch of actions there is a quiet moment: nothing is stopped, workers stand still, and the node is compared
with a model (model.py, checks.py). The first difference ends the soak with exit code 1, its seed and the last actions.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter, deque
from random import Random

from tests.integration.node import SimulatedNode
from tests.soak.actions import Performer
from tests.soak.checks import Checks
from tests.soak.model import Action, World


def soak(minutes: float, seed: int, gpus: int, stretch: int, *, quiet: bool = False) -> int:
    """The exit code: 0 where every quiet moment agreed with the model."""
    random, world = Random(seed), World(gpus)
    last: deque[Action] = deque(maxlen=60)
    done: Counter[str] = Counter()
    began = time.monotonic()
    moments = 0
    with SimulatedNode(gpus, hasty=True) as node:
        performer = Performer(node, world, random)
        checks = Checks(performer)
        try:
            while time.monotonic() - began < 60 * minutes:
                for _ in range(random.randrange(1, stretch)):
                    action = world.choose(random)
                    last.append(action)
                    done[action.kind] += 1
                    performer.perform(action)
                (checks.end_all if random.random() < 0.3 else checks.compare)()
                moments += 1
                if not quiet:
                    print(
                        f"{time.monotonic() - began:7.0f} s, {moments} quiet moments, {len(world.vgpus)} vGPUs",
                        flush=True,
                    )
        except BaseException as error:
            print(f"seed {seed}, quiet moment {moments + 1}: {error}\n{traceback.format_exc()}", flush=True)
            print("\n".join(map(str, last)), flush=True)
            print(node.logs(), flush=True)
            if not isinstance(error, Exception):
                raise
            return 1
        finally:
            for pid in list(performer.programs):
                performer.end(pid)
    worst = max(checks.shares, default=0.0)
    print(f"{sum(done.values())} actions: {dict(done)}")
    print(f"refused or lost: {performer.refused}")
    print(f"{moments} quiet moments agree with the model; {len(checks.shares)} shares, worst error {worst:.3f}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--stretch", type=int, default=25, help="most actions between two quiet moments")
    options = parser.parse_args()
    return soak(options.minutes, options.seed, options.gpus, options.stretch)


if __name__ == "__main__":
    sys.exit(main())
