"""The judgement on nodes of which one thing each is wrong, on nodes that are silent, and on their unit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from client_hook.doctor import Finding, Verdict
from tests.ctl.fake_node import gpu_reading, node_status, process_reading, vgpu_reading
from vgpu.node.health import Health, NoAnswer, Unit, diagnose, quantile_ns, service, silent
from vgpu.protocol.messages import OutsideProcess, ProcessReading
from vgpu.protocol.meters import GpuMeters, Histogram
from vgpu.spec import VgpuSpec

ID = "vgpu-0a1b2c3d"
QUIET = Histogram(bounds_ns=(10**6, 10**8), counts=(1000, 0, 0), sum_ns=1)
LATE = Histogram(bounds_ns=(10**6, 10**8), counts=(900, 100, 0), sum_ns=1)
WELL = Health(
    status=node_status(software="1"),
    software="1",
    vgpus=(vgpu_reading(),),
    processes=(ProcessReading.model_validate(process_reading()),),
    meters=(GpuMeters(gpu_index=0, handovers=QUIET, loop_lag=QUIET),),
    folders=(ID,),
    vgpu_id=ID,
)
OUTSIDE = OutsideProcess(gpu_index=0, pid=7, uid=0, command="python", memory_bytes=1 << 30)


def unwell(health: Health) -> list[Finding]:
    return [finding for finding in diagnose(health) if finding.verdict is not Verdict.OK]


def gpu(**changes: Any) -> dict[str, Any]:
    return {"status": node_status(software="1", gpus=[gpu_reading(**changes)])}


def vgpu(**changes: Any) -> dict[str, Any]:
    return {"vgpus": (vgpu_reading(**changes),)}


def test_a_node_that_is_well_needs_nothing() -> None:
    assert unwell(WELL) == []
    [found] = diagnose(WELL)
    assert (found.check, found.verdict) == ("node", Verdict.OK)
    assert "1 GPU, 1 vGPU" in found.found


@pytest.mark.parametrize(
    ("owned_gib", "verdict", "fix"), [(150, Verdict.OK, ""), (190, Verdict.NOTE, "vgpuctl serve --host-memory 65G")]
)
def test_what_is_swapped_fits_the_host_and_the_gpu_or_not(owned_gib: int, verdict: Verdict, fix: str) -> None:
    """Of the GPU's 141 GiB 16 are promised, and the host has 32."""
    swapped = vgpu_reading(
        spec=VgpuSpec(sm_percent=30, memory_bytes="100G", oversubscribe="swap"), memory_limit_bytes=owned_gib << 30
    )
    health = replace(WELL, vgpus=(swapped,), **gpu(host_memory_limit_bytes=32 << 30, host_memory_bytes=2 << 30))
    _, found = diagnose(health)
    assert (found.check, found.verdict) == ("GPU 0", verdict)
    assert found.found.startswith(f"vGPUs that are swapped may own {owned_gib} GiB; for them the host has 32 GiB")
    assert fix in found.fix


@pytest.mark.parametrize(
    ("change", "check", "verdict", "fix"),
    [
        ({"software": "2"}, "version", Verdict.NOTE, "vgpuctl stop"),
        (gpu(state="failed", reason="no NVML"), "GPU 0", Verdict.MISSING, "vgpuctl logs gpu 0"),
        (gpu(restarts=3), "GPU 0", Verdict.NOTE, "--level warning"),
        (gpu(mode="spatial", mps_reason="no such file"), "GPU 0", Verdict.MISSING, "--mode temporal"),
        (gpu(mode="spatial", mps_pid=9, mps_restarts=1), "GPU 0", Verdict.NOTE, "--kind mps-lost"),
        (gpu(outside=(OUTSIDE,)), "GPU 0", Verdict.NOTE, "vgpuctl ps --all"),
        ({"meters": (GpuMeters(gpu_index=1, handovers=QUIET, loop_lag=LATE),)}, "GPU 1", Verdict.NOTE, "top"),
        (vgpu(state="failed", reason="x"), ID, Verdict.MISSING, f"vgpuctl inspect {ID}"),
        (vgpu(state="waiting", waiting_ns=2 * 10**9, held_ratio=0.1), ID, Verdict.NOTE, "vgpuctl trace"),
        (vgpu(warnings=("MPS is gone",)), ID, Verdict.NOTE, f"vgpuctl inspect {ID}"),
        (
            {"processes": (ProcessReading.model_validate(process_reading(memory_drift_bytes=1 << 30)),)},
            ID,
            Verdict.NOTE,
            "--kind drift",
        ),
        ({"folders": (ID, "vgpu-99999999")}, "leftovers", Verdict.NOTE, "rm -r /run/vgpu/vgpus/vgpu-99999999"),
        ({"vgpu_id": f"{ID},vgpu-77777777"}, "VGPU_ID", Verdict.NOTE, "unset VGPU_ID"),
    ],
)
def test_one_thing_that_is_wrong_is_one_finding_with_what_to_type(
    change: dict[str, Any], check: str, verdict: Verdict, fix: str
) -> None:
    [finding] = unwell(replace(WELL, **change))
    assert (finding.check, finding.verdict) == (check, verdict)
    assert fix in finding.fix
    assert finding.found


@pytest.mark.parametrize(
    "change",
    [
        vgpu(state="waiting", waiting_ns=2 * 10**9, held_ratio=0.29),  # it has its share, and wants on
        vgpu(state="waiting", waiting_ns=2 * 10**9, held_ratio=0.1, throttled=True),
        vgpu(state="waiting", waiting_ns=10**8, held_ratio=0.0),  # it has just begun to want
        {**gpu(state="restarting", restarts=0), "folders": (ID, "vgpu-99999999")},  # it may know it in a moment
        gpu(outside=(OUTSIDE,), vgpus=0),  # nobody shares that GPU
        {"meters": ()},
        {
            "meters": (
                GpuMeters(gpu_index=1, handovers=QUIET, loop_lag=Histogram(bounds_ns=(1,), counts=(0, 9), sum_ns=1)),
            )
        },
        {"vgpu_id": ""},
    ],
)
def test_what_is_as_it_should_be(change: dict[str, Any]) -> None:
    assert [finding for finding in unwell(replace(WELL, **change)) if "restarting" not in finding.found] == []


def test_quantiles_are_bounds() -> None:
    assert quantile_ns(Histogram(bounds_ns=(1, 2), counts=(0, 0, 0), sum_ns=0), 0.5) is None
    assert quantile_ns(LATE, 0.9) == 10**6
    assert quantile_ns(LATE, 0.99) == 10**8
    assert quantile_ns(Histogram(bounds_ns=(1, 2), counts=(0, 0, 5), sum_ns=9), 0.5) == 1 << 62


@pytest.mark.parametrize(
    ("silence", "found", "fix"),
    [
        (NoAnswer("no node", "vgpuctl serve"), [], ""),
        (NoAnswer("late", "x", locked=True), ["holds its lock"], "vgpuctl logs node"),
        (NoAnswer("no node", "x", servers=(0, 2)), ["GPU 0, 2 go on"], "takes them over"),
        (
            NoAnswer("no node", "x", sockets=("/a",), folders=(ID, ID)),
            ["1 socket of servers, 2 of vGPUs"],
            "uses them again",
        ),
    ],
)
def test_a_node_that_does_not_answer(silence: NoAnswer, found: list[str], fix: str) -> None:
    first, *more = silent(silence)
    assert (first.check, first.found, first.fix) == ("node", silence.message, silence.hint)
    assert len(more) == len(found)
    for finding, words in zip(more, found, strict=True):
        assert words in finding.found
        assert fix in finding.fix


@pytest.mark.parametrize(
    ("unit", "answers", "verdict", "fix"),
    [
        (Unit("active", "running", "enabled"), True, Verdict.OK, ""),
        (Unit("failed", "failed", "enabled", "exit-code"), False, Verdict.MISSING, "journalctl -u vgpu, then sudo "),
        (Unit("failed", "failed", "enabled", "timeout", "--user"), False, Verdict.MISSING, "journalctl --user -u vgpu"),
        (Unit("inactive", "dead", "disabled"), False, Verdict.NOTE, "sudo systemctl enable --now vgpu"),
        (Unit("inactive", "dead", "disabled", manager="--user"), False, Verdict.NOTE, "systemctl --user enable --now"),
        (Unit("inactive", "dead", "disabled"), True, Verdict.NOTE, "vgpuctl stop"),
    ],
)
def test_the_unit(unit: Unit, answers: bool, verdict: Verdict, fix: str) -> None:
    [finding] = service(unit, answers=answers)
    assert (finding.check, finding.verdict) == ("service", verdict)
    assert fix in finding.fix


def test_no_unit_is_no_finding() -> None:
    assert list(service(None, answers=True)) == []
