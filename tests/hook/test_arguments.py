"""The arguments of every function in the hook's list are as wide as in NVIDIA's header, in that very version: a wrapper
that hands on four bytes of eight hands on something else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from client_hook.symbol import Symbol
from client_hook.symbols import SYMBOLS
from tests.hook.test_completeness import headers

NARROW = {"unsigned char": 1, "unsigned short": 2, "unsigned": 4, "int": 4, "float": 4}
"""Widths in bytes of plain types; all others of the hook's have eight."""

THEIRS = NARROW | {
    "unsigned int": 4,
    "unsigned long long": 8,
    "size_t": 8,
    "cuuint32_t": 4,
    "cuuint64_t": 8,
    "CUdevice": 4,
    "CUdevice_v1": 4,
    "CUdeviceptr": 8,
    "CUdeviceptr_v1": 4,
    "CUdeviceptr_v2": 8,
    "CUmemLocation": 8,  # two ints, by value
    "CUmemLocation_v1": 8,
    "VdpDevice": 4,
}
HANDLES = re.compile(
    r"CU(context|stream|function|module|event|graph|graphNode|graphExec|array|mipmappedArray|memoryPool|library|kernel"
    r"|greenCtx|hostFn|streamCallback|externalMemory|externalSemaphore|graphicsResource|texObject|surfObject"
    r"|memGenericAllocationHandle|devResourceDesc|occupancyB2DSize|graphRecaptureCallback)(_v\d)?"
)


def ours(kind: str) -> int:
    return NARROW.get(kind.removeprefix("const "), 8)


def theirs(argument: str) -> int:
    """Width of one argument of a prototype, with or without a name; what is no handle is an enumeration."""
    if "*" in argument:
        return 8
    words = argument.removeprefix("const ").split()
    kind = " ".join(words[:-1]) if len(words) > 1 and words[-1] not in {"int", "char", "short", "long"} else argument
    return 8 if HANDLES.fullmatch(kind) else THEIRS.get(kind, 4)


def prototypes(folder: Path) -> dict[str, list[int]]:
    """Widths of the arguments of each entry point: ``cuLaunchKernel_v7000_ptsz`` → them."""
    found = {}
    for header in folder.glob("cuda*Typedefs.h"):
        text = " ".join(header.read_text().split())
        for name, arguments in re.findall(r"\(CUDAAPI \*PFN_(cu\w+)\)\((.*?)\);", text):
            found[name] = [theirs(one.strip()) for one in arguments.split(",") if one.strip() != "void"]
    return found


def entry(symbol: Symbol) -> str:
    twin = symbol.name[-5:] if symbol.per_thread else ""
    return f"{symbol.base}_v{symbol.version}{twin}"


def test_arguments_are_as_wide_as_the_headers() -> None:
    folders = [folder for folder in headers() if (folder / "cudaTypedefs.h").exists()]
    if not folders:
        pytest.skip("no header of CUDA here")
    for folder in folders:
        known = prototypes(folder)
        listed = [s for s in SYMBOLS if s.library == "cuda" and entry(s) in known]
        assert len(listed) > 300
        wrong = {s.name: known[entry(s)] for s in listed if [ours(kind) for kind, _ in s.parameters] != known[entry(s)]}
        assert wrong == {}, folder
