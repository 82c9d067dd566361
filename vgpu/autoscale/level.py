"""The level of a demand: a Kalman filter of one constant that drifts.

Readings vary by more than the demand itself changes. The variances are those of HAS-GPU, for demands in percent of a
GPU: the level's own change between two readings, and the error of one reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CHANGE_VARIANCE: Final = 1.0
READING_VARIANCE: Final = 10.0


@dataclass(slots=True)
class Level:
    """``value`` after the readings that were ``take``n; the first reading is the first value."""

    value: float = 0.0
    _variance: float | None = None

    def take(self, reading: float) -> float:
        if self._variance is None:
            self.value, self._variance = reading, READING_VARIANCE
            return reading
        variance = self._variance + CHANGE_VARIANCE
        gain = variance / (variance + READING_VARIANCE)
        self.value += gain * (reading - self.value)
        self._variance = (1 - gain) * variance
        return self.value
