"""SM partitions as MPS grants them: which percentage to ask for, and how many SMs that gives.

The driver grants ⌊percent · SMs / 100⌋ rounded down to a whole step, at least the minimum (H200, driver 580: steps
of 2, at least 8; 30 → 38 of 132, 50 → 66, 75 → 98, fractions accepted). Asking a little more than what a person said
can come nearer to it: 30.31 gives 40 SMs, 30.3 % of 132, where 30 gives 38, 28.8 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

SM_STEP = 2
SM_MINIMUM = 8
_HUNDREDTH = 100  # percentages are passed with two decimals


@dataclass(frozen=True, slots=True)
class Partition:
    """``granted_sms`` of ``sm_count``; ``percent_text`` is what CUDA_MPS_ACTIVE_THREAD_PERCENTAGE has to say for it."""

    granted_sms: int
    sm_count: int
    percent_text: str

    @property
    def mpercent(self) -> int:
        """The granted part of the card in thousandths of a percent, rounded down: three times 44 of 132 SMs fit it.
        What rounding hides is far below a step, so no packing that needs more SMs than there are looks possible."""
        return self.granted_sms * 100_000 // self.sm_count

    @property
    def percent(self) -> float:
        return self.granted_sms * 100 / self.sm_count


def granted_sms(percent: Fraction, sm_count: int) -> int:
    """SMs that the driver gives for ``percent``."""
    asked = percent * sm_count / 100
    return min(sm_count, max(SM_MINIMUM, int(asked) // SM_STEP * SM_STEP)) if percent < 100 else sm_count


def partition(percent: float, sm_count: int) -> Partition:
    """The grant nearest to ``percent``.

    Never so large that the n equal vGPUs which fit a card by their percentages would no longer fit it by their SMs:
    ten of 10 % get 12 of 132 SMs each, although 14 is nearer to 13.2.
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
