"""Whether vGPUs that take rounds in spatial mode get their guarantees: by default three beside one with long kernels.

    python -m benchmarks.experiments.rounds [--vgpu SM/REQUEST/WORK ...] [--seconds 20] [--windows 1] [--stamps]

Each vGPU has ``SM`` percent of the SMs and a guarantee of ``REQUEST`` percent of the time, and always works. Printed is
one line of JSON for each window: of each vGPU, its guarantee, for how much of the time it held by its own books, and
what it got done. ``--stamps``: also for how much of it it computed, by device timestamps. ``--simulate``: stand-ins on
the simulated GPU.

The default is ``packable(572, 0.9)`` of the policy's tests: whenever the wide vGPU has had its round, the one with long
kernels has lost two. That takes kernels of a little more or less than whole rounds: LONG_KERNEL_MS=15 makes 23 ms
beside the others on an H100.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Final, NamedTuple

from benchmarks.suite.stage import Ground, Stage
from benchmarks.suite.workloads.catalogue import WORKS


class Turn(NamedTuple):
    """One vGPU: percent of the SMs, guaranteed percent of the time, and its work."""

    sm_percent: float
    request_percent: float
    work: str


BESIDE_LONG_KERNELS: Final = (
    Turn(40, 76, "long-kernel"),
    Turn(24, 76, "gemm4096"),
    Turn(24, 76, "gemm4096"),
    Turn(80, 13.5, "gemm4096"),
)


def turn(text: str) -> Turn:
    """``40/76/gemm4096``; argparse's error for anything else."""
    try:
        sm, request, work = text.split("/")
        found = Turn(float(sm), float(request), work)
    except ValueError:
        found = Turn(0, 0, "")
    if found.work not in WORKS or not (0 < found.sm_percent <= 100 and 0 < found.request_percent <= 100):
        raise argparse.ArgumentTypeError(f"{text}: write SM/REQUEST/WORK, as in 40/76/gemm4096, of {', '.join(WORKS)}")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments.rounds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--vgpu", nargs="+", type=turn, default=BESIDE_LONG_KERNELS, metavar="SM/REQUEST/WORK")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a window")
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--stamps", action="store_true", help="device timestamps, too")
    Ground.add_options(parser)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    with Ground(args.simulate, args.gpu) as ground, Stage(ground) as stage:
        sharers = [
            stage.vgpu("spatial", one.work, one.sm_percent, "--quota-request", f"{one.request_percent:g}")
            for one in args.vgpu
        ]
        stage.ready(stamps=args.stamps)
        for _ in range(args.windows):
            results = stage.window(sharers, args.seconds, stamps=args.stamps).results
            print(json.dumps([said(one, result) for one, result in zip(args.vgpu, results, strict=True)]), flush=True)
    return 0


def said(one: Turn, result: dict[str, Any]) -> dict[str, Any]:
    stamped = {"busy_percent": round(100 * result["busy_ratio"], 2)} if "busy_ratio" in result else {}
    return (
        one._asdict()
        | stamped
        | {
            "held_percent": round(100 * result["held_ratio"], 2),
            "tokens_per_second": round(result["tokens_per_second"], 2),
            "steps_per_second": round(result["steps_per_second"], 2),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
