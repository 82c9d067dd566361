"""``fit``: the placement after which the requests of late can use most of what is left.

docs/reference/performance/placement.md compares it with best fit, packing and FGD on public traces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from vgpu.placement.mix import Mix
from vgpu.placement.policies.base import AllowsAll
from vgpu.placement.state import Gpu, Kind, Option
from vgpu.share import PPM

IMBALANCE: Final = 3.0
"""What is left of time without memory, or of memory without time, counts so much more than room."""
ROOM: Final = 0.03
"""Of placements that strand the same, the fullest node: it leaves empty ones for large requests."""

REASONS: Final = ("growth of what cannot be used", "imbalance of time and memory", "room left on its node")


class Fit(AllowsAll):
    """The growth of stranding, the imbalance left on its GPUs, and the room left on its node."""

    name: ClassVar = "fit"
    uses_mix: ClassVar = True

    def rank(self, option: Option, mix: Mix) -> float:
        return sum(self._parts(option, mix))

    def parts(self, option: Option, mix: Mix) -> Mapping[str, float]:
        return dict(zip(REASONS, self._parts(option, mix), strict=True))

    def rank_alone(self, kind: Kind, before: Gpu, after: Gpu, mix: Mix) -> float:
        """As ``rank``, from what the mix knows of the two states."""
        stranded, imbalance = mix.alone(kind, after)
        growth = mix.stranded_alone(kind, before) - stranded
        return sum((growth, -IMBALANCE * imbalance, -ROOM * after.time_ppm / PPM))

    @staticmethod
    def _parts(option: Option, mix: Mix) -> tuple[float, float, float]:
        after = option.after
        imbalance, room = 0.0, 0
        for gpu in option.left:
            imbalance += mix.imbalance(after.kind, gpu)
        for gpu in after.gpus:
            room += gpu.time_ppm
        return mix.stranded(option.before) - mix.stranded(after), -IMBALANCE * imbalance, -ROOM * room / PPM
