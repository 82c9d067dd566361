"""The request for which a vGPU was made, and until when the vGPU stays. Pure.

Theory of operation
-------------------
A vGPU that was asked for with an id is *unconfirmed* until its asker has said that it has the answer. While it is
unconfirmed, links *hold* it: those on which it was asked for. With the last of them it goes, because no client knows
of it. After a restart of the GPU Server no link holds it; the asker has ``CLAIM_S`` to ask again by the same id.

A vGPU with the lifetime "process" goes when its asker has ended and no process is attached to it.

Invariant: a vGPU that is confirmed and has the lifetime "kept" never goes by a decision made here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Self

from vgpu.identity import Process
from vgpu.integrations.claims import Attach, Claim

CLAIM_S: Final = 20.0
"""After a restart: a node waits 8 s for its server, and asks again by the same id."""
NO_ASKER: Final = Process(0, 0)


class Fate(Enum):
    """``UNCONFIRMED``, ``ASKER_ENDED``: it goes, and why."""

    STAYS = "stays"
    UNCONFIRMED = "unconfirmed"
    ASKER_ENDED = "asker-ended"


@dataclass(frozen=True, slots=True)
class Origin:
    """``request_id`` "": none was given. ``confirmed``: the asker has the answer. ``asker``: the process whose end ends
    the vGPU, in the boot ``boot_id``; ``NO_ASKER``: it is kept. ``claim``: of the engine that
    asked. ``attach``: which processes the vGPU admits."""

    request_id: str = ""
    confirmed: bool = True
    asker: Process = NO_ASKER
    boot_id: str = ""
    claim: Claim | None = None
    attach: Attach = "owner"

    @property
    def of_process(self) -> bool:
        """Its lifetime is that of its asker."""
        return self.asker != NO_ASKER

    def confirm(self) -> Self:
        return replace(self, confirmed=True)

    def renamed(self, claim: Claim) -> Self:
        """With another tenant, other labels and other pods of the same claim."""
        return replace(self, claim=claim)

    def fate(self, *, held: bool, asker_lives: bool, attached: bool) -> Fate:
        """``held``: a link on which it was asked for is open. ``attached``: a process is."""
        if not self.confirmed and not held:
            return Fate.UNCONFIRMED
        if self.of_process and not asker_lives and not attached:
            return Fate.ASKER_ENDED
        return Fate.STAYS


KEPT: Final = Origin()
