"""What is measured, and for how long: three minutes at most, or one (``quick``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from vgpu.verify.judge import ALONE, KILL, LAUNCH, MEMORY, NAMES, SM_PERCENTS, SMS, TOGETHER

SECOND_NS: Final = 10**9
NODE_S: Final = 2.0
"""From starting the node until it answers and a GPU is chosen."""
PROGRAM_S: Final = {True: 1.0, False: 2.0}
"""From starting a program to its first kernel, by whether the GPU is simulated: a real driver compiles first."""
WARM_UP_NS: Final = SECOND_NS
"""Clocks rise, caches fill and buckets that were full are used up before counting begins."""
TAIL_NS: Final = SECOND_NS * 3 // 4
"""Programs run on beyond the window, so that nobody is measured alone at its end."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long each measurement takes."""

    alone_ns: int
    together_ns: int
    control_ns: int
    kills: int
    launches_s: float
    delayed_s: float


FULL: Final = Lengths(10 * SECOND_NS, 12 * SECOND_NS, 5 * SECOND_NS, 5, 8.0, 2.0)
QUICK: Final = Lengths(3 * SECOND_NS, 3 * SECOND_NS, 3 * SECOND_NS // 2, 2, 2.0, 1.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """``simulated`` says in words why the GPU is a simulated one; "" for a real one. ``gpu``: index of the one, else
    that with most free memory. ``limited`` False: nothing keeps the promises, so every check has to fail (for tests)."""

    simulated: str
    quick: bool = False
    checks: tuple[str, ...] = NAMES
    gpu: int | None = None
    limited: bool = True

    @property
    def lengths(self) -> Lengths:
        return QUICK if self.quick else FULL

    def seconds(self) -> Mapping[str, float]:
        """How long each check is going to take, about, with its control."""
        lengths, program_s = self.lengths, PROGRAM_S[bool(self.simulated)]
        around_s = program_s + (WARM_UP_NS + TAIL_NS) / 1e9
        alone_s, together_s, control_s = (
            around_s + ns / 1e9 for ns in (lengths.alone_ns, lengths.together_ns, lengths.control_ns)
        )
        estimated = dict.fromkeys(ALONE, alone_s) | dict.fromkeys(TOGETHER, together_s + control_s)
        estimated[MEMORY] = 2 * program_s
        estimated[KILL] = (lengths.kills + 2) * (program_s + 1) + 3
        estimated[LAUNCH] = lengths.launches_s + lengths.delayed_s + 2 * program_s
        estimated[SMS] = (len(SM_PERCENTS) + 1) * program_s + 1
        first_alone = next((name for name in self.checks if name in ALONE), "")
        if first_alone:
            estimated[first_alone] += control_s  # one program without limits is the control of all three
        return {name: estimated[name] for name in self.checks}
