"""``pack``: the fullest GPU that has room, so that others stay empty for large requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vgpu.placement.mix import Mix
from vgpu.placement.policies.base import AllowsAll
from vgpu.placement.state import Option
from vgpu.share import PPM


class Pack(AllowsAll):
    """Best fit: what the GPUs have left; of equal ones the fuller node."""

    name: ClassVar = "pack"
    uses_mix: ClassVar = False

    def rank(self, option: Option, mix: Mix) -> float:
        return sum(self.parts(option, mix).values())

    def parts(self, option: Option, mix: Mix) -> Mapping[str, float]:
        whole = option.before.kind.memory_bytes or 1
        left = sum(gpu.time_ppm / PPM + gpu.memory_bytes / whole for gpu in option.left)
        node = sum(gpu.time_ppm for gpu in option.before.gpus) / PPM
        return {"left on its GPU": -left, "left on its node": -node / 1000}
