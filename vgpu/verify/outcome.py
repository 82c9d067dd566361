"""The outcome of a verification, for tables and programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vgpu.ctl.present.output import Cell, Column, Row
from vgpu.units import counted
from vgpu.verify.judge import Check, checks
from vgpu.verify.plan import Plan
from vgpu.verify.run import Findings
from vgpu.verify.tolerances import tolerances

COLUMNS: Final = (
    Column("CHECK"),
    Column("PROMISED"),
    Column("MEASURED"),
    Column("VERDICT"),
    Column("CONTROL"),
)
AS_IT_MUST: Final = "fails, as it must"
SHOWS_NOTHING: Final = "does not fail: this check shows nothing"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``facts``: of machine and command line, by name."""

    plan: Plan
    findings: Findings
    checks: tuple[Check, ...]
    facts: Mapping[str, str]

    @classmethod
    def of(cls, plan: Plan, findings: Findings, facts: Mapping[str, str]) -> Outcome:
        allowed = tolerances(simulated=findings.gpu.simulated, quick=plan.quick)
        return cls(plan, findings, tuple(checks(findings.evidence, allowed)), facts)

    @property
    def proven(self) -> bool:
        """Something was checked, every check passed, and every control failed."""
        return bool(self.checks) and all(check.proven for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {
            "simulated": self.findings.gpu.simulated,
            "gpu": self.findings.gpu.name,
            "quick": self.plan.quick,
            "seconds": round(self.findings.seconds, 1),
            "checks": [check.as_json() for check in self.checks],
            "not_checked": [{"name": name, "reason": why} for name, why in self.findings.evidence.not_checked.items()],
            "others": [other.model_dump(mode="json") for other in self.findings.others],
            "facts": dict(self.facts),
        }

    def rows(self) -> list[Row]:
        return [
            (
                check.name,
                check.promised,
                check.judged.measured,
                Cell(check.verdict, "bold green" if check.verdict == "pass" else "bold red"),
                Cell(control_in_words(check), "" if check.control else "bold red"),
            )
            for check in self.checks
        ]

    def sentences(self) -> list[str]:
        """The result of the table, and what a reader has to know besides."""
        return [*self._remarks(), self.headline()]

    def headline(self) -> str:
        missed = [check.name for check in self.checks if check.verdict != "pass"]
        blind = [check.name for check in self.checks if check.verdict == "pass" and not check.control]
        said = []
        if missed:
            said.append(f"Not kept: {', '.join(missed)}.")
        if blind:
            said.append(f"Without limits they do not fail, so they show nothing: {', '.join(blind)}.")
        if not said and not self.checks:
            return "Nothing could be checked here."
        if not said:
            kept = "The promise is" if len(self.checks) == 1 else f"All {len(self.checks)} promises are"
            return f"{kept} kept, and without limits every check fails, as it must."
        return " ".join(said)

    def _remarks(self) -> list[str]:
        said = [f"Not checked: {name}: {why}." for name, why in self.findings.evidence.not_checked.items()]
        others = self.findings.others
        if others:
            named = ", ".join(f"{other.command or 'a program'} ({other.pid})" for other in others[:5])
            more = f" and {len(others) - 5} more" if len(others) > 5 else ""
            said.append(
                f"Besides, {counted(len(others), 'program')} of others had the GPU open: {named}{more}. "
                "Figures are of what these left."
            )
        return said


def control_in_words(check: Check) -> str:
    if not check.control_is:
        return check.without.measured
    return f"{check.control_is}: {check.without.measured}: {AS_IT_MUST if check.control else SHOWS_NOTHING}"
