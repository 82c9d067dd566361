"""doctor: the judgement on machines that lack one thing each, and a look at this one."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from client_hook.doctor import DriverFacts, Facts, Finding, Verdict, diagnose, probe, probe_driver
from client_hook.install import UserInstallation
from client_hook.reach import closed_to_others

DRIVER = DriverFacts("580.159", "", 1, "/lib/libcuda.so.1", "", ("NVIDIA H200",))
HEALTHY = Facts(
    machine="x86_64",
    kernel="6.8.0",
    glibc=(2, 39),
    seals_future_writes=True,
    opens_pidfds=True,
    memlock_bytes=-1,
    uid=1000,
    runtime_dir=Path("/run/user/1000/vgpu"),
    runtime_error="",
    state_dir=Path("/home/a/.local/state/vgpu"),
    state_error="",
    hook_error="",
    hook_hint="",
    simulation_built=True,
    user_hook="current",
    system_hook=False,
    mps_control="/usr/bin/nvidia-cuda-mps-control",
    foreign_mps="",
    driver=DRIVER,
)


def unhealthy(facts: Facts) -> list[Finding]:
    return [finding for finding in diagnose(facts) if finding.verdict is not Verdict.OK]


def test_a_healthy_machine_needs_nothing() -> None:
    assert unhealthy(HEALTHY) == []
    assert len(list(diagnose(HEALTHY))) >= 10


@pytest.mark.parametrize(
    ("change", "check", "verdict", "fix"),
    [
        ({"machine": "riscv64"}, "machine", Verdict.MISSING, "x86-64"),
        ({"seals_future_writes": False, "kernel": "4.18"}, "kernel", Verdict.MISSING, "5.1"),
        ({"opens_pidfds": False}, "pidfd", Verdict.MISSING, "5.3"),
        ({"glibc": (2, 17)}, "glibc", Verdict.MISSING, "2.28"),
        ({"memlock_bytes": 4096}, "locked memory", Verdict.MISSING, "ulimit -l"),
        ({"runtime_error": "/run is not writable"}, "runtime directory", Verdict.MISSING, "VGPU_RUNTIME_DIR"),
        ({"runtime_dir": Path("/tmp") / ("x" * 80)}, "runtime directory", Verdict.MISSING, "VGPU_RUNTIME_DIR"),
        ({"state_error": "/var is not writable"}, "state directory", Verdict.MISSING, "VGPU_STATE_DIR"),
        ({"hook_error": "it is not built", "hook_hint": "make build"}, "hook", Verdict.MISSING, "make build"),
        ({"user_hook": ""}, "installed hook", Verdict.NOTE, "vgpuctl hook install"),
        ({"user_hook": "stale"}, "installed hook", Verdict.NOTE, "vgpuctl hook install"),
        ({"mps_control": ""}, "MPS", Verdict.NOTE, "spatial mode"),
        ({"foreign_mps": "/tmp/nvidia-mps"}, "other MPS daemon", Verdict.NOTE, ""),
        ({"driver": replace(DRIVER, cuda_error="cuInit returns 100")}, "libcuda", Verdict.MISSING, "nvidia-smi"),
        ({"driver": replace(DRIVER, cuda_devices=0)}, "libcuda", Verdict.MISSING, "nvidia-smi"),
        ({"driver": replace(DRIVER, nvml_error="not found")}, "NVML", Verdict.MISSING, "libnvidia-ml"),
        ({"driver": replace(DRIVER, exclusive_gpus=(3,))}, "compute mode", Verdict.MISSING, "-i 3 -c DEFAULT"),
        ({"driver": replace(DRIVER, mig_gpus=(0,))}, "MIG", Verdict.NOTE, "-mig 0"),
        ({"uid": 0, "closed": "/root"}, "other users", Verdict.NOTE, "/usr/bin/python3 -m venv"),
        ({"driver": DriverFacts()}, "NVIDIA driver", Verdict.NOTE, "--simulate 1"),
    ],
)
def test_one_lack_is_one_finding_with_what_to_type(
    change: dict[str, object], check: str, verdict: Verdict, fix: str
) -> None:
    [finding] = unhealthy(replace(HEALTHY, **change))  # type: ignore[arg-type]
    assert (finding.check, finding.verdict) == (check, verdict)
    assert fix in finding.fix
    assert finding.found


def test_only_root_serves_others() -> None:
    assert unhealthy(replace(HEALTHY, closed="/home/a")) == []
    assert [one.found for one in diagnose(replace(HEALTHY, uid=0))][-1] == "can run this vgpuctl"


def test_an_interpreter_in_a_closed_home_is_found_through_its_link() -> None:
    with TemporaryDirectory(dir="/tmp") as place:  # pytest's own directories are closed to others
        home, opened = Path(place, "root"), Path(place, "opt")
        home.mkdir()
        opened.mkdir()
        (home / "python3").touch()
        (opened / "python3").symlink_to(home / "python3")
        for folder in (home.parent, home, opened):
            folder.chmod(0o755)
        assert closed_to_others([opened / "python3"]) is None
        home.chmod(0o700)
        assert closed_to_others([opened / "python3"]) == home


def test_the_hook_of_the_whole_system_counts_as_installed() -> None:
    assert unhealthy(replace(HEALTHY, user_hook="", system_hook=True)) == []


def test_whoever_uses_the_node_of_another_needs_no_directories() -> None:
    stranger = replace(HEALTHY, runtime_error="/run/vgpu is not writable", state_error="/nonexistent is not writable")
    assert unhealthy(replace(stranger, node_uid=0)) == []
    for uid in (None, stranger.uid):
        assert len(unhealthy(replace(stranger, node_uid=uid))) == 2


def test_a_machine_without_gpu_and_without_the_simulated_one_has_nothing_to_share() -> None:
    lacking = unhealthy(replace(HEALTHY, driver=DriverFacts(), simulation_built=False))
    assert [finding.check for finding in lacking] == ["NVIDIA driver", "simulated GPU"]


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    facts = probe(tmp_path / "run" / "vgpu", tmp_path, UserInstallation(tmp_path, tmp_path))
    assert facts.runtime_error == facts.state_error == ""
    assert facts.user_hook == ""
    assert facts.kernel
    assert facts.node_uid is None
    (tmp_path / "run" / "vgpu").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as node:
        node.bind(str(tmp_path / "run" / "vgpu" / "control.sock"))
        node.listen()
        assert probe(tmp_path / "run" / "vgpu", tmp_path, UserInstallation(tmp_path, tmp_path)).node_uid == os.getuid()
    unusable = probe(Path("/proc/vgpu"), tmp_path / "file" / "below", UserInstallation(tmp_path, tmp_path))
    assert "/proc" in unusable.runtime_error or unusable.runtime_error == ""  # root may write anywhere, by access(2)
    (tmp_path / "file").write_text("")
    blocked = probe(tmp_path / "file" / "below", tmp_path, UserInstallation(tmp_path, tmp_path))
    assert blocked.runtime_error == f"{tmp_path}/file is not a directory"


def test_the_driver_is_asked_without_what_a_vgpu_would_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that kills whoever loads it, and a stand-in driver: neither may reach the child that asks."""
    plain = probe_driver({"PATH": "/usr/bin:/bin"})
    disturbed = {
        "PATH": "/usr/bin:/bin",
        "VGPU_ID": "vgpu-1",
        "LD_PRELOAD": str(tmp_path / "x.so"),
        "VGPU_SIM_DIR": "/",
    }
    assert probe_driver(disturbed) == plain
