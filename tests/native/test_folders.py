"""The folders of the native code: each is small enough to survey, and each has a header."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2] / "cython_ext"
CODE = {".py", ".pyx", ".pxd"}
MOST = 25
MADE_BY_THE_BUILD = {"generated", "lib", "__pycache__"}


def folders() -> list[Path]:
    found = {file.parent for file in ROOT.rglob("*") if file.suffix in CODE}
    return sorted(folder for folder in found if not MADE_BY_THE_BUILD & set(folder.parts))


def test_no_folder_has_more_than_25_code_files() -> None:
    counts = {folder: sum(file.suffix in CODE for file in folder.iterdir()) for folder in folders()}
    assert len(counts) >= 20
    assert {folder.name: count for folder, count in counts.items() if count > MOST} == {}


def test_each_folder_below_logic_sim_and_beside_them_has_a_header() -> None:
    without = [
        folder.relative_to(ROOT)
        for folder in folders()
        if folder != ROOT and ROOT / "hook" not in [folder, *folder.parents]
        if not (folder / "__init__.py").is_file() or not (folder / "__init__.py").read_text().startswith('"""')
    ]
    assert without == []


def test_the_hooks_folders_are_in_its_design() -> None:
    rooms = {folder.name for folder in folders() if folder.parent == ROOT / "hook"}
    design = (ROOT / "hook" / "DESIGN.md").read_text()
    assert {room for room in rooms if f"`{room}/`" not in design} == set()
