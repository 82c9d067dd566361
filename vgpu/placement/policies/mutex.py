"""``mutex``: no GPU holds two vGPUs with one label, such as two replicas of a service."""

from __future__ import annotations

from typing import ClassVar

from vgpu.placement.policies.spread import Spread
from vgpu.placement.state import Gpu, Request


class Mutex(Spread):
    """``spread`` among the GPUs without that label."""

    name: ClassVar = "mutex"

    def allows(self, asked: Request, gpu: Gpu) -> bool:
        return not asked.label or asked.label not in gpu.labels
