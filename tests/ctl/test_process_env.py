"""doctor on shells and machines that have one oddity each, and a look at this one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client_hook.doctor import Finding, Verdict
from client_hook.process_env import Preloaded, Surroundings, diagnose, probe

WELL = Surroundings(preloaded=(Preloaded("/h/libvgpu_hook.so", "current"),), free_bytes=10 << 30)
OURS = "/h/libvgpu_hook.so"


def unwell(found: Surroundings) -> list[Finding]:
    return [finding for finding in diagnose(found) if finding.verdict is not Verdict.OK]


def test_nothing_odd_is_nothing_to_do() -> None:
    assert unwell(WELL) == []
    assert unwell(replace(WELL, open_files=-1, log_level="INFO", free_bytes=None)) == []
    assert unwell(replace(WELL, simulation="/run/sim", vgpu_id="vgpu-1")) == []


@pytest.mark.parametrize(
    ("change", "check", "verdict", "fix"),
    [
        ({"open_files": 256}, "open files", Verdict.NOTE, "ulimit -n 1024"),
        ({"open_files": 256, "open_files_hard": 512}, "open files", Verdict.NOTE, "limits.conf"),
        ({"container": "docker"}, "container", Verdict.NOTE, "mount"),
        ({"foreign_pid_namespace": True}, "PID namespace", Verdict.MISSING, "--pid host"),
        (
            {"foreign_pid_namespace": True, "pid_namespace_allowed": True},
            "PID namespace",
            Verdict.NOTE,
            "VGPU_ALLOW_PID_NAMESPACE=1",
        ),
        ({"clock_offset_s": 0.2}, "clock", Verdict.NOTE, "unshare"),
        ({"clock_offset_s": -86400.0}, "clock", Verdict.MISSING, "unshare"),
        ({"preloaded": (Preloaded(OURS, "gone"),)}, "preloaded hook", Verdict.NOTE, "unset LD_PRELOAD"),
        ({"preloaded": (Preloaded(OURS, "stale"),)}, "preloaded hook", Verdict.NOTE, "vgpuctl hook install"),
        ({"system_hook": "current"}, "preloaded hook", Verdict.NOTE, "vgpuctl hook uninstall"),
        ({"system_hook": "gone", "preloaded": ()}, "system hook", Verdict.MISSING, "uninstall --system"),
        ({"system_hook": "stale", "preloaded": ()}, "system hook", Verdict.NOTE, "install --system"),
        ({"simulation": "/gone", "simulation_there": False}, "simulated GPUs", Verdict.NOTE, "unset VGPU_SIM_DIR"),
        ({"simulation": "/run/sim"}, "simulated GPUs", Verdict.NOTE, "unset VGPU_SIM_DIR"),
        ({"log_level": "debug"}, "log level", Verdict.NOTE, "unset VGPU_LOG_LEVEL"),
        ({"free_bytes": 100 << 20}, "disk", Verdict.NOTE, "df -h"),
        ({"free_bytes": 1 << 20}, "disk", Verdict.MISSING, "df -h"),
    ],
)
def test_one_oddity_is_one_finding_with_what_to_type(
    change: dict[str, Any], check: str, verdict: Verdict, fix: str
) -> None:
    [finding] = unwell(replace(WELL, **change))
    assert (finding.check, finding.verdict) == (check, verdict)
    assert fix in finding.fix
    assert finding.found


def test_what_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loadable: Path) -> None:
    monkeypatch.setattr("client_hook.process_env.hook_library", lambda: loadable)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/timens_offsets").write_text("monotonic           -5         500000000\nboottime  0  0\n")
    (tmp_path / "etc").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.containerenv").touch()
    gone, stale, current = (tmp_path / name / "libvgpu_hook.so" for name in ("gone", "stale", "current"))
    for path, content in ((stale, b"old"), (current, loadable.read_bytes())):
        path.parent.mkdir()
        path.write_bytes(content)
    (tmp_path / "etc/ld.so.preload").write_text(f"# ours\n{stale}\n")
    environment = {
        "LD_PRELOAD": f"{gone}:/lib/other.so {current}:{stale}",
        "VGPU_ID": "vgpu-1",
        "VGPU_SIM_DIR": str(tmp_path / "none"),
        "VGPU_LOG_LEVEL": "debug",
    }
    found = probe(tmp_path / "not" / "there", environment, tmp_path)
    assert [(one.path, one.state) for one in found.preloaded] == [
        (str(gone), "gone"),
        (str(current), "current"),
        (str(stale), "stale"),
    ]
    assert (found.system_hook, found.container, found.clock_offset_s) == ("stale", "podman", -4.5)
    assert (found.simulation_there, found.vgpu_id, found.log_level) == (False, "vgpu-1", "debug")
    assert found.free_bytes is not None
    assert found.free_bytes > 0
    plain = probe(tmp_path, {}, tmp_path / "empty")
    assert (plain.preloaded, plain.system_hook, plain.container, plain.clock_offset_s) == ((), "", "", 0.0)
    assert probe(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path).container == "kubernetes"
