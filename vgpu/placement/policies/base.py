"""What a policy has to say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from vgpu.placement.mix import Mix
from vgpu.placement.state import Gpu, Kind, Option, Request


class Policy(Protocol):
    """A rank for each placement: the higher, the better. It depends on nothing but its arguments, because the fleet
    keeps it."""

    name: ClassVar[str]
    uses_mix: ClassVar[bool]
    """Whether the rank depends on what was asked for lately."""

    def allows(self, asked: Request, gpu: Gpu) -> bool:
        """Whether the request may have this GPU, if it has room."""

    def rank(self, option: Option, mix: Mix) -> float:
        """The sum of ``parts``."""

    def parts(self, option: Option, mix: Mix) -> Mapping[str, float]:
        """The reasons and what each adds to the rank, in GPUs."""


class RanksAlone(Protocol):
    """A policy whose rank for one GPU of a node that has no other depends on what the GPU has left before and after."""

    def rank_alone(self, kind: Kind, before: Gpu, after: Gpu, mix: Mix) -> float:
        """The same as ``rank`` of that placement."""


class AllowsAll:
    """A policy that ranks, and refuses nothing."""

    def allows(self, asked: Request, gpu: Gpu) -> bool:
        return True
