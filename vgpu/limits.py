"""What one user may take of a node, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limits:
    """``mps_places_kept_percent``: of the processes that a GPU's MPS server takes (48), so many are kept for its vGPUs,
    each its share of them and one at least. Whoever comes first has the others."""

    mps_places_kept_percent: int = 50


LIMITS: Final = Limits()
