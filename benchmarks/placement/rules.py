"""Rules of others, rebuilt from their descriptions, as policies of our fleet.

``best-fit``  least room left on the node, processors and GPUs in equal parts
``packing``   GPUs in use before idle ones, used nodes before idle ones (Gandiva and MLaaS clusters)
``fgd``       steepest descent of the fragmentation measure (Weng et al., USENIX ATC 2023)

Scores are whole numbers from 0 to 100, and the lowest node wins among equals, as in the authors' simulator. Without
the step, FGD is four points worse on their lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Final

from vgpu.placement import Mix
from vgpu.placement.policies.base import AllowsAll
from vgpu.placement.state import Option
from vgpu.share import PPM

MOST_CORES: Final = 128_000
MOST_GPUS: Final = 8
POPULAR: Final = 0.95
"""FGD knows the most frequent sizes, which make up this part of the list."""


class Rule(AllowsAll):
    uses_mix: ClassVar = True
    name: ClassVar[str]

    def rank(self, option: Option, mix: Mix) -> float:
        return self.score(option, mix)

    def parts(self, option: Option, mix: Mix) -> Mapping[str, float]:
        return {self.name: self.score(option, mix)}

    def score(self, option: Option, mix: Mix) -> int:
        raise NotImplementedError


class BestFit(Rule):
    name: ClassVar = "best-fit"

    def score(self, option: Option, mix: Mix) -> int:
        after = option.after
        gpus = sum(gpu.time_ppm for gpu in after.gpus) / PPM
        return int(100 * (1 - 0.5 * after.cores / MOST_CORES - 0.5 * gpus / MOST_GPUS))


class Packing(Rule):
    name: ClassVar = "packing"

    def score(self, option: Option, mix: Mix) -> int:
        before = option.before.gpus
        if not option.used:
            return 0
        idle = sum(gpu.time_ppm == PPM for gpu in before)
        if idle == len(before):
            return max(33 - idle, idle)
        taken = sum(gpu.time_ppm == PPM for gpu in option.used)
        if taken:
            return max(50 - taken, 33)
        return max(100 - sum(gpu.time_ppm * 100 // PPM for gpu in option.used) // 10, 50)


class Fgd(Rule):
    name: ClassVar = "fgd"

    def score(self, option: Option, mix: Mix) -> int:
        growth = mix.unusable(option.after) - mix.unusable(option.before)
        return int(100 / (1 + math.exp(growth)))


RULES: Final[Mapping[str, Rule]] = {rule.name: rule for rule in (BestFit(), Packing(), Fgd())}
