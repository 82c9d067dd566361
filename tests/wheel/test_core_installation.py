"""The wheel in an empty virtual environment, without an extra: its size, and a limited program on the simulated GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from client_hook import interpreter
from tests.interpreter.places import site_packages
from tests.wheel.test_wheel import wheel

__all__ = ["wheel"]

pytestmark = pytest.mark.slow

MOST_BYTES = 42_000_000
NOT_OURS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")
"""What ``python -m venv`` puts there."""


@pytest.fixture(scope="module")
def prefix(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core")
    clean = interpreter.environment(os.environ)  # byte code counts, and lies beside its source
    subprocess.run([sys.executable, "-m", "venv", str(folder)], env=clean, check=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--retries", "0", str(wheel)]
    installed = subprocess.run(command, env=clean, capture_output=True, text=True, check=False, timeout=240)
    if installed.returncode:
        pytest.skip(f"pip's index does not answer: {installed.stderr.strip()[-200:]}")
    return folder


class Installation:
    def __init__(self, prefix: Path, folder: Path) -> None:
        self.prefix = prefix
        self.folder = folder
        self.environment = interpreter.environment(os.environ) | {
            "VGPU_RUNTIME_DIR": str(folder / "run"),
            "VGPU_STATE_DIR": str(folder / "state"),
            "PATH": f"{prefix / 'bin'}:{os.environ['PATH']}",
        }

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [str(self.prefix / "bin" / "vgpuctl"), *arguments]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        return done


@pytest.fixture
def core(prefix: Path) -> Iterator[Installation]:
    with tempfile.TemporaryDirectory(prefix="core-", dir="/tmp") as folder:  # a socket's path has 107 characters
        made = Installation(prefix, Path(folder))
        made.run("serve", "--simulate", "1", "--detach")
        yield made
        made.run("stop")


def test_it_is_small(prefix: Path) -> None:
    place = site_packages(prefix)
    files = [file for file in place.rglob("*") if file.is_file() and not file.is_symlink()]
    sizes = {file: file.stat().st_size for file in files if not file.relative_to(place).parts[0].startswith(NOT_OURS)}
    assert sum(sizes.values()) < MOST_BYTES, sum(sizes.values())


def test_a_program_is_limited(core: Installation) -> None:
    vgpu = core.run("create", "--sm", "30", "--mem", "2G", "--name", "kept").stdout.strip()
    said = core.run("run", "--sm", "30", "--mem", "2G", "--", "python", "-m", "vgpu.workload", "--seconds", "2").stdout
    assert "%" in said
    listed = json.loads(core.run("ls", "-o", "json").stdout)
    assert [one["vgpu_id"] for one in listed] == [vgpu]
    core.run("set", "kept", "--sm", "50")
    core.run("inspect", "kept")
    core.run("ps")
    core.run("top", "--once")
    core.run("rm", "kept")
    core.run("verify", "--quick", "--simulate", "--only", "memory-limit")
    core.run("doctor")


def test_import_vgpu(core: Installation) -> None:
    code = "import vgpu\nwith vgpu.create(sm=10, mem='1G') as v: print(v.stats().metrics()['vgpu/memory_limit_bytes'])"
    command = [str(core.prefix / "bin" / "python"), "-c", code]
    done = subprocess.run(command, env=core.environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(float(1 << 30))), done.stderr


def test_what_it_lacks_is_named(core: Installation) -> None:
    for command, extra in (("dashboard", "web"), ("metrics", "metrics"), ("trace --png p.png", "plot")):
        said = core.run(*command.split(), code=1).stderr
        assert f'pip install "st-vgpu[{extra}]"' in said
