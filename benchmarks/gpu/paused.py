"""What a latency-critical stream gains, and its trainer loses, if the trainer submits nothing while a request is on the
GPU: one end of the trade-off that ``--part colocation`` shows.

    python -m benchmarks.gpu.paused [--split 10/90] [--rates 250 100] [--seconds 20] [--repeat 1] [--unbounded | --word]

Both are vGPUs in spatial mode: the stream of high priority, which bursts to all SMs, and the trainer of low priority,
with the second percentage of them. A limit of 99 % makes the trainer's leases end, so its gate counts what is in
flight: 250 us of work, as its priority says; without a limit it queues as much as it likes. The scheduler is not
asked: the stream's program stops the trainer's process when a request arrives and lets it go on when the request is
done, some 20 us each. So it bounds what a gate could do for it, at no lease's cost.

``--word``: nothing is stopped. Before each layer the trainer's stream waits for a word (cuStreamWaitValue32) that the
stream's program writes, so all stays queued (PyTorch on a real GPU only). The windows without pauses wait for it too.

Printed is one line of JSON for each rate, with and without the pauses, as ``parts/colocation.py`` computes it: the
stream's latencies beside the trainer over those alone, in turns, and the trainer's pace over its own alone.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.parts.colocation import TRAINER, in_turns
from benchmarks.gpu.pausing import BY_WORD, HOW, WORD
from benchmarks.gpu.stage import SHARER, Ground, Sharer, Stage

STREAM: Final = "resnet50-graph1"
PAUSING: Final = "benchmarks.gpu.pausing"
WAITING: Final = "benchmarks.gpu.waiting"
SHARED_MEMORY: Final = "/dev/shm"
ALONE_S: Final = 10.0


def split(text: str) -> tuple[float, float]:
    """``10/90``; argparse's error for anything else."""
    try:
        stream, trainer = map(float, text.split("/"))
    except ValueError:
        stream = trainer = 0.0
    if stream <= 0 or trainer <= 0 or stream + trainer > 100:
        raise argparse.ArgumentTypeError(f"{text}: write STREAM/TRAINER in percent of the SMs, as in 10/90")
    return stream, trainer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.paused",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--split", type=split, default=(10.0, 90.0), metavar="STREAM/TRAINER")
    bounds = parser.add_mutually_exclusive_group()
    bounds.add_argument(
        "--unbounded",
        dest="bound",
        action="store_const",
        const=(),
        default=("--quota-limit", "99"),
        help="no limit for the trainer, and so none of what it has in flight",
    )
    bounds.add_argument("--word", action="store_true", help="the trainer's stream waits for a word, and is not stopped")
    parser.add_argument("--rates", type=float, nargs="+", default=[250.0, 100.0], metavar="REQUESTS_PER_SECOND")
    parser.add_argument("--seconds", type=float, default=20.0, help="beside the trainer, and as long alone")
    parser.add_argument("--repeat", type=int, default=1)
    Ground.add_options(parser)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    alone_s = min(args.seconds, ALONE_S)
    with (
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder,
        Ground(args.simulate, args.gpu) as ground,
        Stage(ground) as stage,
    ):
        told, word = Path(folder, "how"), Path(folder, "word")
        word.write_bytes(bytes(mmap.PAGESIZE))
        environment = {HOW: str(told), WORD: str(word)}
        high, low = ("--priority", "high", "--burst"), ("--priority", "low", *(() if args.word else args.bound))
        stream = stage.vgpu("spatial", STREAM, args.split[0], *high, program=PAUSING, environment=environment)
        program = WAITING if args.word else SHARER
        trainer = stage.vgpu("spatial", TRAINER, args.split[1], *low, program=program, environment=environment)
        stream_alone, trainer_alone = stage.plain(STREAM), stage.plain(TRAINER)
        stage.ready()
        (result,) = stage.window([trainer], alone_s).results
        how = BY_WORD if args.word else str(result["pid"])

        def pace() -> float:
            (result,) = stage.window([trainer_alone], alone_s).results
            return float(result["units_per_second"])

        for _ in range(args.repeat):
            for rate in args.rates:
                first, said = pace(), []
                for pauses in (False, True):
                    told.write_text(how * pauses)
                    pair: tuple[Sharer, Sharer] = (stream, trainer)
                    said.append((pauses, in_turns(stage, stream_alone, pair, rate, args.seconds).results))
                exclusive = statistics.fmean((first, pace()))
                for pauses, (requests, training) in said:
                    percent = 100 * training["units_per_second"] / exclusive
                    print(json.dumps(line(rate, pauses, requests) | {"trainer_percent": round(percent, 1)}), flush=True)
    return 0


def line(rate: float, pauses: bool, requests: dict[str, Any]) -> dict[str, Any]:
    latencies = {name: round(value, 3) for name, value in requests.items() if name.startswith(("host_p", "gpu_p"))}
    counts = {name: requests[name] for name in ("requests", "unserved")}
    return {"requests_per_second": rate, "pauses": pauses, **counts, **latencies}


if __name__ == "__main__":
    sys.exit(main())
