"""A vGPU on its way from one GPU to another: what the two servers have journalled, and the next step. Sans I/O.

Theory of operation
-------------------
Each server has a journal of its own, and may be killed between any two lines of it. So one write decides:

    source: goes_on          the source is checkpointing the vGPU's programs
    source: leaving          they are checkpointed; from now on the source must not bring them back before the target
                             has answered
    target: came_from        the target has journalled the vGPU: **from here on the target owns it**, whatever the
                             source's journal says
    source: forgotten        the target has answered, and runs the vGPU's broker

A source with ``leaving`` in its journal repeats its request until the target answers. The target gives the same answer
to the same request, or refuses; then the vGPU stays. A target with ``came_from`` in its journal neither gives the vGPU
away nor removes it before the source has forgotten it. Reason: the target would not know the vGPU in a repeated request
any more, and would take it in a second time.

``goes_on`` migrates along. The vGPU is quiesced for the migration only, and the server that owns it in the end brings
its programs back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from vgpu.identity import Process


class Step(StrEnum):
    """What a server does about a vGPU in its journal: leave it as it is, bring its programs back, or ask the server of
    the GPU that the vGPU was leaving for."""

    STAY = "stay"
    GO_ON = "go on"
    ASK = "ask"


@dataclass(frozen=True, slots=True)
class MigrationState:
    """``goes_on``: its programs are to go on as soon as they can. ``leaving``, ``came_from``: GPUs, by their index.
    ``home``: UUID of the GPU on which its programs were checkpointed, "" for this one. ``programs``: its
    programs when that was written. Its broker may have died meanwhile, and not know them yet."""

    goes_on: bool = False
    leaving: int | None = None
    came_from: int | None = None
    home: str = ""
    programs: tuple[Process, ...] = ()

    @property
    def next_step(self) -> Step:
        """The server's next step, after its restart, too."""
        if self.leaving is not None:
            return Step.ASK
        return Step.GO_ON if self.goes_on else Step.STAY

    def begun(self, *, suspended: bool) -> MigrationState:
        """Its server quiesces it for the migration; a suspended vGPU stays suspended."""
        return replace(self, goes_on=not suspended)

    def left(self, to: int, here: str, programs: tuple[Process, ...]) -> MigrationState:
        """All its programs are checkpointed, on the GPU ``here`` unless ``home`` names another."""
        return replace(self, leaving=to, home=self.home or (here if programs else ""), programs=programs)

    def stayed(self) -> MigrationState:
        """The other GPU does not take it."""
        return replace(self, leaving=None)

    def arrived(self, source: int) -> MigrationState:
        """The state in the target's journal."""
        return replace(self, leaving=None, came_from=source)

    def released(self) -> MigrationState:
        """The source has forgotten the vGPU."""
        return replace(self, came_from=None)

    def brought_back(self) -> MigrationState:
        """Its programs run, here."""
        return replace(self, goes_on=False, home="")

    def given_up(self) -> MigrationState:
        """The server could not bring its programs back: the next attempt needs a request."""
        return replace(self, goes_on=False)


AT_REST: Final = MigrationState()
