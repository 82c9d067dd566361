"""What a latency-critical stream gains, and its trainer loses, if the trainer is held up while a request is on the GPU:
one end of the trade-off that ``--part colocation`` shows.

    python -m benchmarks.experiments.hold_trainer [--split 10/90] [--rates 250 100] [--seconds 20] [--repeat 1]
        [--way bounded]

Both are vGPUs in spatial mode: the stream of high priority, which bursts to all SMs, and the trainer of low priority,
with the second percentage of them. The scheduler is not asked; the stream's program holds the trainer up when a request
arrives and lets it go on when the request is done. Ways:

    bounded    it stops the trainer's process. A limit of 99 % makes the trainer's leases end, so its gate counts what
               is in flight: 250 us of work, as its priority says
    unbounded  likewise, without a limit, so the trainer has queued as much as it likes
    word       nothing is stopped: the trainer's stream waits at each layer for a word that the stream's program writes
               (``hold_trainer_wait.py``; PyTorch on a real GPU only). The windows without pauses wait for it too

Printed is one line of JSON for each rate, with and without pauses, as ``parts/colocation.py`` computes it: the stream's
latencies beside the trainer over those without a vGPU alone, and the trainer's pace over its own alone. The host's
latencies contain what it takes to hold up and let go; the GPU's do not.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.experiments.hold_trainer_pause import BY_WORD, HOW, WORD, Word, stop
from benchmarks.suite.__main__ import percents
from benchmarks.suite.parts.colocation import TRAINER, in_turns
from benchmarks.suite.stage import SHARER, Ground, Sharer, Stage

STREAM: Final = "resnet50-graph1"
PAUSING: Final = "benchmarks.experiments.hold_trainer_pause"
WAITING: Final = "benchmarks.experiments.hold_trainer_wait"
WAYS: Final = ("bounded", "unbounded", "word")
ALONE_S: Final = 10.0
SHARED_MEMORY: Final = "/dev/shm"


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: write a number above 0")
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments.hold_trainer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--split", type=percents, default=(10.0, 90.0), metavar="STREAM/TRAINER", help="of the SMs")
    parser.add_argument("--rates", type=positive, nargs="+", default=[250.0, 100.0], metavar="REQUESTS_PER_SECOND")
    parser.add_argument("--seconds", type=positive, default=20.0, help="beside the trainer, and as long alone")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, default=WAYS[0])
    Ground.add_options(parser)
    args = parser.parse_args()
    if len(args.split) != 2:
        parser.error("--split: write the stream's and the trainer's percent of the SMs, as in 10/90")
    if args.simulate and args.way == BY_WORD:
        parser.error("the simulated GPU has no PyTorch, whose stream could wait for a word: leave out --simulate")
    return args


@contextmanager
def release(word: Word, pid: int) -> Iterator[None]:
    """Whoever held the trainer up and died: it goes on, or the neighbours of what never ends would wait for it too."""
    try:
        yield
    finally:
        word.hold(False)
        with suppress(ProcessLookupError):
            stop(pid, False)


def main() -> int:
    args = arguments()
    alone_s = min(args.seconds, ALONE_S)
    by_word = args.way == BY_WORD
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder, Ground(args.simulate, args.gpu) as ground:
        how, shared = Path(folder, "how"), Path(folder, "word")
        shared.write_bytes(bytes(mmap.PAGESIZE))
        environment = {HOW: str(how), WORD: str(shared)}
        with Stage(ground) as stage:
            low = ("--priority", "low", *(("--quota-limit", "99") if args.way == "bounded" else ()))
            program = WAITING if by_word else SHARER
            trainer = stage.vgpu("spatial", TRAINER, args.split[1], *low, program=program, environment=environment)
            stream_alone, trainer_alone = stage.plain(STREAM), stage.plain(TRAINER)
            stage.ready()
            pid = stage.window([trainer], min(args.seconds, 1.0)).results[0]["pid"]
            pace = partial(units_per_second, stage, trainer_alone, alone_s)
            with release(Word(str(shared)), pid), Stage(ground) as inner:
                high = ("--priority", "high", "--burst")
                stream = inner.vgpu("spatial", STREAM, args.split[0], *high, program=PAUSING, environment=environment)
                inner.ready()
                for repeat in range(args.repeat):
                    for rate in args.rates:
                        first, said = pace(), {}
                        for pauses in (True, False) if repeat % 2 else (False, True):
                            how.write_text((BY_WORD if by_word else str(pid)) if pauses else "")
                            said[pauses] = in_turns(inner, stream_alone, (stream, trainer), rate, args.seconds).results
                        exclusive = statistics.fmean((first, pace()))
                        for pauses, (requests, training) in said.items():
                            condition = {"split": args.split, "way": args.way, "rate": rate, "pauses": pauses}
                            percent = 100 * training["units_per_second"] / exclusive
                            print(json.dumps(condition | figures(requests, percent)), flush=True)
    return 0


def units_per_second(stage: Stage, sharer: Sharer, seconds: float) -> float:
    return float(stage.window([sharer], seconds).results[0]["units_per_second"])


def figures(requests: dict[str, Any], trainer_percent: float) -> dict[str, Any]:
    latencies = {name: round(value, 4) for name, value in requests.items() if name.startswith(("host_p", "gpu_p"))}
    counts = {name: requests[name] for name in ("requests", "unserved", "pauses_made")}
    return counts | latencies | {"trainer_percent": round(trainer_percent, 2)}


if __name__ == "__main__":
    sys.exit(main())
