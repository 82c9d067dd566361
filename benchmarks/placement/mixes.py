"""Mixes of requests for time and memory of single GPUs, by seed, and the rules that are compared on them.

``openb``  the parts of a GPU that the openb tasks ask for, time and memory drawn apart
``mixed``  from a tenth of a GPU to a whole one, time and memory drawn apart
``small``  5 to 25 %
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Final

from vgpu.placement import POLICIES, Mix, Request
from vgpu.placement.state import Option
from vgpu.share import PPM

CARD: Final = 80 << 30
# Percent of a GPU: how many of the openb tasks' GPUs were asked for in parts of this size (cluster-trace-gpu-v2023).
OPENB: Final[Mapping[int, int]] = {
    5: 7, 11: 24, 14: 1, 16: 74, 22: 62, 23: 140, 27: 4, 29: 1, 32: 328, 33: 7, 35: 6, 37: 47, 44: 2, 46: 128, 47: 750,
    48: 19, 55: 72, 59: 75, 65: 253, 81: 1078, 100: 4355,
}  # fmt: skip
MIXED: Final = {10: 3, 20: 3, 25: 3, 30: 3, 40: 2, 50: 3, 60: 1, 70: 1, 80: 1, 100: 1}
SMALL: Final = {5: 1, 8: 1, 10: 1, 12: 1, 15: 1, 20: 1, 25: 1}


MIXES: Final = {"openb": OPENB, "mixed": MIXED, "small": SMALL}


def requests(sizes: Mapping[int, int], seed: int) -> Iterator[Request]:
    """Without end."""
    chance = random.Random(seed)
    parts, weights = list(sizes), list(sizes.values())
    while True:
        time, memory = chance.choices(parts, weights, k=2)
        yield Request(time * PPM // 100, memory * CARD // 100)


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
