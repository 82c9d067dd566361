"""What is measured, and for how long: three minutes at most, or one (``quick``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from vgpu.verify.judge import ALONE, KILL, LAUNCH, LIGHT, MEMORY, NAMES, SM_PERCENTS, SMS, TOGETHER
from vgpu.workload.probes import SETTLED_S

SECOND_NS: Final = 10**9
NODE_S: Final = 2.0
"""From starting the node until it answers and a GPU is chosen."""
PROGRAM_S: Final = {True: 0.8, False: 1.2}
"""From starting a program to its first kernel, by whether the GPU is simulated: a real driver compiles first."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long each measurement takes.

    Before the window, clocks rise, caches fill, and buckets that were full are used up. After it programs run on, so
    that no program is measured alone at its end.
    """

    warm_up_ns: int
    tail_ns: int
    alone_ns: int
    together_ns: int
    control_ns: int
    kills: int
    patience_s: float
    launches_s: float
    delayed_s: float


FULL: Final = Lengths(
    warm_up_ns=SECOND_NS,
    tail_ns=SECOND_NS * 3 // 4,
    alone_ns=10 * SECOND_NS,
    together_ns=12 * SECOND_NS,
    control_ns=5 * SECOND_NS,
    kills=5,
    patience_s=4.0,
    launches_s=8.0,
    delayed_s=2.0,
)
QUICK: Final = Lengths(
    warm_up_ns=SECOND_NS // 2,
    tail_ns=SECOND_NS // 2,
    alone_ns=5 * SECOND_NS // 2,
    together_ns=3 * SECOND_NS,
    control_ns=5 * SECOND_NS // 4,
    kills=2,
    patience_s=2.5,
    launches_s=1.5,
    delayed_s=0.5,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """``simulated`` says in words why the GPU is a simulated one; "" for a real one. ``gpu``: its index, else it is the
    one with most free memory. ``limited`` False: nothing keeps the promises, and checks have to fail (for tests)."""

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
        around_s = program_s + (lengths.warm_up_ns + lengths.tail_ns) / 1e9
        alone_s, together_s, control_s = (
            around_s + ns / 1e9 for ns in (lengths.alone_ns, lengths.together_ns, lengths.control_ns)
        )
        estimated = dict.fromkeys(ALONE, alone_s) | dict.fromkeys(TOGETHER, together_s + control_s)
        estimated[LIGHT] = 3 * (control_s - lengths.tail_ns / 1e9 + 0.1)
        estimated[MEMORY] = 2 * program_s + SETTLED_S
        estimated[KILL] = (lengths.kills + 2) * (program_s + 0.5) + lengths.patience_s + 1
        estimated[LAUNCH] = lengths.launches_s + lengths.delayed_s + 2 * program_s
        estimated[SMS] = (len(SM_PERCENTS) + 1) * program_s + 1
        first_alone = next((name for name in self.checks if name in ALONE), "")
        if first_alone:
            estimated[first_alone] += control_s  # one program without limits is the control of all three
        return {name: estimated[name] for name in self.checks}
