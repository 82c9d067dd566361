"""Without an optional package, a command ends with one sentence and pip's line; everything else works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from client_hook import interpreter
from vgpu import extras
from vgpu.ctl.exit_codes import Exit

ROOT = Path(__file__).parents[2]
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""
RUN = "from vgpu.ctl.main import run; sys.exit(run(sys.argv[1:]))"
EVERY = sorted({module for modules in extras.MODULES.values() for module in modules} | {"psutil"})
"""Modules that a core installation may lack."""


def without(blocked: list[str], folder: Path, *arguments: str, code: str = RUN) -> subprocess.CompletedProcess[str]:
    """A program that runs in ``folder`` and cannot import ``blocked``."""
    environment = interpreter.environment(os.environ) | {"VGPU_RUNTIME_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BLOCKED.format(blocked=blocked) + code, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("blocked", "command", "sentence", "extra"),
    [
        ("fastapi", "dashboard --token-file t", "dashboard needs fastapi, which is not installed", "web"),
        ("jinja2", "verify --report r.html", "verify --report needs jinja2, which is not installed", "web"),
        (
            "prometheus_client",
            "metrics -o m.prom",
            "metrics needs prometheus_client, which is not installed",
            "metrics",
        ),
        (
            "fastapi hypercorn",
            "metrics --listen 127.0.0.1:0",
            "metrics --listen needs fastapi and hypercorn, which are not installed",
            "metrics",
        ),
        (
            "swagger_ui_bundle fastapi hypercorn prometheus_client",
            "dashboard",
            "dashboard needs fastapi, hypercorn, prometheus_client and swagger_ui_bundle, which are not installed",
            "web",
        ),
    ],
)
def test_a_command_says_what_to_install_and_does_nothing(
    tmp_path: Path, blocked: str, command: str, sentence: str, extra: str
) -> None:
    done = without(blocked.split(), tmp_path, *command.split())
    assert done.stderr.splitlines() == [f"vgpuctl: {sentence}", f'  → pip install "st-vgpu[{extra}]"']
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (Exit.FAILURE, "", [])


def test_top_says_what_to_install(tmp_path: Path) -> None:
    code = "from vgpu.ctl.observe import top; from vgpu.ctl.exit_codes import report\n"
    code += "try: top._show(1.0)\nexcept Exception as error: sys.exit(report(error))"
    done = without(["textual"], tmp_path, code=code)
    said = ["vgpuctl: top needs textual, which is not installed", '  → pip install "st-vgpu[top]"']
    assert (done.returncode, done.stderr.splitlines()) == (Exit.FAILURE, said)


def test_vgpu_aio_is_an_import_error_with_the_line_for_pip(tmp_path: Path) -> None:
    code = "import vgpu\ntry: import vgpu.aio\nexcept ImportError as error: print(error)"
    done = without(["anyio"], tmp_path, code=code)
    assert done.stdout.strip() == 'vgpu.aio needs anyio, which is not installed; pip install "st-vgpu[aio]"'


def test_a_unit_is_not_installed_where_its_command_cannot_run(tmp_path: Path) -> None:
    done = without(["fastapi"], tmp_path, "systemd", "install", "vgpu-metrics")
    assert done.stderr.splitlines()[-1] == '  → pip install "st-vgpu[metrics]"'
    assert done.returncode == Exit.FAILURE


def test_the_rest_imports_none_of_them(tmp_path: Path) -> None:
    """Every module of a core installation, and ``vgpuctl`` itself."""
    code = """
import importlib, pathlib
import vgpu
root = pathlib.Path(vgpu.__file__).parents[1]
needing = ("vgpu/web/", "vgpu/top/", "vgpu/metrics/", "vgpu/testing/", "vgpu/integrations/")
alone = {"vgpu/http/serving.py", "vgpu/http/links.py", "vgpu/trace/picture.py", "vgpu/verify/report.py", "vgpu/aio.py"}
for file in sorted([*root.glob("vgpu/**/*.py"), *root.glob("gpuserver/**/*.py"), *root.glob("client_hook/**/*.py")]):
    name = str(file.relative_to(root))
    if not (name.startswith(needing) or name in alone or file.name == "__main__.py"):
        importlib.import_module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
for name in ("vgpu.node.__main__", "gpuserver.__main__", "vgpu.broker.__main__", "vgpu.top.plain", "vgpu.testing.node"):
    importlib.import_module(name)
"""
    done = without(EVERY, tmp_path, code=code)
    assert (done.returncode, done.stderr) == (0, "")
    done = without(EVERY, tmp_path, "version", "-o", "json")
    assert json.loads(done.stdout)["vgpuctl"]


def test_pyproject_has_the_extras_and_all_of_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    assert set(declared) == {*extras.MODULES, "all"}
    assert declared["all"] == [f"st-vgpu[{','.join(sorted(extras.MODULES))}]"]
    core = " ".join(project["dependencies"])
    assert not [module for module in EVERY if module.replace("_", "-") in core]
    assert "--editable '.[all]'" in (ROOT / "Makefile").read_text()
