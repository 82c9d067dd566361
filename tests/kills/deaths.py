"""Deaths: what a victim does is recorded once, and then interrupted at every moment of it; and deaths at any time.

A *deed* is something that a vGPU's memory goes through: an operation of a program (operations.py), its start, or a move
between card and host. The moments at which one may die are those that it has: it is done once, and the calls to the
driver are counted.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Final

from tests.integration.node import eventually
from tests.kills.fatal import Moment, moments
from tests.kills.operations import OPERATIONS, SIZES
from tests.kills.scene import Scene

START: Final = "start"
LEAVE: Final = "leave"
RETURN: Final = "return"
MOVES: Final = (LEAVE, RETURN)
OURS: Final = ((), ("broker",), ("server",), ("broker", "server"))
WITHIN_S: Final = 0.12
"""Of its beginning, a deed is interrupted: about what a move takes, and ...
"""
TIMES: Final = 3000
"""... an operation, so often in a row."""


@dataclass(frozen=True, slots=True, order=True)
class Deed:
    """Of a program in ``vgpu``. It has memory of its own, unless the deed brings some."""

    vgpu: str
    name: str

    def __str__(self) -> str:
        return f"{self.vgpu} {self.name}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return () if self.name in OPERATIONS else SIZES


DEEDS: Final = (
    *(Deed("plain", name) for name in (START, *OPERATIONS)),
    *(Deed("swapped", name) for name in (START, "linear", "pitched", "physical", "pooled", *MOVES)),
)
"""Memory that stays on the card is the same in both; for another context "swapped" has no room."""


class Doing:
    """A deed, once, by a process of its own. It leaves the card for "rival"."""

    def __init__(self, scene: Scene, deed: Deed, **environment: str) -> None:
        self.deed = deed
        self.victim = scene.program(deed.vgpu, deed.sizes, **environment)
        self._rival = scene.mates["rival"]
        self._doer = self._rival if deed.name == LEAVE else self.victim

    def prepare(self) -> None:
        assert self.deed.name == START or self.victim.asked("start") is True
        assert self.deed.name != RETURN or self._rival.asked("touch") is True

    def begin(self, times: int = 1) -> None:
        """``times``: an operation, in a row."""
        name = self.deed.name
        self._doer.say("start" if name == START else "touch" if name in MOVES else f"do {name} {times}")

    def finish(self) -> bool:
        """Whether the victim has survived it."""
        answer = self._doer.heard()
        died = self.victim.popen.poll() is not None if self._doer is self._rival else answer is None
        assert answer is True or (answer is None and self._doer is self.victim)
        assert not died or self.victim.popen.wait() == -signal.SIGKILL
        return not died


@contextmanager
def done(scene: Scene, deed: Deed, **environment: str) -> Iterator[Doing]:
    """To be begun and finished. Afterwards the victim is killed, if it is not dead, and all has to be as before."""
    doing = Doing(scene, deed, **environment)
    try:
        doing.prepare()
        yield doing
    finally:
        doing.victim.end()
    scene.settles()


def recorded(scene: Scene, deed: Deed) -> list[Moment]:
    """The moments of a deed."""
    with done(scene, deed, **scene.fatal.environment) as doing, scene.fatal.armed() as calls:
        doing.begin()
        assert doing.finish()
    return list(moments(calls))


def dies(scene: Scene, deed: Deed, moment: Moment) -> bool:
    """Whether the moment came: not all calls are made as often each time."""
    with done(scene, deed, **scene.fatal.environment) as doing, scene.fatal.armed(moment):
        doing.begin()
        survived = doing.finish()
    return not survived


def dies_at_random(scene: Scene, random: Random) -> str:
    """Some of victim, broker and server are killed. What was done, and who died."""
    deed = random.choice(DEEDS)
    ours = random.choice(OURS) if deed.name != START else ()  # without them nobody is let in
    late_s = random.uniform(0, WITHIN_S)
    spared = bool(ours) and random.random() < 0.5
    with done(scene, deed) as doing:
        pids = [pid_of(scene, deed.vgpu, who) for who in ours]
        doing.begin(TIMES)
        time.sleep(late_s)  # the moment is what varies
        for pid in pids if spared else [*pids, doing.victim.pid]:
            os.kill(pid, signal.SIGKILL)
        assert doing.finish() or not spared
        assert not spared or doing.victim.asked("check") is True
    return f"{deed}, {late_s * 1e3:.0f} ms: {' '.join(ours if spared else (*ours, 'victim'))}"


def pid_of(scene: Scene, vgpu: str, who: str) -> int:
    if who == "server":
        return scene.node.server_pid()

    def known() -> int | None:
        reading = scene.node.reading(scene.vgpus[vgpu].vgpu_id)
        return reading.broker_pid if reading is not None else None

    return eventually(known, "the vGPU's broker runs")
