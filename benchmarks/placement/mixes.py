"""The rules that are compared on mixes of requests for time and memory of single GPUs (vgpu/placement/simulate.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from vgpu.placement import POLICIES, Mix
from vgpu.placement.state import Option
from vgpu.share import PPM

CARD: Final = 80 << 30


def _sum(measure: Callable[[float, float], float], option: Option) -> float:
    whole = option.before.kind.memory_bytes
    return sum(measure(gpu.time_ppm / PPM, gpu.memory_bytes / whole) for gpu in option.left)


class _Rule:
    def rank(self, option: Option, mix: Mix) -> float | None:
        raise NotImplementedError

    def parts(self, option: Option, mix: Mix) -> Mapping[str, float]:
        rank = self.rank(option, mix)
        return {} if rank is None else {"rank": rank}


class Binpack(_Rule):
    """HAMi's binpack: the GPU of which most is in use, time and memory in equal parts."""

    name: ClassVar = "binpack"
    uses_mix: ClassVar = False

    def rank(self, option: Option, mix: Mix) -> float | None:
        return -_sum(lambda time, memory: time + memory, option)


class Balance(_Rule):
    """The GPU whose time and memory are left in the most equal parts; of equal ones the fuller."""

    name: ClassVar = "balance"
    uses_mix: ClassVar = False

    def rank(self, option: Option, mix: Mix) -> float | None:
        return -_sum(lambda time, memory: abs(time - memory) + 0.03 * (time + memory), option)


class Measure(_Rule):
    """FGD's measure, not rounded: the time that sizes of the mix cannot use."""

    name: ClassVar = "fgd measure"
    uses_mix: ClassVar = True

    def rank(self, option: Option, mix: Mix) -> float | None:
        return mix.unusable(option.before) - mix.unusable(option.after)


RULES: Final = {
    "spread": POLICIES["spread"],
    "pack": POLICIES["pack"],
    "binpack": Binpack(),
    "fgd measure": Measure(),
    "balance": Balance(),
    "fit": POLICIES["fit"],
}
