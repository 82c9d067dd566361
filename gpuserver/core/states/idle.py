"""When a vGPU that nobody uses is suspended (--idle-suspend), and when it comes back. Pure.

Who *dozes* was suspended by the server, not by a person: what it was promised stays promised, so that it can always
come back, and it does so by itself. Two rules, which cannot both hold at one moment:

    it dozes off    if it has programs, none of which has used the GPU for ``patience_ns`` or wants it
    it wakes        if one of them wants it, or has used it since; if it has none; if it is not to doze any more

Wanting is a level, not an edge: a thread that waits goes on saying so. So it does not matter when it is looked at,
which server looks, or how often it was tried in vain.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

AGAIN_LEAST_NS: Final = 250_000_000
AGAIN_MOST_NS: Final = 8_000_000_000


class Step(StrEnum):
    """What to do about a vGPU."""

    STAY = "stay"
    DOZE = "doze"
    WAKE = "wake"


@dataclass(frozen=True, slots=True)
class Sleeper:
    """A vGPU. ``patience_ns``: of --idle-suspend, 0 without it. ``dozes``: since ``dozed_ns``. ``still``: it stands
    still, dozing or for another reason. ``used_ns``: when a program used or wanted the GPU last, as far as is known.
    ``failures``: to suspend or resume it, one after the other; the last one ``tried_ns``."""

    patience_ns: int
    used_ns: int
    wants: bool = False
    programs: bool = True
    dozes: bool = False
    dozed_ns: int = 0
    still: bool = False
    failures: int = 0
    tried_ns: int = 0

    @property
    def again_ns(self) -> int:
        """When it may be tried again. To wake one that waits: soon, and never given up. To suspend one, which holds its
        programs up for a moment: not before it has to be idle for so long again, and less and less often."""
        if not self.failures:
            return 0
        times = 1 << min(self.failures - 1, 6)
        return self.tried_ns + (min(AGAIN_MOST_NS, AGAIN_LEAST_NS * times) if self.dozes else self.patience_ns * times)


def decide(sleeper: Sleeper, now_ns: int) -> Step:
    """At ``now_ns``, of the clock of ``used_ns``."""
    if now_ns < sleeper.again_ns:
        return Step.STAY
    if sleeper.dozes:
        used = sleeper.wants or sleeper.used_ns > sleeper.dozed_ns
        return Step.WAKE if used or not (sleeper.programs and sleeper.patience_ns) else Step.STAY
    idle = sleeper.patience_ns and now_ns - sleeper.used_ns >= sleeper.patience_ns
    ready = sleeper.programs and not sleeper.wants and not sleeper.still
    return Step.DOZE if idle and ready else Step.STAY
