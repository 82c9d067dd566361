"""Would it help to gather the launches of light programs? Streams of requests and a trainer, none of them in a vGPU.

    python -m benchmarks.gpu.gathering [--rounds 8] [--seconds 2.5]

Each stream holds its own launches behind a word that the GPU waits for (cuStreamWaitValue32), and sets the word when it
waits for the answer, or when the first of them is so many milliseconds old. That is what a hook could do at best: the
streams set the word themselves, so no other thread has to wake. The manners take turns in the order A B C D D C B A.
Rates are of all programs without latencies (the trainer), or of all; ratios are of *at once* of the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from benchmarks.gpu.catalogue import WORKS
from benchmarks.gpu.sharer import Window, requests, serve, steady
from benchmarks.gpu.stats import bootstrap, percentile

if TYPE_CHECKING:
    from benchmarks.gpu.works.cuda import TorchProgram

AGES_S: Final = {"at once": 0.0, "until it waits": float("inf"), "1 ms": 1e-3, "2 ms": 2e-3}
"""How long launches are held back at most; by the position in here ``Window.seed`` says which."""
STREAM: Final = "resnet50-infer1"
TRAINER: Final = "vit-train"
REQUESTS: Final = 60.0


class Gathered:
    """The program of ``work``, whose launches wait in the driver's queue."""

    def __init__(self, work: str) -> None:
        import torch

        from benchmarks.gpu.works.cuda import TorchProgram

        self.age_s = 0.0
        self._program: TorchProgram = TorchProgram(work)
        self._page = torch.zeros(1024, dtype=torch.int32).pin_memory()
        self._word = ctypes.c_uint32.from_address(self._page.data_ptr())
        self._wait_value = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        self._stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._turn = 0
        self._since = 0.0
        self._held = False
        if work == STREAM:
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


def sharer(work: str) -> None:
    def answer(program: Any, window: Window) -> dict[str, Any]:
        program.age_s = list(AGES_S.values())[window.seed % len(AGES_S)]
        found = requests(program, window) if window.requests_per_second else steady(WORKS[work], program, window)
        program.synchronize()
        return {"work": work, **found}

    serve(lambda: Gathered(work), answer)


class Child:
    def __init__(self, work: str) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.gathering", "--work", work]
        self.work = work
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ready(self) -> None:
        if self._line() != "READY":
            raise RuntimeError(f"{self.work} ended before it was ready")

    def ask(self, **window: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(window) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        return dict(json.loads(self._line().partition(" ")[2]))

    def end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def window(children: Sequence[Child], manner: int, seconds: float, rate: float, turn: int) -> list[dict[str, Any]]:
    start = time.monotonic() + 0.9
    for i, child in enumerate(children):
        child.ask(
            start=start,
            seconds=seconds,
            requests_per_second=rate if child.work == STREAM else 0.0,
            samples=True,
            seed=(turn * 8 + i) * len(AGES_S) + manner,
            lead_s=0.5,
        )
    return [child.answer() for child in children]


def compare(name: str, children: Sequence[Child], rounds: int, seconds: float, rate: float) -> None:
    found: list[list[list[dict[str, Any]]]] = [[] for _ in AGES_S]
    for turn in range(rounds):
        for manner in list(range(len(AGES_S)))[:: -1 if turn % 2 else 1]:
            found[manner].append(window(children, manner, seconds, rate, turn))
    rates = [[sum(one.get("units_per_second", 0.0) for one in turn) for turn in manner] for manner in found]
    for manner, label in enumerate(AGES_S):
        streams = (one for turn in found[manner] for one in turn if one["work"] == STREAM)
        took = list(itertools.chain.from_iterable(one["samples_ms"] for one in streams))
        line = f"{name:28} {label:15} {statistics.median(rates[manner]):8.1f}/s"
        if rates[0][0]:
            ratios = [100 * mine / base for mine, base in zip(rates[manner], rates[0], strict=True)]
            low, high = bootstrap(ratios, statistics.median)
            line += f"  {statistics.median(ratios):5.1f} % ({low:.1f} to {high:.1f}) of at once"
        if took:
            line += "".join(f"  p{percent} {percentile(took, percent):.2f}" for percent in (50, 90, 99))
            line += f" ms of {len(took)}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each turn of a manner")
    parser.add_argument("--work", choices=(STREAM, TRAINER), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        sharer(options.work)
        return
    trainer = Child(TRAINER)
    streams = [Child(STREAM) for _ in range(4)]
    for child in (trainer, *streams):
        child.ready()
    alone = [window([trainer], 0, options.seconds, 0.0, 0)[0]["units_per_second"] for _ in range(2)]
    print(f"{TRAINER} alone: {statistics.fmean(alone):.1f}/s", flush=True)
    compare("3 streams beside a trainer", [*streams[:3], trainer], options.rounds, options.seconds, REQUESTS)
    compare("3 closed loops", streams[:3], options.rounds, options.seconds, 0.0)
    compare("4 closed loops", streams, options.rounds, options.seconds, 0.0)
    for child in (trainer, *streams):
        child.end()


if __name__ == "__main__":
    main()
