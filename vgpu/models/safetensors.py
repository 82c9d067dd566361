"""The header of a safetensors file: which tensors are in it, and where.

The package of that name gives tensors of a framework, and the owner of a model has none. A file is the header's length
(8 bytes, little-endian), the header (JSON), and the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vgpu.errors import ErrorCode, VgpuError, cleaned

MOST_HEADER_BYTES: Final = 100_000_000
"""The format's own limit."""
LENGTH_BYTES: Final = 8
DTYPES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of one element."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file. ``begin``: its first byte, from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    size_bytes: int


def read_headers(paths: Iterable[Path]) -> list[Stored]:
    """The tensors of all files of a model. ``VgpuError`` (invalid) for a damaged file, and a name that two have."""
    found: dict[str, Stored] = {}
    for path in paths:
        for tensor in read_header(path):
            if tensor.name in found:
                other = found[tensor.name].path
                raise VgpuError(
                    ErrorCode.INVALID,
                    f"both {other} and {path} have a tensor {cleaned(tensor.name)}",
                    "give the files of one model",
                )
            found[tensor.name] = tensor
    if not found:
        raise VgpuError(ErrorCode.INVALID, "the files have no tensors", "give the safetensors files of a model")
    return list(found.values())


def read_header(path: Path) -> list[Stored]:
    """In the order of their bytes. ``VgpuError`` (invalid): the file cannot be read, or is damaged."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if file_bytes < LENGTH_BYTES or length > file_bytes - LENGTH_BYTES or length > MOST_HEADER_BYTES:
                raise damaged(path, f"its header would have {length} bytes, and the file has {file_bytes}")
            text = file.read(length)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        header = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is no JSON: {cleaned(str(error))}") from error
    if not isinstance(header, dict):
        raise damaged(path, "its header is no JSON object")
    header.pop("__metadata__", None)
    start = LENGTH_BYTES + length
    tensors = [_tensor(path, name, entry, start) for name, entry in header.items()]
    return _without_gaps(path, sorted(tensors, key=lambda tensor: (tensor.begin, tensor.size_bytes)), start, file_bytes)


def unreadable(path: Path, error: OSError) -> VgpuError:
    return VgpuError(ErrorCode.INVALID, f"cannot read {path}: {error.strerror or error}", "name a safetensors file")


def damaged(path: Path, reason: str) -> VgpuError:
    return VgpuError(ErrorCode.INVALID, f"{path} is no whole safetensors file: {reason}", "download the file again")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(path: Path, name: str, entry: object, start: int) -> Stored:
    named = f"tensor {cleaned(name)}"
    if not isinstance(entry, dict):
        raise damaged(path, f"{named} has no description")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        text = f"{named} in {path} has the type {cleaned(str(dtype))}, which is not known here"
        raise VgpuError(ErrorCode.INVALID, text, f"known types: {' '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise damaged(path, f"{named} has no shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise damaged(path, f"{named} has no data_offsets")
    begin, end = offsets
    size_bytes = math.prod(shape) * DTYPES[dtype]
    if end - begin != size_bytes:
        raise damaged(path, f"{named} has {end - begin} bytes, and its shape needs {size_bytes}")
    return Stored(name, dtype, tuple(shape), path, start + begin, size_bytes)


def _without_gaps(path: Path, tensors: list[Stored], start: int, file_bytes: int) -> list[Stored]:
    at = start
    for tensor in tensors:
        if tensor.begin != at:
            raise damaged(path, f"the bytes of tensor {cleaned(tensor.name)} do not follow those before it")
        at += tensor.size_bytes
    if at != file_bytes:
        raise damaged(path, f"it has {file_bytes} bytes, and its tensors end at {at}")
    return tensors
