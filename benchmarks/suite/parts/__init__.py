"""The parts of the suite, in the order in which they run. Each has a module that says what it measures and how."""

from __future__ import annotations

from typing import Final

from benchmarks.suite.parts import (
    colocation,
    gate,
    handover,
    launch,
    light,
    mix,
    native,
    packing,
    pairs,
    pdl,
    percents,
    shares,
    sms,
)
from benchmarks.suite.parts.part import Part

_MODULES: Final = (shares, pairs, light, handover, colocation, packing, mix, percents, sms, gate, launch, pdl, native)
PARTS: Final[dict[str, Part]] = {module.PART.name: module.PART for module in _MODULES}
