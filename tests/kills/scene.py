"""Where deaths happen: three vGPUs on a simulated node, a program in each that is to notice nothing, and the books.

``plain`` has memory of its own; ``swapped`` and ``rival`` do not fit on the card together once somebody more is in
``swapped``, and then leave it for each other. Nobody has work but when told.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from cython_ext.simengine import Engine
from tests.integration.node import PATIENCE_S, ROOT, SimulatedNode, eventually
from tests.kills.fatal import FatalDriver
from tests.kills.operations import MIB, SIZES
from vgpu.ctl.programs import attachment
from vgpu.protocol.messages import VgpuStatus

PIECE: Final = 2 * MIB
MATE: Final = SIZES[1:]
"""What a program owns that others die beside."""
ROOM_BYTES: Final = 128 * MIB
"""Of the card beside contexts, for those that are swapped."""
PROMISED: Final = "2G"


def charged(sizes: Sequence[int]) -> int:
    """What such allocations take: whole pieces, one of them for all that are small."""
    large = [size for size in sizes if size > PIECE // 2]
    return sum(-(-size // PIECE) * PIECE for size in large) + PIECE * (len(large) < len(sizes))


class Talk:
    """A program of tests/kills/program.py. ``owned``: bytes of the card, wherever they are now."""

    def __init__(self, environment: Mapping[str, str], seed: int, sizes: tuple[int, ...]) -> None:
        self.owned = charged(sizes)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.kills.program", str(seed), *map(str, sizes)],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def say(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n".encode())
        self.popen.stdin.flush()

    def heard(self) -> Any:
        """Its answer; None: it died."""
        assert self.popen.stdout is not None
        ready, _, _ = select.select([self.popen.stdout], [], [], 2 * PATIENCE_S)
        assert ready, f"process {self.pid} does not answer"
        line = self.popen.stdout.readline()
        return json.loads(line) if line else None

    def asked(self, line: str) -> Any:
        self.say(line)
        return self.heard()

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


class Scene:
    """Context manager. ``mates``: the programs that go on, by their vGPU's name."""

    def __init__(self) -> None:
        self.node = SimulatedNode(1)
        self.vgpus: dict[str, VgpuStatus] = {}
        self.mates: dict[str, Talk] = {}
        self.seed = 0

    def __enter__(self) -> Scene:
        self.node.__enter__()
        try:
            self._build()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _build(self) -> None:
        self.engine = Engine(next(self.node.directory.rglob("gpu0")).parent)
        folder = self.node.directory / "fatal"
        folder.mkdir()
        self.fatal = FatalDriver(folder)
        self.vgpus["plain"] = self.node.create(name="plain", sm_percent=10, memory_bytes=PROMISED)
        free = 3 * self.engine.context_bytes + ROOM_BYTES
        rest = self.engine.memory_bytes - self.vgpus["plain"].memory_limit_bytes - free
        self.node.create(sm_percent=10, memory_bytes=rest)
        more: dict[str, Any] = {"sm_percent": 20, "memory_bytes": PROMISED, "oversubscribe": "swap"}
        for name in ("swapped", "rival"):
            self.vgpus[name] = self.node.create(name=name, **more)
        for name, sizes in (("plain", MATE), ("swapped", MATE), ("rival", SIZES)):
            self.mates[name] = self.program(name, sizes)
            assert self.mates[name].asked("start") is True
        self.settles()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mate in self.mates.values():
            mate.end()
        self.node.__exit__(kind, error, trace)

    def program(self, vgpu: str, sizes: tuple[int, ...], **changes: str) -> Talk:
        """Another one, to be told to start."""
        self.seed += 1
        environment = attachment([self.vgpus[vgpu]]).environment(self.node.environment)
        return Talk(environment | changes, self.seed, sizes)

    # --- what must be so, sooner or later, once somebody has died

    def settles(self) -> None:
        """Books and card have what the living own, and nothing else; these find it all, work, and get the rest."""
        self._becomes_exact()
        for name, mate in self.mates.items():
            assert mate.asked("check") is True, f"what {name} owned is not what it was"
        assert self.mates["swapped"].asked(f"take {charged(SIZES)}") is True
        left = self.vgpus["plain"].memory_limit_bytes - self.engine.context_bytes - self.mates["plain"].owned
        eventually(lambda: self.mates["plain"].asked("free") == left, "all that was freed is free")
        assert self.mates["plain"].asked(f"take {left}") is True
        self._becomes_exact()

    def differences(self) -> list[str]:
        """From what should be so now; there are some for a while, after a death and during a move."""
        with self.node.link() as link:
            vgpus, processes = link.list(), link.processes().processes
        self.engine.refresh()
        living = {mate.pid: mate.owned for mate in self.mates.values()}
        away = {process.pid: process.memory_away_bytes for process in processes}
        of_vgpu = dict.fromkeys((vgpu.vgpu_id for vgpu in vgpus), 0)
        for name, mate in self.mates.items():
            of_vgpu[self.vgpus[name].vgpu_id] += mate.owned
        card = {pid: owned - away.get(pid, 0) + self.engine.context_bytes for pid, owned in living.items()}
        compared: list[tuple[str, object, object]] = [
            ("of processes", {process.pid: process.memory_bytes for process in processes}, living),
            (
                "of vGPUs",
                {each.vgpu_id: each.memory_used_bytes - each.memory_implicit_bytes for each in vgpus},
                of_vgpu,
            ),
            ("reserved", sum(vgpu.memory_reserved_bytes for vgpu in vgpus), 0),
            ("on the card", {pid: taken for pid, _, taken, *_ in self.engine.contexts().values()}, card),
            ("of the card", self.engine.memory_used_bytes, sum(card.values())),
        ]
        found = [f"{what}: {is_} instead of {should}" for what, is_, should in compared if is_ != should]
        stored, left = stored_bytes(self.node), sum(away.values())
        return found + ([f"store: {stored} for {left} that are away"] if stored != left else [])

    def _becomes_exact(self) -> None:
        try:
            eventually(lambda: not self.differences(), "exact books")
        except AssertionError as error:
            raise AssertionError(f"{error}: {'; '.join(self.differences())}") from None


def stored_bytes(node: SimulatedNode) -> int:
    """Of the store, what somebody has: whoever may have died, it stays, where a process's own memory goes with it."""
    with node.link() as link:
        return sum(gpu.host_memory_used_bytes for gpu in link.gpus())
