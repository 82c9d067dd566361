"""``spread``: the GPU with most room, so that programs meet few others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vgpu.placement.mix import Mix
from vgpu.placement.policies.base import AllowsAll
from vgpu.placement.state import Option
from vgpu.share import PPM


class Spread(AllowsAll):
    """The scarcer of time and memory first, then their sum."""

    name: ClassVar = "spread"
    uses_mix: ClassVar = False

    def rank(self, option: Option, mix: Mix) -> float:
        return sum(self.parts(option, mix).values())

    def parts(self, option: Option, mix: Mix) -> Mapping[str, float]:
        whole = option.before.kind.memory_bytes or 1
        scarcer = sum(min(gpu.time_ppm / PPM, gpu.memory_bytes / whole) for gpu in option.used)
        both = sum(gpu.time_ppm / PPM + gpu.memory_bytes / whole for gpu in option.used)
        return {"room of the scarcer of time and memory": scarcer, "room in all": both / 1000}
