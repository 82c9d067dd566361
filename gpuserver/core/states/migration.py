"""A vGPU on its way from one GPU to another: what the two servers remember of it, and what follows from that. Sans I/O.

Theory of operation
-------------------
Each server has a journal of its own, and may be killed between any two lines of it. So one write decides:

    source: goes_on          its programs are being checkpointed
    source: leaving          they are; from now on it is not ours to bring back, until the other one has spoken
    target: came_from        it is written there: **from here on it is the target's**, whatever the source remembers
    source: forgotten        the target has answered, and has its broker

A source that remembers ``leaving`` asks again, as often as it takes: the target answers the same to the same question,
or refuses, and then the vGPU stays. A target that remembers ``came_from`` does not give the vGPU away, nor removes it,
before the source has forgotten it: asked once more, it would be a stranger there, and taken in a second time.

``goes_on`` travels along: it stands still for the way only, and whoever has it in the end brings its programs back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from vgpu.identity import Process


class Step(StrEnum):
    """What a server does about a vGPU that it remembers: leave it as it is, bring its programs back, or ask the GPU
    that it was leaving for."""

    STAY = "stay"
    GO_ON = "go on"
    ASK = "ask"


@dataclass(frozen=True, slots=True)
class MigrationState:
    """``goes_on``: its programs are to go on as soon as they can. ``leaving``, ``came_from``: GPUs, by their index.
    ``home``: UUID of the GPU on which its programs were checkpointed, "" for this one. ``programs``: those
    that were in it when that was written; its broker may have died meanwhile, and not know them yet."""

    goes_on: bool = False
    leaving: int | None = None
    came_from: int | None = None
    home: str = ""
    programs: tuple[Process, ...] = ()

    @property
    def next_step(self) -> Step:
        """After a restart of its server, too."""
        if self.leaving is not None:
            return Step.ASK
        return Step.GO_ON if self.goes_on else Step.STAY

    def begun(self, *, suspended: bool) -> MigrationState:
        """It is to stand still for the way; one that is suspended stays so."""
        return replace(self, goes_on=not suspended)

    def left(self, to: int, here: str, programs: tuple[Process, ...]) -> MigrationState:
        """All its programs are checkpointed, on the GPU ``here`` if nobody knows better."""
        return replace(self, leaving=to, home=self.home or (here if programs else ""), programs=programs)

    def stayed(self) -> MigrationState:
        """The other GPU does not take it."""
        return replace(self, leaving=None)

    def arrived(self, source: int) -> MigrationState:
        """As the target remembers it."""
        return replace(self, leaving=None, came_from=source)

    def released(self) -> MigrationState:
        """Where it came from nobody remembers it any more."""
        return replace(self, came_from=None)

    def brought_back(self) -> MigrationState:
        """Its programs run, here."""
        return replace(self, goes_on=False, home="")

    def given_up(self) -> MigrationState:
        """They could not be brought back: somebody has to ask for that."""
        return replace(self, goes_on=False)


AT_REST: Final = MigrationState()
