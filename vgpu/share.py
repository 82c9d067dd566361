"""A vGPU's share of a GPU: its units, its type, and ``MEANING``, the formula that says what it is worth.

It is the last part of the help of each command that takes a share (vgpu/ctl), and what gpuserver/core computes:
``registry.py::share_of`` the first two lines, ``temporal.py`` and ``spatial.py`` the rest.
docs/explanation/scheduling.md has the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

PPM: Final = 1_000_000
"""The whole time of one GPU, in parts per million."""
CARD_MPERCENT: Final = 100_000
"""All SMs of one GPU, in thousandths of a percent."""


class Mode(StrEnum):
    """How the vGPUs of one GPU share it."""

    TEMPORAL = "temporal"
    """One vGPU at a time holds all SMs."""
    SPATIAL = "spatial"
    """As many vGPUs as their SMs fit on the GPU hold it at the same time."""


class Priority(IntEnum):
    """The order among vGPUs that are entitled to run; a higher value goes first. It adds nothing to a share."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(frozen=True, slots=True)
class Share:
    """What one vGPU was promised of one GPU. Invariant: ``guarantee_ppm`` ≤ ``limit_ppm`` ≤ ``PPM``."""

    guarantee_ppm: int
    """r: the part of the GPU's time that the vGPU can always have. Temporal mode: its SM share is a factor of it."""
    limit_ppm: int = PPM
    """l: the part of the GPU's time that the vGPU gets at most. Temporal mode: its SM share is a factor of it."""
    sm_mpercent: int = CARD_MPERCENT
    """The part of the SMs. Temporal mode: all. Spatial mode: what MPS grants, not what the user asked for."""
    priority: Priority = Priority.NORMAL
    bursts: bool = False
    """Spatial mode: its processes run on all SMs, whatever ``sm_mpercent`` is."""
    shareable: bool = False
    """Temporal mode: while the vGPU is light (``gpuserver/core/scheduler/kinds.py``), it may hold a shared lease."""
    counted: bool = True
    """The hooks of its processes count the GPU time that they use: an allowance holds them to its limit."""
    tpot_ns: int = 0
    """``--slo tpot``: the most time from the end of one decode step to the end of the next one. 0: not asked for."""
    ttft_ns: int = 0
    """``--slo ttft``: the most time from a request to the end of its prefill. 0: not asked for."""

    @property
    def has_slo(self) -> bool:
        return self.tpot_ns > 0 or self.ttft_ns > 0


MEANING: Final = """\
What a share means. Of the GPU's time, a vGPU is guaranteed r and gets l at most:

    temporal  r = sm × quota-request  l = sm × quota-limit  in turns
    spatial   r = quota-request       l = quota-limit       on sm % of the SMs

With --burst l is 1. In spatial mode its programs run on all SMs then. Bursting vGPUs of one priority run together, as
under MPS, whether or not their percentages fit.

In temporal mode vGPUs that need the GPU for half of their time or less hold it side by side, while no other wants it.

Used time moves its virtual time v by held / r. A vGPU that is owed time goes first, and of several that with the
earliest deadline d. With --slo, of those of one priority, the one goes first whose step or request is due first.
A turn lasts until v meets d, about period × r / Σ r. The limit is a bucket: it fills with l × time
and is emptied by computing. Priority orders the vGPUs that are owed time, and adds nothing.

Source: Stoica, Abdel-Wahab: Earliest Eligible Virtual Deadline First (1995); where widths have to be packed, MaxWeight
scheduling (Tassiulas, Ephremides 1992).
"""
