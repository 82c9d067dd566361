"""The folders of the code: each is small enough to survey, and those of the native code have a header."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROOT = REPOSITORY / "cython_ext"
PACKAGES = ("benchmarks", "client_hook", "cython_ext", "gpuserver", "vgpu")
CODE = {".py", ".pyx", ".pxd"}
MOST = 25
MADE_BY_THE_BUILD = {"generated", "lib", "__pycache__"}


def folders(root: Path = ROOT) -> list[Path]:
    found = {file.parent for file in root.rglob("*") if file.suffix in CODE}
    return sorted(folder for folder in found if not MADE_BY_THE_BUILD & set(folder.parts))


def test_no_folder_has_more_than_25_code_files() -> None:
    everywhere = [folder for package in PACKAGES for folder in folders(REPOSITORY / package)]
    counts = {folder: sum(file.suffix in CODE for file in folder.iterdir()) for folder in everywhere}
    assert len(counts) >= 60
    assert {str(folder): count for folder, count in counts.items() if count > MOST} == {}


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
