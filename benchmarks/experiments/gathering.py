"""Would it help to gather the launches of light programs? Streams of requests and a trainer, none of them in a vGPU.

    python -m benchmarks.experiments.gathering [--rounds 8] [--seconds 2.5]

Each stream holds its own launches behind a word that the GPU waits for (cuStreamWaitValue32), and sets the word when it
waits for the answer, or when the first of them is so many milliseconds old. That is what a hook could do at best: the
streams set the word themselves, so no other thread has to wake. The manners take turns in the order A B C D D C B A.
Rates are of all programs without latencies (the trainer), or of all; ratios are of *at once* of the same round.

With ``--simulate`` no launch is held back: that rehearses the rest.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.suite.report.stats import bootstrap, percentile
from benchmarks.suite.stage import SEEDS_APART, Ground, Sharer, Stage
from benchmarks.suite.workloads.catalogue import WORKS
from benchmarks.suite.workloads.program import Program
from benchmarks.suite.workloads.sharer import Window, build, requests, serve, steady

AGES_S: Final = {"at once": 0.0, "until it waits": float("inf"), "1 ms": 1e-3, "2 ms": 2e-3}
"""How long launches are held back at most; by the position in here ``Window.seed`` says which."""
assert SEEDS_APART % len(AGES_S) == 0, "all sharers of a window hold launches back alike"
STREAM: Final = "resnet50-infer1"
TRAINER: Final = "vit-train"
REQUESTS: Final = 60.0
OWN: Final = "benchmarks.experiments.gathering"


class Gathered:
    """``program``, a stream in PyTorch, whose launches wait in the driver's queue."""

    def __init__(self, program: Program) -> None:
        import torch

        self.age_s = 0.0
        self._program = program
        self._page = torch.zeros(1024, dtype=torch.int32).pin_memory()
        self._word = ctypes.c_uint32.from_address(self._page.data_ptr())
        self._wait_value = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        self._stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._turn = 0
        self._since = 0.0
        self._held = False
        torch.nn.modules.module.register_module_forward_pre_hook(self._before_launches)

    def _before_launches(self, *_: object) -> None:
        if not self.age_s:
            return
        if not self._held:
            self._turn += 1
            result = self._wait_value(self._stream, ctypes.c_uint64(self._page.data_ptr()), self._turn, 0)
            if result:
                raise RuntimeError(f"cuStreamWaitValue32 failed with CUresult {result}")
            self._held = True
            self._since = time.perf_counter()
        elif time.perf_counter() - self._since > self.age_s:
            self.release()

    def release(self) -> None:
        self._word.value = self._turn
        self._held = False

    def wait(self, mark: Any) -> None:
        self.release()
        self._program.wait(mark)

    def synchronize(self) -> None:
        self.release()
        self._program.synchronize()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def sharer(work: str, simulated: bool) -> None:
    def make() -> Any:
        program = build(work, simulated)
        return Gathered(program) if work == STREAM and not simulated else program

    def answer(program: Any, window: Window) -> dict[str, Any]:
        if isinstance(program, Gathered):
            program.age_s = list(AGES_S.values())[window.seed % len(AGES_S)]
        found = requests(program, window) if window.requests_per_second else steady(WORKS[work], program, window)
        program.synchronize()
        return {"work": work, **found}

    serve(make, answer)


def compare(stage: Stage, name: str, sharers: Sequence[Sharer], streams: int, rounds: int, seconds: float) -> None:
    """``streams``: of the first so many sharers requests come at random; 0: all are closed loops."""
    found: list[list[tuple[dict[str, Any], ...]]] = [[] for _ in AGES_S]
    for turn in range(rounds):
        for manner in list(range(len(AGES_S)))[:: -1 if turn % 2 else 1]:
            seed = turn * len(AGES_S) + manner
            arrivals = (REQUESTS,) * streams
            window = stage.window(sharers, seconds, samples=True, requests_per_second=arrivals, seed=seed)
            found[manner].append(window.results)
    rates = [[sum(one.get("units_per_second", 0.0) for one in turn) for turn in manner] for manner in found]
    for manner, label in enumerate(AGES_S):
        ratios = [100 * mine / base for mine, base in zip(rates[manner], rates[0], strict=True)]
        low, high = bootstrap(ratios, statistics.median)
        answers = (one for turn in found[manner] for one in turn if one["work"] == STREAM)
        took = list(itertools.chain.from_iterable(one["samples_ms"] for one in answers))
        tails = "".join(f"  p{percent} {percentile(took, percent):.2f}" for percent in (50, 90, 99))
        print(
            f"{name:28} {label:15} {statistics.median(rates[manner]):8.1f}/s  {statistics.median(ratios):5.1f} % "
            f"({low:.1f} to {high:.1f}) of at once{tails} ms of {len(took)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Ground.add_options(parser)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each turn of a manner")
    parser.add_argument("--work", choices=(STREAM, TRAINER), help=argparse.SUPPRESS)
    parser.add_argument("--simulated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        sharer(options.work, options.simulated)
        return
    with Ground(options.simulate, options.gpu) as ground, Stage(ground) as stage:
        trainer = stage.plain(TRAINER, OWN)
        streams = [stage.plain(STREAM, OWN) for _ in range(4)]
        stage.ready()
        alone = stage.window([trainer], options.seconds).results[0]["units_per_second"]
        print(f"{TRAINER} alone: {alone:.1f}/s", flush=True)
        beside = [*streams[:3], trainer]
        compare(stage, "3 streams beside a trainer", beside, 3, options.rounds, options.seconds)
        compare(stage, "3 closed loops", streams[:3], 0, options.rounds, options.seconds)
        compare(stage, "4 closed loops", streams, 0, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
