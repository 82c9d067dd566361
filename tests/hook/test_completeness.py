"""docs/internals/driver-functions.md classifies every entry point of the driver by what the hook does with it. An entry
point of a new header that the page lacks fails here. ``cuda-entries.txt``: their names up to CUDA 13.5, as the headers
``cuda*Typedefs.h`` have them."""

from __future__ import annotations

import re
import site
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from client_hook.symbols import intercepted

ENTRIES = Path(__file__).with_name("cuda-entries.txt")
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "driver-functions.md"
ACTED, COUNTED, LEFT = "Acted upon", "Counted in and out, and no more", "Left alone"


def entries() -> list[str]:
    return ENTRIES.read_text().split()


def parts(entry: str) -> tuple[str, int, bool]:
    """(base, version, whether stream 0 is the thread's own), as cuGetProcAddress is asked."""
    found = re.fullmatch(r"(\w+?)_v(\d+)(_ptsz|_ptds)?", entry)
    assert found, entry
    return found[1], int(found[2]), bool(found[3])


def rows(section: str) -> list[tuple[str, str]]:
    """(a pattern of names, what is said of them) in the tables of one section of the page."""
    body = re.split(r"^## ", PAGE.read_text(), flags=re.M)
    (text,) = [part for part in body if part.startswith(section + "\n")]
    found = re.findall(r"^\| (`cu.*) \| (.+) \|$", text, re.M)
    return [(pattern, said) for patterns, said in found for pattern in re.findall(r"`([^`]+)`", patterns)]


def matches(entry: str, pattern: str) -> bool:
    return fnmatchcase(entry, pattern) or fnmatchcase(parts(entry)[0], pattern)


def in_hook() -> dict[str, set[str]]:
    """The entries of each section, as the hook's list has it."""
    known = {(s.base, s.version, s.per_thread): s.bare for s in intercepted() if s.library == "cuda"}
    sections: dict[str, set[str]] = {ACTED: set(), COUNTED: set(), LEFT: set()}
    for entry in entries():
        bare = known.get(parts(entry))
        sections[LEFT if bare is None else COUNTED if bare else ACTED].add(entry)
    return sections


@pytest.mark.parametrize("section", [ACTED, COUNTED, LEFT])
def test_every_entry_stands_where_the_hook_has_it(section: str) -> None:
    patterns = [pattern for pattern, _ in rows(section)]
    missing = [e for e in in_hook()[section] if not any(matches(e, pattern) for pattern in patterns)]
    assert sorted(missing) == []


@pytest.mark.parametrize("section", [ACTED, COUNTED, LEFT])
def test_no_row_is_for_nothing(section: str) -> None:
    for pattern, _ in rows(section):
        assert any(matches(e, pattern) for e in in_hook()[section]), pattern


def test_what_is_acted_upon_is_in_its_twin_as_well() -> None:
    """For per-thread default streams, wherever the driver has one."""
    acted = in_hook()[ACTED]
    twins = [e for e in entries() if parts(e)[2]]
    assert len(twins) > 100
    bases = {parts(e)[0] for e in acted if not parts(e)[2]}
    assert [e for e in twins if parts(e)[0] in bases and e not in acted] == []


# --- the headers of this machine


def headers() -> Iterator[Path]:
    """Folders with headers of the driver: of toolkits, and of NVIDIA's packages for Python."""
    yield from Path("/usr/local").glob("cuda*/include")
    for packages in map(Path, site.getsitepackages()):
        yield from packages.glob("nvidia/*/include")


def declared(folder: Path) -> set[str]:
    names: set[str] = set()
    for header in folder.glob("cuda*Typedefs.h"):
        names.update(re.findall(r"\bPFN_(cu\w*?_v\d+(?:_ptsz|_ptds)?)\b", header.read_text()))
    return names


def prototypes(folder: Path) -> set[str]:
    """Names without version: what the other headers declare."""
    names: set[str] = set()
    for name in ("cuda.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h", "cudaProfiler.h"):
        if (folder / name).exists():
            names.update(re.findall(r"\bCUDAAPI\s+(cu\w+)\s*\(", (folder / name).read_text()))
    return {re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", name) for name in names}


def unclassified(folder: Path) -> list[str]:
    """What the headers there have and ``cuda-entries.txt`` has not."""
    known = entries()
    return sorted((declared(folder) - set(known)) | (prototypes(folder) - {parts(e)[0] for e in known}))


def test_no_header_here_has_an_entry_that_nobody_has_classified() -> None:
    folders = [folder for folder in headers() if (folder / "cuda.h").exists()]
    if not folders:
        pytest.skip("no header of CUDA here")
    assert {str(folder): new for folder in folders if (new := unclassified(folder))} == {}


def test_an_entry_that_a_new_header_brings_is_found(tmp_path: Path) -> None:
    (tmp_path / "cudaTypedefs.h").write_text(
        "typedef CUresult (CUDAAPI *PFN_cuLaunchKernel_v4000)(CUfunction f);\n"
        "typedef CUresult (CUDAAPI *PFN_cuLaunchKernel_v15000_ptsz)(CUfunction f);\n"
    )
    (tmp_path / "cuda.h").write_text(
        "CUresult CUDAAPI cuLaunchKernel(CUfunction f);\nCUresult CUDAAPI cuSubmit(int a);\n"
    )
    assert unclassified(tmp_path) == ["cuLaunchKernel_v15000_ptsz", "cuSubmit"]
