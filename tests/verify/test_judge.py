"""Measurements in, checks out: what passes, what fails, and that a control which holds is told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verify import findings
from vgpu.protocol.messages import OutsideProcess
from vgpu.verify.judge import KILL, LAUNCH, LIGHT, MEMORY, NAMES, SMS, Check, checks, chosen
from vgpu.verify.measured import (
    BIN_NS,
    Evidence,
    Interval,
    LightRun,
    ShareRun,
    SmRun,
    finished_in,
    series_of,
    stamped_ratio,
)
from vgpu.verify.outcome import Outcome
from vgpu.verify.plan import Plan
from vgpu.verify.run import Findings
from vgpu.verify.tolerances import What, tolerances

REAL = tolerances(simulated=False, quick=False)


def judged(evidence: Evidence) -> dict[str, Check]:
    return {check.name: check for check in checks(evidence, REAL)}


def outcome(evidence: Evidence, *others: OutsideProcess) -> Outcome:
    found = Findings(findings.gpu(), others, evidence, 51.23)
    return Outcome.of(Plan("A simulated GPU, as asked for", quick=True), found, {"command": "vgpuctl verify"})


def test_a_good_gpu_keeps_every_promise_and_fails_every_control() -> None:
    found = judged(findings.good())
    assert list(found) == ["share-30-alone", "share-30-70", LIGHT, MEMORY, KILL, LAUNCH, SMS]
    assert [(check.verdict, check.control) for check in found.values()] == [("pass", True)] * len(found)


def test_the_json_object_is_the_documented_one() -> None:
    said = json.loads(json.dumps(outcome(findings.good()).as_json(), allow_nan=False))
    assert said["simulated"] is True
    for check in said["checks"]:
        assert {"name", "promised", "measured", "verdict", "control"} <= set(check)
        assert check["verdict"] in {"pass", "fail"}
        assert check["control"] is True
    assert (said["not_checked"], said["others"], said["quick"], said["seconds"]) == ([], [], True, 51.2)


def test_what_is_not_kept_is_named() -> None:
    evidence = findings.good()
    evidence.memory = findings.memory(pieces=784)
    told = outcome(evidence)
    assert not told.proven
    assert told.headline() == "Not kept: memory-limit."
    assert outcome(findings.good()).proven


def test_a_control_that_holds_makes_its_check_worth_nothing() -> None:
    evidence = findings.good()
    evidence.delayed_launches = findings.launches(20.0)
    told = outcome(evidence)
    (check,) = [check for check in told.checks if check.name == LAUNCH]
    assert (check.verdict, check.control) == ("pass", False)
    assert not told.proven
    assert "show nothing: launch-overhead" in told.headline()


def test_nothing_that_was_checked_proves_nothing() -> None:
    evidence = Evidence(not_checked={SMS: "there is no MPS daemon"})
    told = outcome(evidence)
    assert not told.proven
    assert told.sentences() == ["Not checked: sm-count: there is no MPS daemon.", "Nothing could be checked here."]


def test_a_measurement_that_failed_is_a_check_that_failed() -> None:
    evidence = findings.good()
    evidence.failed[KILL] = "the workload failed: CUDA_ERROR_UNKNOWN"
    evidence.killed = []
    check = judged(evidence)[KILL]
    assert (check.verdict, check.control) == ("fail", False)
    assert "CUDA_ERROR_UNKNOWN" in check.judged.measured


def test_others_on_the_gpu_are_named() -> None:
    other = OutsideProcess(gpu_index=0, pid=77, uid=5, command="python", memory_bytes=1)
    assert "python (77)" in outcome(findings.good(), other).sentences()[0]


# --- shares


@given(st.sampled_from([10.0, 30.0, 70.0]), st.floats(-0.1, 0.1))
def test_a_share_alone_passes_within_a_point_of_gpu_time(percent: float, off: float) -> None:
    name = f"share-{percent:g}-alone"
    run = findings.alone(percent, percent / 100 + off, percent / 100)
    evidence = Evidence(shares={name: run}, unlimited_shares={name: findings.alone(100.0, 1.0)})
    (check,) = checks(evidence, REAL)
    if abs(abs(off) - 0.01) > 1e-4:  # else rounding decides
        assert (check.verdict == "pass") is (abs(off) < 0.01)
    assert check.control


def test_a_share_alone_is_not_judged_by_work() -> None:
    """30 % of the time alone finish 38 % of the work where the clock depends on the power."""
    run = ShareRun((replace(findings.program(30.0, ratio=0.3), work_per_s=1e12),))
    evidence = Evidence(shares={"share-30-alone": run}, unlimited_shares={"share-30-alone": findings.alone(100.0, 1.0)})
    assert checks(evidence, REAL)[0].verdict == "pass"


@pytest.mark.parametrize(
    ("work", "time", "verdict"),
    [
        ((300.0, 700.0), (0.3, 0.69), "pass"),
        ((320.0, 680.0), (0.3, 0.69), "fail"),  # the work is off
        ((300.0, 700.0), (0.33, 0.66), "fail"),  # the time is off
        ((300.0, 700.0), (0.27, 0.63), "fail"),  # the GPU was idle for a tenth of the time
    ],
)
def test_in_company_both_work_and_time_are_judged(
    work: tuple[float, float], time: tuple[float, float], verdict: str
) -> None:
    evidence = findings.good()
    evidence.shares["share-30-70"] = ShareRun(
        (
            findings.program(30.0, ratio=time[0], work=work[0]),
            findings.program(70.0, ratio=time[1], work=work[1]),
        )
    )
    assert judged(evidence)["share-30-70"].verdict == verdict


# --- memory, kills, launches, SMs


@pytest.mark.parametrize(
    "wrong",
    [
        {"total_bytes": 2048 * findings.MIB + 1},
        {"pieces": 784},
        {"pieces": 782, "left_bytes": 3 * findings.MIB},
        {"left_bytes": 0},
        {"freed_bytes": 1565 * findings.MIB},
        {"refusal": "CUDA_ERROR_UNKNOWN"},
        {"refusal": ""},
    ],
)
def test_memory_is_exact(wrong: dict[str, object]) -> None:
    evidence = findings.good()
    evidence.memory = findings.memory(**wrong)
    assert judged(evidence)[MEMORY].verdict == "fail"


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease_back_ns": 30 * findings.MS},
        {"lease_back_ns": None},
        {"kept_bytes": 1},
        {"neighbour_bytes": (5, 6)},
        {"neighbour_work": 0.0},
    ],
)
def test_after_a_kill_everything_is_back(wrong: dict[str, object]) -> None:
    evidence = findings.good()
    evidence.killed = [findings.killed(**wrong)]
    check = judged(evidence)[KILL]
    assert check.verdict == "fail"
    json.dumps(check.as_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("added_ns", "hooked", "verdict"),
    [(99.0, True, "pass"), (-5.0, True, "pass"), (101.0, True, "fail"), (0.0, False, "fail")],
)
def test_what_the_gate_adds(added_ns: float, hooked: bool, verdict: str) -> None:
    evidence = findings.good()
    evidence.launches = findings.launches(added_ns, hooked=hooked)
    assert judged(evidence)[LAUNCH].verdict == verdict


@pytest.mark.parametrize(("answered", "verdict"), [(1200.0, "pass"), (901.0, "pass"), (899.0, "fail"), (0.0, "fail")])
def test_light_programs_answer_what_they_do_without_vgpus(answered: float, verdict: str) -> None:
    evidence = findings.good()
    evidence.light = LightRun(answered, 1000.0)
    assert judged(evidence)[LIGHT].verdict == verdict
    evidence.light = LightRun(answered, 0.0)
    assert judged(evidence)[LIGHT].verdict == "fail", "no program was measured"


@pytest.mark.parametrize(("driver", "verdict"), [(38, "pass"), (42, "pass"), (43, "fail"), (132, "fail")])
def test_sms_are_those_planned(driver: int, verdict: str) -> None:
    evidence = findings.good()
    evidence.sms = [SmRun(30.0, 132, 40, driver)]
    assert judged(evidence)[SMS].verdict == verdict


# --- what is chosen


def test_checks_are_chosen_by_the_beginning_of_their_names() -> None:
    assert chosen([]) == NAMES
    assert set(NAMES) - set(chosen([], quick=True)) == {"share-10-30-60"}
    assert chosen(["share-10-30"], quick=True) == ("share-10-30-60",)
    assert chosen(["mem", "share-30"]) == ("share-30-alone", "share-30-70", MEMORY)
    with pytest.raises(ValueError, match="'speed' is no check: there are share-10-alone"):
        chosen(["speed"])


@pytest.mark.parametrize(("quick", "most_s"), [(True, 60), (False, 180)])
@pytest.mark.parametrize("simulated", ["asked", ""])
def test_it_is_planned_to_take_no_longer_than_was_said(quick: bool, most_s: float, simulated: str) -> None:
    assert sum(Plan(simulated, quick, chosen([], quick=quick)).seconds().values()) <= most_s


def test_every_tolerance_has_its_reason() -> None:
    for simulated in (True, False):
        for quick in (True, False):
            allowed = tolerances(simulated=simulated, quick=quick)
            assert set(allowed) == set(What)
            assert all(tolerance.reason for tolerance in allowed.values())


# --- what the stamps of kernels say

kernel_lists = st.lists(st.tuples(st.integers(0, 10**8), st.integers(1, 10**8)), min_size=1, max_size=40)


def in_order(steps: list[tuple[int, int]]) -> list[Interval]:
    """Gaps and lengths, as kernels one after the other."""
    kernels, at_ns = [], 0
    for gap_ns, length_ns in steps:
        kernels.append((at_ns + gap_ns, at_ns + gap_ns + length_ns))
        at_ns += gap_ns + length_ns
    return kernels


@given(kernel_lists, st.integers(0, 10**9), st.integers(1, 10**10))
def test_gpu_time_is_a_part_of_the_window(steps: list[tuple[int, int]], begin_ns: int, length_ns: int) -> None:
    kernels = in_order(steps)
    assert 0.0 <= stamped_ratio(kernels, begin_ns, begin_ns + length_ns) <= 1.0 + 1e-9
    whole_ns = sum(end - begin for begin, end in kernels)
    assert stamped_ratio(kernels, 0, kernels[-1][1]) == pytest.approx(whole_ns / kernels[-1][1])


@given(kernel_lists, st.integers(1, 8))
def test_a_series_has_all_the_work_of_its_window(steps: list[tuple[int, int]], bins: int) -> None:
    kernels = in_order(steps)
    found = series_of(kernels, 0, bins * BIN_NS)
    assert len(found) == bins
    assert sum(found) == pytest.approx(finished_in(kernels, 0, bins * BIN_NS))
    assert finished_in(kernels, 0, kernels[-1][1]) == pytest.approx(len(kernels))
