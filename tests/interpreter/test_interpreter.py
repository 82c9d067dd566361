"""Interpreters of ours import nothing from the current directory, PYTHONPATH or a user's site, and find st-vgpu."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from client_hook import interpreter
from tests.interpreter.places import ROOT, plant, ran, user_site, virtual_environment

PRODUCT = ("gpuserver", "vgpu", "client_hook", "cython_ext")
STARTS = {
    "client_hook/doctor.py": ["client_hook.doctor"],
    "gpuserver/device/simulated/mps.py": ["gpuserver.device.simulated.mps_process"],
    "gpuserver/device/nvidia/checkpoint.py": ["gpuserver.device.nvidia.checkpoint"],
    "gpuserver/runtime/lifecycle/template.py": ["vgpu.broker", "vgpu.broker.template"],
    "vgpu/ctl/entry.py": ["vgpu.ctl"],
    "vgpu/integrations/keeper.py": ["vgpu.integrations.keeper"],
    "vgpu/node/starting.py": ["vgpu.node"],
    "vgpu/ctl/systemd.py": ["", "vgpu.ctl"],
    "vgpu/node/servers.py": ["gpuserver"],
    "vgpu/harness/program.py": ["vgpu.workload"],
    "vgpu/verify/limits.py": ["vgpu.workload.probes"],
}
"""Every file that starts an interpreter of ours, and the modules that it starts."""
BASE_PYTHON = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"


def product_files() -> list[Path]:
    return [file for package in PRODUCT for file in sorted((ROOT / package).rglob("*.py"))]


def test_every_interpreter_of_ours_starts_in_one_place() -> None:
    naming, starts = set(), {}
    for file in product_files():
        name = str(file.relative_to(ROOT))
        text = file.read_text()
        if not any(word in text for word in ("executable", "interpreter")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr in {"executable", "_base_executable"}:
                naming.add(name)
            if (
                isinstance(node, ast.Constant)
                and node.value in {"python", "python3", "-m"}
                and name != "vgpu/support/parts.py"
            ):
                naming.add(name)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"interpreter.command", "interpreter.become"}:
                module = ast.unparse(node.args[0]).strip("'")
                module = module.replace("mps_process.__name__", "gpuserver.device.simulated.mps_process")
                starts.setdefault(name, []).append(module)
    assert naming == {"client_hook/interpreter.py"}
    assert {name: sorted(modules) for name, modules in starts.items()} == STARTS


def test_every_start_has_an_environment_without_variables_of_python() -> None:
    """``vgpuctl`` alone keeps them: they are for the programs that it starts."""
    without = [name for name in STARTS if "interpreter.environment" not in (ROOT / name).read_text()]
    # The node cleans what its servers get; verify's programs go through vgpu/harness/program.py.
    assert without == ["vgpu/ctl/entry.py", "vgpu/ctl/systemd.py", "vgpu/node/servers.py", "vgpu/verify/limits.py"]
    assert "interpreter.environment" in (ROOT / "vgpu/node/__main__.py").read_text()


def test_the_environment_loses_what_python_reads_and_nothing_else() -> None:
    told = {"PYTHONPATH": "/x", "PYTHONHOME": "/y", "PATH": "/bin", "VGPU_ID": "it", "PYTHONSTARTUP": "/z"}
    assert interpreter.environment(told) == {"PATH": "/bin", "VGPU_ID": "it"}


def test_what_starts_imports_nothing_from_where_it_is_started(tmp_path: Path) -> None:
    planted = plant(tmp_path / "here", "ctypes", "json", "pydantic", "typing", "trio", "vgpu", "sitecustomize")
    environment = interpreter.environment(os.environ) | {"PYTHONPATH": str(planted), "PYTHONSTARTUP": str(planted)}
    for module in ("gpuserver.device.nvidia.checkpoint", "vgpu.broker", "vgpu.broker.template", "gpuserver"):
        command = interpreter.command(module, "--help")
        done = subprocess.run(command, cwd=planted, env=environment, capture_output=True, text=True, check=False)
        assert ran(planted) == [], (module, done.stderr)
        assert "No module named" not in done.stderr


def test_vgpuctl_does_not_import_from_pythonpath(tmp_path: Path) -> None:
    planted = plant(tmp_path / "here", "json", "pydantic", "typer", "trio", "msgpack", "rich")
    environment = os.environ | {"PYTHONPATH": str(planted), "VGPU_RUNTIME_DIR": "/nonexistent"}
    for command in ([sys.executable, "-m", "vgpu.ctl"], [sys.executable, "-c", CONSOLE_SCRIPT]):
        done = subprocess.run(
            [*command, "version", "-o", "json"], cwd=planted, env=environment, capture_output=True, text=True
        )
        assert (ran(planted), done.returncode) == ([], 0), done.stderr
        assert '"vgpuctl"' in done.stdout


CONSOLE_SCRIPT = "import sys; sys.path.pop(0); from vgpu.ctl.entry import main; sys.exit(main())"
"""What pip writes; a script has its own directory at the head of the path, not the current one."""


def test_the_console_script_is_the_isolated_one() -> None:
    assert '\nvgpuctl = "vgpu.ctl.entry:main"\n' in (ROOT / "pyproject.toml").read_text()


def vgpuctl(python: Path, environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from vgpu.ctl.entry import main; sys.exit(main())"
    full = {"PATH": os.defpath, "VGPU_RUNTIME_DIR": "/nonexistent"} | environment
    return subprocess.run(
        [str(python), *options, "-c", code, "version"], env=full, cwd="/", capture_output=True, text=True
    )


def test_a_virtual_environment_works(tmp_path: Path) -> None:
    python = virtual_environment(tmp_path / "venv")
    done = vgpuctl(python, {"HOME": str(tmp_path)})
    assert (done.returncode, done.stderr, done.stdout[:8]) == (0, "", "vgpuctl ")


@pytest.mark.parametrize("where", ["home", "PYTHONUSERBASE"])
def test_an_installation_of_one_user_works(tmp_path: Path, where: str) -> None:
    """And its packages come before the system's, as Python has it. Root's own lies where others cannot write."""
    base = tmp_path / ".local" if where == "home" else tmp_path / "base"
    user_site(base)
    environment = {"HOME": str(tmp_path)} | ({"PYTHONUSERBASE": str(base)} if where != "home" else {})
    done = vgpuctl(BASE_PYTHON, environment)
    assert (done.returncode, done.stderr, done.stdout[:8]) == (0, "", "vgpuctl ")


@pytest.mark.skipif(os.geteuid() != 0, reason="root's rule")
def test_root_runs_nothing_that_another_user_can_write(tmp_path: Path) -> None:
    place = user_site(tmp_path / ".local")
    os.chown(place, 65534, 65534)
    done = vgpuctl(BASE_PYTHON, {"HOME": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"vgpuctl: root does not run st-vgpu from {place}: another user can write to {place}",
        "  → python3 -m venv /opt/vgpu && /opt/vgpu/bin/pip install st-vgpu",
    ]


def test_programs_keep_the_environment_that_the_user_gave(tmp_path: Path) -> None:
    """``vgpuctl`` ignores PYTHONPATH, and passes it on."""
    code = f"import sys; sys.argv[1:] = ['ls']; from vgpu.ctl import entry; {SHOW}"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == environment["PYTHONPATH"]


SHOW = (
    "from client_hook import interpreter; interpreter.command = lambda *_: ['/usr/bin/env', 'printenv', 'PYTHONPATH'];"
    "entry.main()"
)
