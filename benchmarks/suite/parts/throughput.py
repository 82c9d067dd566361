"""What several do together, in percent of what one does alone, and how they split it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.suite.parts.part import TEMPORAL
from benchmarks.suite.report.tables import Bar, Column, Row
from benchmarks.suite.workloads.catalogue import WORKS


def _together(row: Row, *kinds: str) -> bool:
    work = WORKS[row.work]
    return row.way == TEMPORAL and "/" in row.row and work.kind in kinds and not work.host_bound


def _steady(row: Row) -> bool:
    return _together(row, "kernels") and row.work.startswith(("gemm", "elementwise"))


def _trains(row: Row) -> bool:
    return _together(row, "training")


def _gpu_bound(row: Row) -> bool:
    return _together(row, "kernels", "training")


TOTAL: Final = Column("total_percent", "total", "high", 2, (Bar(98.5, _steady), Bar(97.0, _trains)))
SPLIT_ERROR: Final = Column("split_error_points", "split error, points", "low", 2, (Bar(1.0, _gpu_bound),))
ABOVE_HARDWARE: Final = "above hardware"


def throughput(
    per_second: Sequence[float], asked: Sequence[float], exclusive: float, hardware: float | None
) -> dict[str, float]:
    """Figures of a window: units a second of each of them, of one alone, and of several under hardware time slicing.
    ``asked``: their shares in percent; empty where they have none."""
    total = sum(per_second)
    figures = {"per_second": total, "total_percent": 100 * total / exclusive}
    if asked:
        split = [100 * part / total if total else 0.0 for part in per_second]
        figures["split_error_points"] = max(abs(a - b) for a, b in zip(split, asked, strict=True))
        if hardware is not None:
            figures["over_hardware_points"] = 100 * (total - hardware) / exclusive
    return figures
