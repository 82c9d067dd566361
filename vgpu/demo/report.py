"""What a demonstration found out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from vgpu.ctl.present.output import Cell, Column, Row
from vgpu.ctl.present.tables import percent
from vgpu.harness.measure import TOLERANCE_RATIO
from vgpu.units import format_bytes

COLUMNS: Final = (
    Column("VGPU"),
    Column("REQUESTED", right=True),
    Column("ACHIEVED", right=True),
    Column("TOKENS/S", right=True),
    Column("MEMORY LIMIT", right=True),
    Column("REFUSED", right=True),
)


@dataclass(frozen=True, slots=True)
class Sharer:
    """One vGPU. Ratios: parts of the sum of all sharers' finished work. ``memory_refusals``: its program's count."""

    id: str
    sm_percent: float
    requested_ratio: float
    achieved_ratio: float
    tokens_per_second: float
    memory_limit_bytes: int
    memory_refusals: int

    @property
    def missed(self) -> bool:
        return abs(self.achieved_ratio - self.requested_ratio) > TOLERANCE_RATIO


@dataclass(frozen=True, slots=True)
class Report:
    """The object that ``-o json`` prints. ``total_ratio``: all sharers' work over that of one program alone."""

    simulated: bool
    gpu: str
    mode: str
    total_ratio: float
    vgpus: tuple[Sharer, ...]

    @property
    def missed(self) -> bool:
        return any(sharer.missed for sharer in self.vgpus)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[Row]:
        return [
            (
                sharer.id,
                percent(sharer.requested_ratio),
                Cell(percent(sharer.achieved_ratio), "bold red" if sharer.missed else "bold green"),
                f"{sharer.tokens_per_second:.1f}",
                format_bytes(sharer.memory_limit_bytes),
                str(sharer.memory_refusals),
            )
            for sharer in self.vgpus
        ]

    def verdict(self) -> list[str]:
        """What the numbers mean, in sentences."""
        said = [f"Together they finished {percent(self.total_ratio)} of what one program finishes alone."]
        points = round(TOLERANCE_RATIO * 100)
        said += [
            f"{sharer.id} got {percent(sharer.achieved_ratio)} instead of {percent(sharer.requested_ratio)}: "
            f"a miss, {points} points are allowed."
            for sharer in self.vgpus
            if sharer.missed
        ]
        if not self.missed:
            said.append(f"Every share is within {points} points of what was asked.")
        return said
