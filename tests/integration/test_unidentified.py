"""A node in a PID namespace of its own, which the kernel cannot name programs of other ones to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.integration.node import ROOT
from vgpu.ctl.exit_codes import Exit

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

pytestmark = pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0,
    reason="no PID namespaces for this user",
)


def inside(directory: Path, script: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A shell script in a PID namespace of its own, with ``vgpuctl`` as a function, and a node's directories."""
    own = {"VGPU_RUNTIME_DIR": str(directory / "run"), "VGPU_STATE_DIR": str(directory / "state")}
    kept = {name: value for name, value in os.environ.items() if name != "VGPU_ALLOW_PID_NAMESPACE"}
    return subprocess.run(
        [*UNSHARE, "sh", "-c", f'vgpuctl() {{ "{sys.executable}" -m vgpu.ctl "$@"; }}; {script}'],
        env=kept | own | {"PYTHONPATH": str(ROOT)} | more,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_is_refused_with_what_to_do(tmp_path: Path) -> None:
    refused = inside(tmp_path, "vgpuctl serve --simulate 1 --detach")
    assert refused.returncode == Exit.REFUSED, refused.stderr
    assert "PID namespace" in refused.stderr
    assert "--pid host" in refused.stderr
    assert "hostPID: true" in refused.stderr
    assert not (tmp_path / "run").exists(), "a refused node leaves nothing behind"


def test_doctor_names_it(tmp_path: Path) -> None:
    found = inside(tmp_path, "vgpuctl doctor")
    [line] = [line for line in found.stdout.splitlines() if "PID namespace" in line]
    assert "missing" in line


def test_it_serves_its_own_namespace_where_that_is_allowed() -> None:
    script = "vgpuctl serve --simulate 1 --detach >&2 && vgpuctl run --sm 30 --mem 1G -- echo inside; vgpuctl stop >&2"
    with TemporaryDirectory(prefix="vgpu-test-") as directory:  # not tmp_path: a socket's path has 107 characters
        done = inside(Path(directory), script, VGPU_ALLOW_PID_NAMESPACE="1")
    assert done.stdout == "inside\n", done.stderr
