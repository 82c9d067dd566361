"""The rules that are compared on mixes of requests for time and memory of single GPUs (vgpu/placement/simulate.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import ClassVar, Final

from vgpu.placement import POLICIES, Mix
from vgpu.placement.policies.base import AllowsAll
from vgpu.placement.state import Gpu, Option
from vgpu.share import PPM

CARD: Final = 80 << 30


def _sum(measure: Callable[[float, float], float], option: Option) -> float:
    whole = option.before.kind.memory_bytes
    return sum(measure(gpu.time_ppm / PPM, gpu.memory_bytes / whole) for gpu in option.left)


class _Rule(AllowsAll):
    def rank(self, option: Option, mix: Mix) -> float:
        raise NotImplementedError

    def parts(self, option: Option, mix: Mix) -> Mapping[str, float]:
        return {"rank": self.rank(option, mix)}


class Binpack(_Rule):
    """HAMi's binpack: the GPU of which most is in use, time and memory in equal parts."""

    name: ClassVar = "binpack"
    uses_mix: ClassVar = False

    def rank(self, option: Option, mix: Mix) -> float:
        return -_sum(lambda time, memory: time + memory, option)


class Balance(_Rule):
    """The GPU whose time and memory are left in the most equal parts; of equal ones the fuller."""

    name: ClassVar = "balance"
    uses_mix: ClassVar = False

    def rank(self, option: Option, mix: Mix) -> float:
        return -_sum(lambda time, memory: abs(time - memory) + 0.03 * (time + memory), option)


class Measure(_Rule):
    """FGD's measure, not rounded: the growth of the time that sizes of the mix cannot use. It counts no memory."""

    name: ClassVar = "fgd measure"
    uses_mix: ClassVar = True

    def rank(self, option: Option, mix: Mix) -> float:
        return sum(map(partial(_unusable, mix), option.used)) - sum(map(partial(_unusable, mix), option.left))


@lru_cache(200_000)
def _unusable(mix: Mix, gpu: Gpu) -> float:
    refused = [p for size, p in mix.sizes if size.area_ppm > gpu.time_ppm or size.memory_bytes > gpu.memory_bytes]
    return gpu.time_ppm / PPM * sum(refused)


RULES: Final = {
    "spread": POLICIES["spread"],
    "pack": POLICIES["pack"],
    "binpack": Binpack(),
    "fgd measure": Measure(),
    "balance": Balance(),
    "fit": POLICIES["fit"],
}
