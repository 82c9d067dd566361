"""The rules that rank placements. A policy is one module here and one entry in ``POLICIES``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vgpu.placement.policies.base import Policy
from vgpu.placement.policies.fit import Fit
from vgpu.placement.policies.mutex import Mutex
from vgpu.placement.policies.pack import Pack
from vgpu.placement.policies.spread import Spread

POLICIES: Final[Mapping[str, Policy]] = {policy.name: policy for policy in (Spread(), Pack(), Fit(), Mutex())}

__all__ = ["POLICIES", "Policy"]
