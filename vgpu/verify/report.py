"""The report: one HTML file that needs nothing else, no network and no JavaScript."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from vgpu.verify import plots
from vgpu.verify.judge import Check
from vgpu.verify.measured import Evidence
from vgpu.verify.outcome import Outcome, control_in_words
from vgpu.verify.shares import PICTURE_NS
from vgpu.verify.tolerances import What, tolerances

DRAWN_PAIR: Final = "share-30-70"
"""The check with a picture of its course."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the list of all figures, in the units that people read."""

    check: str
    control: bool
    name: str
    promised: str
    measured: str
    tolerance: str
    held: bool


def written(outcome: Outcome) -> str:
    """The whole file."""
    environment = Environment(
        loader=PackageLoader("vgpu.verify"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    template = environment.get_template("report.html.j2")
    allowed = tolerances(simulated=outcome.findings.gpu.simulated, quick=outcome.plan.quick)
    return template.render(
        outcome=outcome,
        control_in_words=control_in_words,
        figures=[figure for check in outcome.checks for figure in _figures(check)],
        drawn=_drawn(outcome.findings.evidence, allowed[What.TIME].value, allowed[What.LEASE_BACK].value),
        allowed={what.value: tolerance for what, tolerance in allowed.items()},
        readable=readable,
        width=plots.WIDTH,
    )


def _drawn(evidence: Evidence, ratio: float, lease_back_ns: float) -> dict[str, Any]:
    """The plots for which there is something to draw."""
    made: dict[str, Any] = {}
    if evidence.shares:
        made["bars"] = plots.bars(evidence, ratio)
    if DRAWN_PAIR in evidence.shares:
        run, without = evidence.shares[DRAWN_PAIR], evidence.unlimited_shares[DRAWN_PAIR]
        made["series"] = plots.series(DRAWN_PAIR, run)
        made["series_without"] = plots.series(DRAWN_PAIR, without)
        made["strips"] = plots.strips(DRAWN_PAIR, run, PICTURE_NS)
        made["strips_without"] = plots.strips(DRAWN_PAIR, without, PICTURE_NS)
    if evidence.killed:
        made["kills"] = plots.kills(evidence, lease_back_ns)
    if evidence.launches is not None and evidence.delayed_launches is not None:
        made["launches"] = plots.launches(evidence.launches, evidence.delayed_launches)
    return made


def _figures(check: Check) -> Iterator[Figure]:
    for judged, control in ((check.judged, False), (check.without, True)):
        for one in judged.quantities:
            yield Figure(
                check=check.name,
                control=control,
                name=one.name,
                promised=readable(one.what, one.promised),
                measured=readable(one.what, one.measured),
                tolerance=readable(one.what, one.tolerance),
                held=one.held,
            )


def readable(what: What | str, value: float) -> str:
    """A figure in its unit."""
    match What(what):
        case What.TIME | What.WORK | What.TOTAL | What.LOST:
            return f"{100 * value:.2f} %"
        case What.BYTES:
            return f"{value:,.0f} B".replace(",", " ")  # a thin space between thousands
        case What.LEASE_BACK:
            return f"{value / 1e6:.2f} ms"
        case What.LAUNCH:
            return f"{value:.1f} ns"
        case What.SMS:
            return f"{value:g} SMs"
        case What.COUNT:
            return f"{value:g}"
