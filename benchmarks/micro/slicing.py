"""The simulated GPU's time slicing beside an H100's: programs without vGPUs, in virtual time.

The engine is driven here by played programs instead of processes, so a scene of four seconds takes one, and gives the
same figures on any machine. A program submits a step's kernels, with host time between them, and waits for the step.
How long kernels take follows from NVML's utilisation of each program alone; the host's time from how fast it is alone.

The H100's figures: docs/reference/performance.md, "Programs that use a small part of the GPU".
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Final

from cython_ext.simengine import KERNEL, Engine

US: Final = 1_000
MS: Final = 1_000_000
SECONDS: Final = 4
POLL_NS: Final = 50 * US
REQUESTS_PER_SECOND: Final = 60.0

Wait = int | tuple[int, int]
"""Until then, or for the operation (its ordinal, when to look first)."""


@dataclass(frozen=True, slots=True)
class Load:
    """A step: ``kernels`` of ``kernel_ns``, ``host_ns`` after each launch, ``rest_ns`` after the step. ``depth`` steps
    are in flight at most. ``requests``: steps begin at random times, 60 a second."""

    kernels: int
    kernel_ns: int
    host_ns: int = 0
    rest_ns: int = 0
    depth: int = 1
    requests: bool = False


TRAINER: Final = Load(340, 100 * US, depth=3)
STREAM: Final = Load(160, 7_900, 36 * US, requests=True)
RESNET: Final = Load(160, 8_000, 24_500)
BERT: Final = Load(200, 5_700, 24_300)
DECODER: Final = Load(220, 9_300, 23_000)
DECODER_GRAPH: Final = Load(1, 1_600 * US, rest_ns=30 * US)
GEMM: Final = Load(10, 200 * US, depth=3)


@dataclass(frozen=True, slots=True)
class Scene:
    """``measured``: on an H100, steps of the first kind of program together, as part of what one of them does alone."""

    name: str
    loads: tuple[Load, ...]
    measured: float


SCENES: Final = (
    Scene("two GEMM 4096", (GEMM,) * 2, 0.915),
    Scene("trainer beside one stream", (TRAINER, STREAM), 0.878),
    Scene("trainer beside three streams", (TRAINER, *(STREAM,) * 3), 0.708),
    Scene("two decoders as graphs", (DECODER_GRAPH,) * 2, 0.877),
    Scene("three of ResNet-50, bs 1", (RESNET,) * 3, 2.36),
    Scene("three of BERT", (BERT,) * 3, 2.61),
    Scene("three eager decoders", (DECODER,) * 3, 2.24),
)


@dataclass(slots=True)
class Program:
    """``steps``: how many are done. ``kernel_ns``: what it truly ran, by the engine."""

    engine: Engine
    load: Load
    seed: int
    now_ns: int = 1
    steps: int = 0
    latencies_ns: list[int] = field(default_factory=list)
    _context: int = 0
    _stream: int = 0

    def __post_init__(self) -> None:
        context = self.engine.open_context()
        assert context is not None
        stream = self.engine.open_stream(context)
        assert stream is not None
        self._context, self._stream = context, stream

    @property
    def kernel_ns(self) -> int:
        return self.engine.contexts()[self._context][4]

    def waits(self, wait: tuple[int, int]) -> int | None:
        """When to look again whether the operation is done. None: it is."""
        ended_ns = self.engine.operation(self._stream, wait[0])[3]
        if 0 < ended_ns <= self.now_ns:
            self.engine.deliver(self._stream)
            return None
        return max(self.now_ns + 2 * US, self.engine.earliest(self._stream, wait[0]))

    def run(self) -> Generator[Wait, None, None]:
        arrivals, dice, flying = 0, Random(self.seed), []
        while True:
            if self.load.requests:
                arrivals += round(dice.expovariate(REQUESTS_PER_SECOND) * 1e9)
                yield arrivals
            last = 0
            for _ in range(self.load.kernels):
                while not self.engine.has_room(self._stream):
                    yield self.now_ns + POLL_NS
                    self.engine.deliver(self._stream)
                last = self.engine.submit(self._stream, KERNEL, self.load.kernel_ns)
                if self.load.host_ns:
                    yield self.now_ns + self.load.host_ns
            flying.append(last)
            if len(flying) >= self.load.depth:
                yield flying.pop(0), self.now_ns
                self.steps += 1
                self.latencies_ns.append(self.now_ns - arrivals)
                if self.load.rest_ns:
                    yield self.now_ns + self.load.rest_ns


def play(loads: Sequence[Load], engine: Engine | None = None, seconds: float = SECONDS) -> list[Program]:
    """``loads`` beside each other on ``engine``, or on a GPU with the simulated GPU's own times."""
    engine = Engine() if engine is None else engine
    programs = [Program(engine, load, seed) for seed, load in enumerate(loads)]
    running = [program.run() for program in programs]
    end_ns, turns = round(seconds * 1e9), count()
    due: list[tuple[int, int, int, tuple[int, int] | None]] = [(1, next(turns), i, None) for i in range(len(loads))]
    while due[0][0] < end_ns:
        at_ns, _, i, awaited = heapq.heappop(due)
        program = programs[i]
        engine.advance(at_ns)
        program.now_ns = at_ns
        again_ns = program.waits(awaited) if awaited is not None else None
        if again_ns is None:
            wait = next(running[i])
            awaited, again_ns = (wait, wait[1]) if isinstance(wait, tuple) else (None, wait)
        heapq.heappush(due, (max(at_ns, again_ns), next(turns), i, awaited))
    engine.advance(end_ns)
    return programs


def part(scene: Scene) -> float:
    """What the scene's first kind of program does together, as part of what one does alone."""
    first = scene.loads[0]
    together = sum(program.steps for program in play(scene.loads) if program.load == first)
    return together / play([first])[0].steps


def main() -> None:
    print(f"{'together, as part of one alone':32} simulated    H100")
    for scene in SCENES:
        print(f"{scene.name:32} {part(scene):9.3f} {scene.measured:7.3f}")


if __name__ == "__main__":
    main()
