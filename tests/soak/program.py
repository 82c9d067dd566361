"""A program of the soak, under the hook: ``python -m tests.soak.program KIND SEED MOST_BYTES``.

``worker`` allocates, frees and launches at random. A line "rest" makes it stand still and print the bytes that it owns;
"greed" makes it launch without a pause until the next line; "go" lets it go on. The other kinds end by themselves:
``dies`` in the middle of its work, ``forks`` after children that use the GPU or do not, ``execs`` three times,
``threads`` with eight threads at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from ctypes import c_void_p
from random import Random
from select import select
from typing import Final

from tests.hook.app import App

PIECE: Final = 2 << 20
GENERATIONS: Final = "SOAK_GENERATION"


class Owner:
    """Blocks of whole pieces, so that what is owned is what is charged."""

    def __init__(self, app: App, random: Random, most_bytes: int) -> None:
        self._app, self._random, self._most = app, random, most_bytes
        self.blocks: dict[int, int] = {}

    @property
    def owned_bytes(self) -> int:
        return sum(self.blocks.values())

    def step(self) -> None:
        size = PIECE * self._random.randrange(1, 24)
        if self.blocks and (self._random.random() < 0.5 or self.owned_bytes + size > self._most):
            address = self._random.choice(list(self.blocks))
            self._app.free(address)
            del self.blocks[address]
        else:
            taken = self._app.allocate(size)
            if taken is not None:
                self.blocks[taken] = size


def work(app: App, owner: Owner, random: Random, steps: int) -> None:
    kernel = app.kernel(random.choice((0.05, 0.3, 2.0)))
    for _ in range(steps):
        owner.step()
        for _ in range(random.randrange(6)):
            kernel.launch()
        app.synchronize()


def worker(app: App, owner: Owner, random: Random) -> None:
    print("started", flush=True)
    kernel = app.kernel(1.0)
    state = "go"
    while True:
        if select([sys.stdin], [], [], None if state == "rest" else 0)[0]:
            state = sys.stdin.readline().strip()
            if not state:
                return
            app.synchronize()
            print(owner.owned_bytes, flush=True)
        elif state == "greed":
            for _ in range(4):
                kernel.launch()
            app.synchronize()
        else:
            work(app, owner, random, 1)


def dies(app: App, owner: Owner, random: Random) -> None:
    work(app, owner, random, random.randrange(1, 30))
    app.kernel(2.0).launch()
    way = random.choice(("kill", "abort", "exit", "raise", "thread"))
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "abort":
        os.abort()
    elif way == "exit":
        os._exit(3)
    elif way == "raise":
        raise SystemExit(4)
    threading.Thread(target=os._exit, args=(5,)).start()
    work(app, owner, random, 100)


def forks(app: App, owner: Owner, random: Random) -> None:
    for _ in range(3):
        work(app, owner, random, 3)
        pid = os.fork()
        if pid == 0:
            if random.random() < 0.5:
                os.execv(sys.executable, [sys.executable, "-m", "tests.soak.program", "dies", "1", str(PIECE * 32)])
            os._exit(0)
        os.waitpid(pid, 0)


def execs(app: App, owner: Owner, random: Random) -> None:
    work(app, owner, random, 5)
    generation = int(os.environ.get(GENERATIONS, "0"))
    if generation < 3:
        environment = {**os.environ, GENERATIONS: str(generation + 1)}
        os.execve(sys.executable, [sys.executable, "-m", "tests.soak.program", *sys.argv[1:]], environment)


def threads(app: App, owner: Owner, random: Random) -> None:
    context = c_void_p()
    app.call("cuCtxGetCurrent", ctypes.byref(context))

    def one(seed: int) -> None:
        app.call("cuCtxSetCurrent", context)
        own = Random(seed)
        work(app, Owner(app, own, PIECE * 16), own, 20)

    running = [threading.Thread(target=one, args=(random.randrange(1 << 30),)) for _ in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def main() -> None:
    kind, seed, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    random = Random(seed)
    app = App()
    {"worker": worker, "dies": dies, "forks": forks, "execs": execs, "threads": threads}[kind](
        app, Owner(app, random, most), random
    )


if __name__ == "__main__":
    main()
