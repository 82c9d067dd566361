"""No module of the product imports itself through others. An import for type checkers alone counts as one, too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("gpuserver", "vgpu", "client_hook", "cython_ext")
CYTHON_IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import (\w+)|import ([\w.]+))", re.MULTILINE)
"""Python's own imports of a Cython module. Circles of ``cimport`` are the compiler's matter."""


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(source: str, *, is_cython: bool) -> Iterator[tuple[str, str]]:
    """Module and name of each import; ``import a`` has no name."""
    if is_cython:
        yield from ((package or module, name) for package, name, module in CYTHON_IMPORT.findall(source))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def imports_below(root: Path) -> dict[str, set[str]]:
    """Module → the modules of these packages that it imports. ``from a import b`` imports a.b if that is a module, else
    a."""
    paths = [path for name in PACKAGES for path in (root / name).rglob("*") if path.suffix in {".py", ".pyi", ".pyx"}]
    graph: dict[str, set[str]] = {module_of(path.relative_to(root)): set() for path in paths}
    for path in paths:
        module = module_of(path.relative_to(root))
        for origin, name in imported_by(path.read_text(), is_cython=path.suffix == ".pyx"):
            member = f"{origin}.{name}"
            graph[module] |= {member if member in graph else origin} & graph.keys() - {module}
    return graph


def circle_in(graph: Mapping[str, set[str]]) -> str:
    """The first circle that is found, each module before the one that it imports; empty: there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " imports ".join(reversed(error.args[1]))
    return ""


def test_no_module_imports_itself_through_others() -> None:
    graph = imports_below(ROOT)
    assert graph["gpuserver.__main__"] >= {"gpuserver.runtime.server", "vgpu.errors"}
    circle = circle_in(graph)
    assert not circle, f"an import circle: {circle}"


def write(root: Path, **sources: str) -> None:
    """Modules of a package ``vgpu`` below ``root``."""
    (root / "vgpu").mkdir()
    for name, source in sources.items():
        (root / "vgpu" / f"{name}.py").write_text(source)


@pytest.mark.parametrize(
    ("there", "back"),
    [
        ("import vgpu.server", "import vgpu.state"),
        ("from vgpu import server", "from vgpu.state import GpuState"),
        ("if TYPE_CHECKING:\n    from vgpu.server import GpuServer", "def late():\n    import vgpu.state"),
    ],
)
def test_a_circle_is_found_and_named(tmp_path: Path, there: str, back: str) -> None:
    write(tmp_path, __init__="", state=there, server=back, outside="import vgpu.state")
    assert circle_in(imports_below(tmp_path)) in {
        "vgpu.state imports vgpu.server imports vgpu.state",
        "vgpu.server imports vgpu.state imports vgpu.server",
    }


def test_imports_in_one_direction_are_no_circle(tmp_path: Path) -> None:
    write(tmp_path, __init__="from vgpu.low import x", low="import os", high="from vgpu import low, x\nimport vgpu.low")
    graph = imports_below(tmp_path)
    assert graph == {"vgpu": {"vgpu.low"}, "vgpu.low": set(), "vgpu.high": {"vgpu", "vgpu.low"}}
    assert not circle_in(graph)


def test_python_imports_of_a_cython_module_count(tmp_path: Path) -> None:
    write(tmp_path, readings="from vgpu.page import Page\n")
    (tmp_path / "vgpu" / "page.pyx").write_text("cimport vgpu.page\ncdef int x\nfrom vgpu.readings import Where\n")
    assert circle_in(imports_below(tmp_path))
