"""Safetensors files, written without the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Tensors = Mapping[str, tuple[str, list[int], bytes]]
"""By name: type, shape, bytes."""


def written(path: Path, tensors: Tensors, **changes: Any) -> Path:
    """``changes``: of the header, by name of a tensor; None takes it out."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    header |= changes
    return raw(path, json.dumps({name: entry for name, entry in header.items() if entry is not None}), content)


def raw(path: Path, header: str, content: bytes) -> Path:
    text = header.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def sparse(path: Path, size: int) -> Path:
    """A tensor of zeros that takes no room on the disk."""
    raw(path, json.dumps({"zeros": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}), b"")
    with path.open("ab") as file:
        file.truncate(file.tell() + size)
    return path


def pattern(size: int, seed: int) -> bytes:
    return bytes((seed + 7 * at) % 256 for at in range(251)) * (size // 251 + 1)


def model(folder: Path, large: int = 5 << 20) -> tuple[list[Path], dict[str, bytes]]:
    """Two files of one model, and the bytes of each tensor."""
    first: Tensors = {
        "embed.weight": ("BF16", [large // 2], pattern(large, 3)[:large]),
        "scale": ("F32", [], b"\x00\x00\x80\x3f"),
        "empty": ("F16", [0, 4], b""),
    }
    second: Tensors = {"lm.weight": ("F8_E4M3", [3, 333], pattern(999, 9)[:999])}
    paths = [written(folder / "a.safetensors", first), written(folder / "b.safetensors", second)]
    return paths, {name: data for part in (first, second) for name, (_, _, data) in part.items()}
