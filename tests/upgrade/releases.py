"""Releases of st-vgpu on one machine: this tree, and older commits, which the test builds from the repository."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "upgrade"
TESTS_OWN = ("nativelogic", "nativememory", "nativewire", "rehearsal")
"""Native modules of an older release that its programs do not import: a third of its build."""
PATIENCE_S = 60.0  # generous: only a hang takes that long


@dataclass(frozen=True, slots=True)
class Release:
    """The tree of one release, with its native code."""

    tree: Path

    @property
    def hook(self) -> Path:
        return self.tree / "cython_ext" / "lib" / "libvgpu_hook.so"

    @property
    def simulated_driver(self) -> Path:
        """The folder of its ``libcuda.so.1``."""
        return self.tree / "cython_ext" / "lib" / "sim"


THIS = Release(ROOT)


def release_of(commit: str) -> Release:
    """The release of ``commit``, built once per clone. Skips the test where the clone lacks the commit."""
    tree = BUILT / commit
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / f"{commit}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (tree / ".built").exists():
            shutil.rmtree(tree, ignore_errors=True)
            _unpack(commit, tree)
            for module in TESTS_OWN:
                (tree / "cython_ext" / f"{module}.pyx").unlink()
            shutil.copyfile(ROOT / "setup.py", tree / "setup.py")  # the same compilation, in half the time
            build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            made = subprocess.run(build, cwd=tree, capture_output=True, text=True, check=False)
            assert made.returncode == 0, made.stdout + made.stderr
            (tree / ".built").touch()
    return Release(tree)


def _unpack(commit: str, tree: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed: no older release can be unpacked")
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"this clone has no commit {commit}: git fetch --unshallow brings it")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tree, filter="data")


class Machine:
    """Runtime and state directories that outlive a release; its node and programs end with the context manager."""

    def __init__(self) -> None:
        # Not pytest's tmp_path: the path of a socket has 107 characters at most.
        self.directory = Path(tempfile.mkdtemp(prefix="vgpu-test-"))
        self.runtime = self.directory / "run"
        self.state = self.directory / "state"
        self.config = self.directory / "config.toml"
        self._started: list[subprocess.Popen[str]] = []
        self._serves: Release | None = None
        self.node_pid = 0

    def __enter__(self) -> Machine:
        return self

    def environment(self, release: Release) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VGPU_"))}
        return kept | {
            "PYTHONPATH": str(release.tree),
            "VGPU_ALLOW_PID_NAMESPACE": "1",
            "VGPU_CONFIG": str(self.config),
            "VGPU_RUNTIME_DIR": str(self.runtime),
            "VGPU_STATE_DIR": str(self.state),
        }

    def ask(self, release: Release, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``vgpuctl`` of ``release``, whatever comes of it."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "vgpu.ctl", *arguments],
            env=self.environment(release),
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def vgpuctl(self, release: Release, *arguments: str) -> str:
        """What ``vgpuctl`` of ``release`` prints; it has to succeed."""
        done = self.ask(release, *arguments)
        assert done.returncode == 0, f"{arguments}: {done.stderr}{self.logs()}"
        return done.stdout

    def create(self, release: Release, options: str) -> str:
        """The id of a new vGPU."""
        return self.vgpuctl(release, "create", *options.split()).strip()

    def readings(self, release: Release, *command: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.vgpuctl(release, *command, "-o", "json"))
        return found

    def vgpus(self, release: Release) -> dict[str, dict[str, Any]]:
        """By name."""
        return {vgpu["name"]: vgpu for vgpu in self.readings(release, "ls")}

    def serve(self, release: Release) -> None:
        said = self.vgpuctl(release, "serve", "--detach")
        self.node_pid = int(said.split()[1])
        self._serves = release

    def stop(self) -> None:
        assert self._serves is not None
        self.vgpuctl(self._serves, "stop")
        self._serves = None

    def workload(self, release: Release, vgpu_id: str, seconds: float, **environment: str) -> Workload:
        """The sample program of ``release`` in a vGPU, under its hook and its simulated driver, unless ``environment``
        has others."""
        preloaded = {
            "VGPU_ID": vgpu_id,
            "VGPU_SIM_DIR": str(self.runtime / "sim"),
            "LD_PRELOAD": str(release.hook),
            "LD_LIBRARY_PATH": str(release.simulated_driver),
        }
        return Workload(self, self.environment(release) | preloaded | environment, seconds)

    def popen(self, argv: list[str], environment: Mapping[str, str], output: Path) -> subprocess.Popen[str]:
        with output.open("wb") as file:
            self._started.append(
                subprocess.Popen(argv, env=environment, cwd=self.directory, stdout=file, stderr=file, text=True)
            )
        return self._started[-1]

    def logs(self) -> str:
        return "".join(f"\n== {file.name}\n{file.read_text()[-4000:]}" for file in sorted(self.state.glob("logs/*")))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for started in self._started:
            started.kill()
            started.wait()
        if self._serves is not None:
            self.ask(self._serves, "stop")
        shutil.rmtree(self.directory, ignore_errors=True)


class Workload:
    """A running ``python -m vgpu.workload``, which reports what it has finished once a second."""

    def __init__(self, machine: Machine, environment: Mapping[str, str], seconds: float) -> None:
        self._output = machine.directory / f"workload-{time.monotonic_ns()}"
        argv = [sys.executable, "-P", "-m", "vgpu.workload", "--seconds", str(seconds), "-o", "json"]
        self._process = machine.popen(argv, environment, self._output)

    @property
    def said(self) -> str:
        return self._output.read_text()

    def _events(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in self.said.splitlines(keepends=True) if line.startswith("{") and "\n" in line
        ]

    def finished(self) -> int:
        """Kernels, by its latest report."""
        return max((event.get("kernels", 0) for event in self._events()), default=0)

    def goes_on(self) -> None:
        """It finishes more than it had."""
        before, deadline = self.finished(), time.monotonic() + PATIENCE_S
        while self.finished() <= before:
            assert self._process.poll() is None, self.said
            assert time.monotonic() < deadline, f"the program finished {before} kernels, and none in {PATIENCE_S:g} s"
            time.sleep(0.1)

    def result(self) -> dict[str, Any]:
        """Its last report; it has to end well."""
        assert self._process.wait(PATIENCE_S) == 0, self.said
        return self._events()[-1]
