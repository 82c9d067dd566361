"""Ctrl-C, kill -9 and time-outs at random moments of vgpuctl's commands, on two simulated GPUs with much to do.

    python -m tests.kills.rounds [--rounds 50] [--seed 1] [--beside 4]

Each round runs one command, ends it at a random moment, and then looks for what it has left: a vGPU whose id was not
written out, a vGPU that cannot be removed. After all rounds there are no vGPUs, no bytes promised or used, no names
taken, no processes but the node's own, and no more descriptors than before. Exit code 1: something was left.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from tests.integration.node import ROOT, SimulatedNode, eventually
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import VgpuStatus

PATIENCE_S: Final = 120.0
VGPUCTL: Final = Path(sys.executable).with_name("vgpuctl")
SHARE: Final = ("--sm", "2", "--mem", "128M")
COMMANDS: Final = ("create", "run", "set", "migrate", "suspend", "rm")
LONGEST_S: Final = 1.5
"""A command takes a third of a second on an idle machine, and more here."""
LINKED_S: Final = 0.4
"""Once it has asked the node, it takes less."""
_POLL_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Round:
    """``number``: the signal that ends the command ``after_s`` after its start, or (``linked``) once it has a link to
    the node: the moments of the request are few among those of the command's imports."""

    name: str
    command: str
    number: signal.Signals
    linked: bool
    after_s: float

    def __str__(self) -> str:
        since = "its link" if self.linked else "its start"
        return f"{self.name}: {self.command}, {self.number.name} {self.after_s:.3f} s after {since}"


def drawn(count: int, seed: int) -> list[Round]:
    random = Random(seed)
    endings = (signal.SIGINT, signal.SIGKILL, signal.SIGTERM)  # the last is what timeout(1) sends
    rounds = []
    for i in range(count):
        linked = random.random() < 0.8
        after_s = random.uniform(0.0, LINKED_S if linked else LONGEST_S)
        rounds.append(Round(f"round{i}", random.choice(COMMANDS), random.choice(endings), linked, after_s))
    return rounds


class Rounds:
    """A node, and what it was like before."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node
        self._processes = eventually(self._templates_run, "the templates")
        self._descriptors = self._count_descriptors()

    def play(self, rounds: Sequence[Round], beside: int) -> list[str]:
        """What was left, in words; so many rounds at the same time."""
        with ThreadPoolExecutor(beside) as pool:
            found = list(pool.map(self._attempt, rounds))
        return [text for text in found if text] + self._left()

    def _attempt(self, chosen: Round) -> str:
        try:
            self._one(chosen)
        except (AssertionError, VgpuError) as error:
            return f"{chosen}: {error}"
        return ""

    def _one(self, chosen: Round) -> None:
        if chosen.command == "create":
            named = self._end(["create", *SHARE, "--name", chosen.name], chosen).split()
            self._settles(chosen, named)
        elif chosen.command == "run":
            self._end(["run", *SHARE, "--name", chosen.name, "--", "sleep", "0.3"], chosen)
            self._settles(chosen, [])
        else:
            vgpu = self._node.create(name=chosen.name, sm_percent=2, memory_bytes="128M")
            more = {"set": ["--sm", "3"], "migrate": ["--gpu", str(1 - vgpu.gpu_index)]}.get(chosen.command, [])
            self._end([chosen.command, vgpu.vgpu_id, *more], chosen)
            self._settles(chosen, [vgpu.vgpu_id])

    def _end(self, arguments: Sequence[str], chosen: Round) -> str:
        """What the command had written when it ended."""
        command = subprocess.Popen(
            [str(VGPUCTL), *arguments],
            env=self._node.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            while chosen.linked and command.poll() is None and not has_link(command.pid):
                time.sleep(_POLL_S)
            return command.communicate(timeout=chosen.after_s)[0]
        except subprocess.TimeoutExpired:
            command.send_signal(chosen.number)
        return command.communicate(timeout=PATIENCE_S)[0]

    def _settles(self, chosen: Round, named: Sequence[str]) -> None:
        """What was named is removed by its id; what was not goes by itself."""
        for vgpu_id in named:
            eventually(partial(self._removed, vgpu_id), f"the removal of {vgpu_id}", PATIENCE_S)
        eventually(lambda: self._of(chosen.name) == [], f"the end of {chosen.name}", PATIENCE_S)

    def _removed(self, vgpu_id: str) -> bool:
        try:
            with self._node.link() as link:
                link.remove(vgpu_id, force=True)
        except VgpuError as error:
            return error.code is ErrorCode.NOT_FOUND
        return False  # until it is not found

    def _of(self, name: str) -> list[VgpuStatus] | None:
        with suppress(VgpuError), self._node.link() as link:
            return [vgpu for vgpu in link.list() if vgpu.name == name]
        return None

    # --- what is there at the end

    def _left(self) -> list[str]:
        looks: dict[str, Callable[[], bool]] = {
            "vGPUs, bytes and processes of vGPUs": self._is_empty,
            "directories of vGPUs": lambda: not any((self._node.paths.runtime / "vgpus").iterdir()),
            "processes": lambda: self._own_processes() == self._processes,
            "descriptors": self._has_no_more_descriptors,
        }
        left = []
        for what, look in looks.items():
            try:
                eventually(look, what, PATIENCE_S)
            except AssertionError:
                left.append(f"{what} are left: {self._state()}")
        return left

    def _is_empty(self) -> bool:
        with suppress(VgpuError), self._node.link() as link:
            gpus = link.gpus()
            return not link.list() and not any(
                gpu.vgpus or gpu.processes or gpu.guaranteed_memory_bytes or gpu.used_memory_bytes for gpu in gpus
            )
        return False

    def _state(self) -> str:
        with self._node.link() as link:
            vgpus = [f"{vgpu.vgpu_id} {vgpu.name} {vgpu.state}" for vgpu in link.list()]
        more = self._own_processes() - self._processes
        return f"{vgpus}, processes {more}, descriptors {self._count_descriptors()}, before {self._descriptors}"

    def _templates_run(self) -> set[int] | None:
        """Node, and a server and a template for each GPU."""
        found = self._own_processes()
        return found if len(found) == 5 else None

    def _own_processes(self) -> set[int]:
        """All that have the node's environment."""
        place = f"VGPU_RUNTIME_DIR={self._node.paths.runtime}".encode()
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if place in (process / "environ").read_bytes().split(b"\0"):
                    found.add(int(process.name))
        return found

    def _has_no_more_descriptors(self) -> bool:
        """Than before: then one more may have been open for a moment."""
        return all(count <= self._descriptors.get(pid, 0) for pid, count in self._count_descriptors().items())

    def _count_descriptors(self) -> dict[int, int]:
        found = {}
        for pid in self._processes:
            with suppress(OSError):
                found[pid] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return found


def has_link(pid: int) -> bool:
    """Whether it has opened a socket."""
    with suppress(OSError):
        return any(str(one.readlink()).startswith("socket:") for one in Path(f"/proc/{pid}/fd").iterdir())
    return False


def play(count: int, seed: int, beside: int) -> list[str]:
    rounds = drawn(count, seed)
    with SimulatedNode(2) as node:
        for gpu in ("0", "1"):  # what a server, or its template, opens once is open from here on
            warm = node.create(gpu, name="warm", sm_percent=2, memory_bytes="128M")
            with node.link() as link:
                link.remove(warm.vgpu_id)
        left = Rounds(node).play(rounds, beside)
        if left:
            print(node.logs()[-20_000:], file=sys.stderr)
    return left


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kills.rounds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beside", type=int, default=4, help="rounds at the same time")
    arguments = parser.parse_args()
    left = play(arguments.rounds, arguments.seed, arguments.beside)
    kinds = Counter(f"{one.command} {one.number.name}" for one in drawn(arguments.rounds, arguments.seed))
    print(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    for text in left:
        print(f"LEFT {text}")
    print(f"{arguments.rounds} rounds, {len(left)} left something")
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())
