"""How far a figure may be from what was promised, and why. The only place that has these numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class What(StrEnum):
    """What is compared; the value names its unit."""

    TIME = "ratio of GPU time"
    WORK = "ratio of work finished"
    TOTAL = "ratio of time in which the GPU was used"
    LOST = "ratio of requests lost"
    BYTES = "bytes"
    LEASE_BACK = "ns until the lease is back"
    LAUNCH = "ns a launch"
    SMS = "SMs"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """``value`` in the unit of its ``What``."""

    value: float
    reason: str


_RATIO_SIMULATED: Final = Tolerance(
    0.03, "a simulated GPU, its servers and all programs share the cores of this machine; as in vgpuctl demo"
)
_RATIO_FULL: Final = Tolerance(
    0.01, "the window of ten seconds cuts a lease of up to 20 ms at each end, 0.4 points; the rest is for hand-overs"
)
_RATIO_QUICK: Final = Tolerance(0.02, "a window of three seconds cuts a lease of up to 20 ms at each end: 1.3 points")
_TOTAL_REAL: Final = Tolerance(0.05, "hand-overs cost the GPU 1 to 3 % of its time")
_TOTAL_SIMULATED: Final = Tolerance(0.3, "programs that wait for a core of this machine leave the simulated GPU idle")
_LOST_REAL: Final = Tolerance(0.1, "the host's pauses differ by a few per cent from one run to the next")
_LOST_SIMULATED: Final = Tolerance(0.15, "programs that wait for a core of this machine answer fewer requests")
_LEASE_BACK_REAL: Final = Tolerance(5e6, "a death is known within 0.1 ms; the rest is its last kernels")
_LEASE_BACK_SIMULATED: Final = Tolerance(
    50e6, "the simulated driver's last kernels, and the processes to be woken, wait for a core of this machine"
)
_LAUNCH: Final = Tolerance(100.0, "3 % of what the driver itself takes for a launch (2.9 µs on an H200)")
_COUNTED: Final = Tolerance(0.0, "it is counted, not estimated")
_SMS: Final = Tolerance(2.0, "MPS gives out SMs in steps, of 2 on an H200")


def tolerances(*, simulated: bool, quick: bool) -> dict[What, Tolerance]:
    ratio = _RATIO_SIMULATED if simulated else _RATIO_QUICK if quick else _RATIO_FULL
    return {
        What.TIME: ratio,
        What.WORK: ratio,
        What.TOTAL: _TOTAL_SIMULATED if simulated else _TOTAL_REAL,
        What.LOST: _LOST_SIMULATED if simulated else _LOST_REAL,
        What.BYTES: _COUNTED,
        What.LEASE_BACK: _LEASE_BACK_SIMULATED if simulated else _LEASE_BACK_REAL,
        What.LAUNCH: _LAUNCH,
        What.SMS: _SMS,
        What.COUNT: _COUNTED,
    }
