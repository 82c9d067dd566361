"""Measurements in, checks out: what was promised, what was measured, whether that is the same. Pure.

A check holds if each of its quantities does. Its control is the same judgement over the same measurement without what
keeps the promise: no limits, exclusive leases instead of shared ones, a holder that is stopped instead of killed, a
gate with a delay in it. The control has to fail. If it holds, the check has shown nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from vgpu.harness.measure import shares
from vgpu.units import format_bytes
from vgpu.verify.measured import Ending, Evidence, LaunchRun, LightRun, MemoryRun, ShareRun, SmRun
from vgpu.verify.tolerances import Tolerance, What

ALONE: Final = {"share-10-alone": 10.0, "share-30-alone": 30.0, "share-70-alone": 70.0}
TOGETHER: Final = {"share-30-70": (30.0, 70.0), "share-10-30-60": (10.0, 30.0, 60.0)}
LIGHT: Final = "light-programs"
MEMORY: Final = "memory-limit"
KILL: Final = "kill-recovery"
LAUNCH: Final = "launch-overhead"
SMS: Final = "sm-count"
NAMES: Final = (*ALONE, *TOGETHER, LIGHT, MEMORY, KILL, LAUNCH, SMS)
"""All checks, in the order in which they are made and reported."""
LEFT_OUT_IF_QUICK: Final = ("share-10-30-60",)
"""What a pair shows, three show again."""

SM_PERCENTS: Final = (10.0, 30.0, 70.0)
PLANTED_DELAY_NS: Final = 2_000
"""What the control of the launch overhead adds before each launch: less than a launch takes itself."""
_OUT_OF_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY"

Tolerances = Mapping[What, Tolerance]


@dataclass(frozen=True, slots=True)
class Quantity:
    """One figure. ``at_most``: less than promised is as good. ``excess`` over ``tolerance`` fails it."""

    name: str
    what: What
    promised: float
    measured: float
    tolerance: float
    at_most: bool = False

    @property
    def held(self) -> bool:
        excess = self.measured - self.promised
        return (excess if self.at_most else abs(excess)) <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.what.value,
            "promised": self.promised,
            "measured": self.measured,
            "tolerance": self.tolerance,
            "held": self.held,
        }


@dataclass(frozen=True, slots=True)
class Judged:
    """One measurement against its promise: in words, and each figure."""

    measured: str
    quantities: tuple[Quantity, ...]

    @property
    def held(self) -> bool:
        return all(quantity.held for quantity in self.quantities)


@dataclass(frozen=True, slots=True)
class Check:
    """``without``: the control, and ``control_is``: what was left out or put in for it."""

    name: str
    promised: str
    judged: Judged
    without: Judged
    control_is: str
    reason: str
    """Why its tolerance is what it is."""

    @property
    def verdict(self) -> str:
        return "pass" if self.judged.held else "fail"

    @property
    def control(self) -> bool:
        """The same check failed without limits, as it must."""
        return not self.without.held

    @property
    def proven(self) -> bool:
        return self.judged.held and self.control

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "promised": self.promised,
            "measured": self.judged.measured,
            "verdict": self.verdict,
            "control": self.control,
            "control_is": self.control_is,
            "control_measured": self.without.measured,
            "quantities": [quantity.as_json() for quantity in self.judged.quantities],
            "control_quantities": [quantity.as_json() for quantity in self.without.quantities],
            "tolerance_reason": self.reason,
        }


def chosen(only: Sequence[str], *, quick: bool = False) -> tuple[str, ...]:
    """The checks that ``only`` means, by name or its beginning, in order. For none: all, or those of ``--quick``.

    ``ValueError`` for one that means no check.
    """
    for wanted in only:
        if not any(name.startswith(wanted) for name in NAMES):
            raise ValueError(f"{wanted!r} is no check: there are {', '.join(NAMES)}")
    if not only:
        return tuple(name for name in NAMES if not (quick and name in LEFT_OUT_IF_QUICK))
    return tuple(name for name in NAMES if any(name.startswith(wanted) for wanted in only))


def checks(evidence: Evidence, allowed: Tolerances) -> list[Check]:
    """Everything that was measured, judged."""
    made = [*_shares(evidence, allowed)]
    if evidence.light is not None and evidence.light_in_turns is not None:
        made.append(_light(evidence.light, evidence.light_in_turns, allowed))
    if evidence.memory is not None and evidence.unlimited_memory is not None:
        made.append(_memory(evidence.memory, evidence.unlimited_memory, allowed))
    if evidence.killed and evidence.stopped is not None:
        made.append(_kills(evidence.killed, evidence.stopped, allowed))
    if evidence.launches is not None and evidence.delayed_launches is not None:
        made.append(_launches(evidence.launches, evidence.delayed_launches, allowed))
    if evidence.sms and evidence.unlimited_sms is not None:
        made.append(_sm_counts(evidence.sms, evidence.unlimited_sms, allowed))
    made += [_failed(name, message) for name, message in evidence.failed.items()]
    return sorted(made, key=lambda check: NAMES.index(check.name))


def _failed(name: str, message: str) -> Check:
    """One that came to nothing has not been passed, and its control shows nothing."""
    nothing = (Quantity("measurements that failed", What.COUNT, 0, 1, 0),)
    return Check(name, "to be measured", Judged(message, nothing), Judged("not measured", ()), "", "")


# --- shares -------------------------------------------------------------------------------------------------------


def _shares(evidence: Evidence, allowed: Tolerances) -> Iterator[Check]:
    points = _points(allowed[What.TIME].value)
    for name, run in evidence.shares.items():
        without = evidence.unlimited_shares[name]
        if name in ALONE:
            yield Check(
                name,
                f"{ALONE[name]:g} % of the GPU's time, ± {points}, alone",
                _alone(run, ALONE[name], allowed),
                _alone(without, ALONE[name], allowed),
                "in no vGPU",
                allowed[What.TIME].reason,
            )
        else:
            asked = TOGETHER[name]
            said = " : ".join(f"{percent:g}" for percent in asked)
            yield Check(
                name,
                f"{said} % of the work and of the GPU time, ± {points}",
                _together(run, asked, allowed, limited=True),
                _together(without, asked, allowed, limited=False),
                "in no vGPU",
                allowed[What.WORK].reason,
            )


def _alone(run: ShareRun, percent: float, allowed: Tolerances) -> Judged:
    """By GPU time. By work it would be unfair: where the clock depends on the power, as on an H200, 30 % of the time
    alone finish 38 % of the work."""
    (program,) = run.programs
    ratios = {"by its kernels' time stamps": program.device_ratio}
    if program.books_ratio is not None:
        ratios["by the books"] = program.books_ratio
    quantities = [_ratio(name, What.TIME, percent / 100, ratio, allowed) for name, ratio in ratios.items()]
    return Judged(", ".join(f"{_percent(q.measured)} {q.name}" for q in quantities), tuple(quantities))


def _together(run: ShareRun, asked: Sequence[float], allowed: Tolerances, *, limited: bool) -> Judged:
    """By work, and by GPU time among what was used. Without limits by work alone: a kernel that the hardware interrupts
    for another program's has the other's time between its stamps, too."""
    work = run.work_ratios
    quantities = [
        _ratio(f"work of {percent:g} %", What.WORK, percent / 100, ratio, allowed)
        for percent, ratio in zip(asked, work, strict=True)
    ]
    said = f"{_percents(work)} of the work"
    if limited:
        total = sum(program.device_ratio for program in run.programs)
        time = shares([program.device_ratio for program in run.programs])
        quantities += [
            _ratio(f"GPU time of {percent:g} %", What.TIME, percent / 100, ratio, allowed)
            for percent, ratio in zip(asked, time, strict=True)
        ]
        quantities.append(_ratio("GPU time of all", What.TOTAL, 1.0, total, allowed))
        said += f", {_percents(time)} of the GPU time, which was {_percent(total)} of all"
    return Judged(said, tuple(quantities))


def _ratio(name: str, what: What, promised: float, measured: float, allowed: Tolerances) -> Quantity:
    return Quantity(name, what, promised, round(measured, 5), allowed[what].value)


# --- light programs ------------------------------------------------------------------------------------------------


def _light(run: LightRun, in_turns: LightRun, allowed: Tolerances) -> Check:
    return Check(
        LIGHT,
        f"host-bound programs answer {100 * (1 - allowed[What.LOST].value):g} % or more of what they do without vGPUs",
        _light_judged(run, allowed),
        _light_judged(in_turns, allowed),
        "in turns (--lease exclusive)",
        allowed[What.LOST].reason,
    )


def _light_judged(run: LightRun, allowed: Tolerances) -> Judged:
    lost = Quantity("requests lost", What.LOST, 0, round(run.lost_ratio, 5), allowed[What.LOST].value, at_most=True)
    return Judged(f"{run.in_vgpus:.0f} of {run.without:.0f} requests/s", (lost,))


# --- memory -------------------------------------------------------------------------------------------------------


def _memory(run: MemoryRun, without: MemoryRun, allowed: Tolerances) -> Check:
    return Check(
        MEMORY,
        f"{format_bytes(run.limit_bytes)} to the byte, context included; then CUDA's own out-of-memory error",
        _memory_judged(run, allowed),
        _memory_judged(without, allowed),
        "in no vGPU",
        allowed[What.BYTES].reason,
    )


def _memory_judged(run: MemoryRun, allowed: Tolerances) -> Judged:
    taken = run.pieces * run.piece_bytes
    fit = (run.limit_bytes - (run.total_bytes - run.free_bytes)) // run.piece_bytes * run.piece_bytes

    def exact(name: str, promised: int, measured: int) -> Quantity:
        return Quantity(name, What.BYTES, promised, measured, allowed[What.BYTES].value)

    quantities = (
        exact("memory that CUDA shows", run.limit_bytes, run.total_bytes),
        exact("memory that could be allocated", max(0, fit), taken),
        exact("free memory then, less than a piece", run.free_bytes - taken, run.left_bytes),
        exact("free memory after all is given back", run.free_bytes, run.freed_bytes),
        Quantity(f"refusals with {_OUT_OF_MEMORY}", What.COUNT, 1, 1 if run.refusal == _OUT_OF_MEMORY else 0, 0),
    )
    refused = f"then {run.refusal}" if run.refusal else "none refused"
    pieces = f"{run.pieces} pieces of {format_bytes(run.piece_bytes)}"
    return Judged(f"{format_bytes(run.total_bytes)} shown, {pieces} allocated, {refused}", quantities)


# --- kills --------------------------------------------------------------------------------------------------------


def _kills(killed: Sequence[Ending], stopped: Ending, allowed: Tolerances) -> Check:
    within = f"{allowed[What.LEASE_BACK].value / 1e6:g}"
    return Check(
        KILL,
        f"after kill -9 in mid-lease: lease back within {within} ms, all memory given back, the neighbour goes on",
        _endings_judged(killed, allowed),
        _endings_judged([stopped], allowed),
        "stopped instead of killed",
        allowed[What.LEASE_BACK].reason,
    )


def _endings_judged(endings: Sequence[Ending], allowed: Tolerances) -> Judged:
    back = [ending.lease_back_ns for ending in endings if ending.lease_back_ns is not None]
    idle = sum(ending.neighbour_work <= 0 for ending in endings)
    kept = max(ending.kept_bytes for ending in endings)
    held = max(ending.held_bytes for ending in endings)
    drift = max(abs(after - before) for before, after in (ending.neighbour_bytes for ending in endings))
    quantities = [
        Quantity("leases that did not come back", What.COUNT, 0, len(endings) - len(back), 0),
        Quantity("neighbours that did not go on", What.COUNT, 0, idle, 0),
        Quantity("memory that the vGPU kept", What.BYTES, 0, kept, 0),
        Quantity("change of the neighbour's memory", What.BYTES, 0, drift, 0),
    ]
    said = ["no lease came back"]
    if back:
        limit = allowed[What.LEASE_BACK].value
        quantities.append(Quantity("median until the lease is back", What.LEASE_BACK, 0, median(back), limit, True))
        worst = f" (median of {len(back)} kills, worst {max(back) / 1e6:.1f})" if len(back) > 1 else ""
        said = [f"lease back in {median(back) / 1e6:.1f} ms{worst}"]
    said.append(
        f"{format_bytes(kept)} of {format_bytes(held)} kept" if kept else f"all {format_bytes(held)} given back"
    )
    said.append("the neighbour stood still" if idle else "the neighbour went on")
    return Judged(", ".join(said), tuple(quantities))


# --- launches -----------------------------------------------------------------------------------------------------


def _launches(run: LaunchRun, delayed: LaunchRun, allowed: Tolerances) -> Check:
    return Check(
        LAUNCH,
        f"at most {allowed[What.LAUNCH].value:g} ns added to a launch, with nobody else there",
        _launches_judged(run, allowed),
        _launches_judged(delayed, allowed),
        f"with {PLANTED_DELAY_NS / 1000:g} µs planted",
        allowed[What.LAUNCH].reason,
    )


def _launches_judged(run: LaunchRun, allowed: Tolerances) -> Judged:
    """By the fastest tenth of the turns. Other programs on the host's cores can only make a turn longer."""
    direct = _fast(run.direct_ns)
    added = _fast(run.gated_ns) - direct
    quantities = (
        Quantity("added by the hook", What.LAUNCH, 0, round(added, 1), allowed[What.LAUNCH].value, at_most=True),
        Quantity("programs without the hook", What.COUNT, 0, 0 if run.hooked else 1, 0),
    )
    said = f"{added:+.0f} ns on {direct:.0f} ns"
    return Judged(said if run.hooked else "the program was not hooked", quantities)


def _fast(turns_ns: Sequence[float]) -> float:
    return sorted(turns_ns)[len(turns_ns) // 10]


# --- SMs ----------------------------------------------------------------------------------------------------------


def _sm_counts(runs: Sequence[SmRun], without: SmRun, allowed: Tolerances) -> Check:
    said = ", ".join(f"{run.planned} for {run.asked_percent:g} %" for run in runs)
    return Check(
        SMS,
        f"of {runs[0].total} SMs {said}, ± {allowed[What.SMS].value:g} (spatial mode)",
        _sms_judged(runs, allowed),
        _sms_judged([without], allowed),
        "in no vGPU",
        allowed[What.SMS].reason,
    )


def _sms_judged(runs: Iterable[SmRun], allowed: Tolerances) -> Judged:
    quantities = tuple(
        Quantity(f"SMs of {run.asked_percent:g} %", What.SMS, run.planned, run.driver, allowed[What.SMS].value)
        for run in runs
    )
    return Judged(f"{', '.join(f'{q.measured:g}' for q in quantities)} SMs by the driver's word", quantities)


# --- words --------------------------------------------------------------------------------------------------------


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def _percents(ratios: Iterable[float]) -> str:
    return " : ".join(f"{100 * ratio:.1f}" for ratio in ratios) + " %"


def _points(ratio: float) -> str:
    return f"{100 * ratio:g} point" + ("" if ratio == 0.01 else "s")
