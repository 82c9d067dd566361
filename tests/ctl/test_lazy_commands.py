"""Each command is imported when it is called, and no other one with it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from tests.ctl.fake_node import FakeNode, process_reading, vgpu_reading
from vgpu.ctl import commands

ROOT = Path(__file__).parents[2]
CTL = ROOT / "vgpu" / "ctl"
HEAVY = frozenset(
    {
        *("anyio", "asyncio", "fastapi", "jinja2", "matplotlib", "numpy", "psutil", "pynvml"),
        *("rich", "sqlite3", "starlette", "structlog", "textual", "trio", "uvicorn", "yaml", "http.client"),
    }
)
"""Each costs 5 to 150 ms. pydantic is not among them: typer reads options with it."""


def names(module: str) -> set[str]:
    registered = typer.Typer()
    import_module(f"vgpu.ctl.{module}").register(registered)
    return {str(one.name) for one in (*registered.registered_commands, *registered.registered_groups)}


def test_the_table_has_each_command_of_each_module() -> None:
    registering = {
        ".".join(path.relative_to(CTL).with_suffix("").parts)
        for path in CTL.rglob("*.py")
        if "def register(" in path.read_text()
    }
    assert registering == set(commands.MODULES.values())
    for module in registering:
        assert names(module) == {name for name, of in commands.MODULES.items() if of == module}
    assert commands.MODULES.keys() >= commands.ONE_THREAD | commands.LAUNCHING


def test_a_command_is_made_once_and_an_unknown_one_never() -> None:
    made = commands.Commands()
    assert made["ls"] is made["ls"]
    assert "lss" not in made
    assert made.get("lss") is None


def imported(environment: dict[str, str], *words: str) -> set[str]:
    """What a process of ``vgpuctl`` has imported at its end; it succeeds."""
    code = (
        f"import sys; sys.argv[1:] = {list(words)}; from vgpu.ctl.main import main; code = main();"
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


@pytest.mark.parametrize("words", [["ls"], ["ls", "-o", "json"], ["ps"], ["list", "-q"]], ids=" ".join)
def test_a_list_imports_its_own_module_and_nothing_heavy(words: list[str], node: FakeNode, tmp_path: Path) -> None:
    node.answers["list"] = lambda _: {"vgpus": [vgpu_reading(name="a").model_dump(mode="json")]}
    node.answers["processes"] = lambda _: {"processes": [process_reading()]}
    found = imported(os.environ | {"VGPU_RUNTIME_DIR": str(tmp_path)}, *words)
    assert {module for module in commands.MODULES.values() if f"vgpu.ctl.{module}" in found} == {"vgpus"}
    assert not HEAVY & found


def test_models_are_built_at_their_first_use_in_a_command_of_one_thread_alone() -> None:
    code = (
        "import sys; from vgpu.ctl import main; main.run = lambda words: 0; sys.argv[1:] = {words}; main.main();"
        "from vgpu.protocol.messages import GpuStatus; print(GpuStatus.__pydantic_complete__)"
    )
    for words, built in (
        (["ls"], "False"),
        (["list"], "False"),
        (["top"], "True"),
        (["migrate"], "True"),
        ([], "True"),
    ):
        command = [sys.executable, "-P", "-c", code.format(words=words)]
        assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == built
