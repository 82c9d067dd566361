"""SM partitions as MPS grants them: which percentage to ask for, and how many SMs it gives.

The driver grants ⌊percent · SMs / 100⌋, rounded down to a multiple of ``SM_STEP``, and at least ``SM_MINIMUM``. Both
were measured on an H200 with driver 580, which also accepts fractions of a percent. A percentage slightly above the
requested one can come nearer to it. Example: of 132 SMs, 30 gives 38 (28.8 %), and 30.31 gives 40 (30.3 %).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from vgpu.share import CARD_MPERCENT

SM_STEP = 2
SM_MINIMUM = 8
_HUNDREDTH = 100  # percentages are passed with two decimals


@dataclass(frozen=True, slots=True)
class Partition:
    """``granted_sms`` of the ``sm_count`` SMs of one GPU."""

    granted_sms: int
    sm_count: int
    percent_text: str
    """The value of CUDA_MPS_ACTIVE_THREAD_PERCENTAGE that gives them."""

    @property
    def mpercent(self) -> int:
        """The granted part of the card in thousandths of a percent, rounded down, so that three times 44 of 132 SMs
        fit it. The rounding error of all vGPUs is below one step, so a packing never needs more SMs than there are."""
        return self.granted_sms * CARD_MPERCENT // self.sm_count

    @property
    def percent(self) -> float:
        return self.granted_sms * 100 / self.sm_count


def granted_sms(percent: Fraction, sm_count: int) -> int:
    """SMs that the driver grants for ``percent``."""
    asked = percent * sm_count / 100
    return min(sm_count, max(SM_MINIMUM, int(asked) // SM_STEP * SM_STEP)) if percent < 100 else sm_count


def partition(percent: float, sm_count: int) -> Partition:
    """The grant nearest to ``percent``.

    If n equal vGPUs fit a card by their percentages, they also fit it by the SMs granted. Example: ten vGPUs of 10 %
    get 12 of 132 SMs each, although 14 is nearer to 13.2.
    """
    exact = Fraction(percent).limit_denominator(1000) * sm_count / 100
    below = max(SM_MINIMUM, int(exact) // SM_STEP * SM_STEP)
    above = min(sm_count, below + SM_STEP)
    fit_by_percent = int(100 / Fraction(percent).limit_denominator(1000))
    nearest = above if above - exact < exact - below and above * fit_by_percent <= sm_count else below
    granted = min(nearest, sm_count)
    return Partition(granted, sm_count, _text_for(granted, sm_count))


def _text_for(granted: int, sm_count: int) -> str:
    """The least percentage with two decimals that yields ``granted``."""
    hundredths = min(100 * _HUNDREDTH, -(-granted * 100 * _HUNDREDTH // sm_count))
    return f"{hundredths // _HUNDREDTH}.{hundredths % _HUNDREDTH:02d}".rstrip("0").rstrip(".")
