"""``mutex``: no GPU holds two vGPUs with one label, such as two replicas of a service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vgpu.placement.mix import Mix
from vgpu.placement.policies.spread import Spread
from vgpu.placement.state import Option


class Mutex(Spread):
    """``spread`` among the GPUs without that label."""

    name: ClassVar = "mutex"

    def rank(self, option: Option, mix: Mix) -> float | None:
        return sum(parts.values()) if (parts := self.parts(option, mix)) else None

    def parts(self, option: Option, mix: Mix) -> Mapping[str, float]:
        if option.asked.label and any(option.asked.label in gpu.labels for gpu in option.used):
            return {}
        return super().parts(option, mix)
