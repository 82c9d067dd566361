"""What an owner says about its model: where each tensor lies in the one allocation. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from vgpu.errors import ErrorCode, VgpuError, cleaned
from vgpu.models.safetensors import DTYPES, Stored
from vgpu.protocol.codec import Message, ProtocolError

VERSION: Final = 1
ALIGNMENT: Final = 256
"""Of a tensor's first byte: as ``cuMemAlloc`` gives, which kernels expect."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in the allocation. ``digest``: of its bytes; empty where the driver refuses writes of replicas."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Table:
    """A model as its owner serves it. ``gpu_uuid``: of the card. ``total_bytes``: of the allocation. ``read_only``: the
    driver can map it so that no replica can write."""

    name: str
    vgpu_id: str
    pid: int
    gpu_uuid: str
    total_bytes: int
    read_only: bool
    tensors: tuple[Placed, ...]

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    def message(self) -> Message:
        rows = [[t.name, t.dtype, list(t.shape), t.offset, t.size_bytes, t.digest] for t in self.tensors]
        fields = {field: getattr(self, field) for field in self.__slots__}
        return fields | {"version": VERSION, "tensors": rows}


def check_name(name: str) -> str:
    """``VgpuError`` (invalid) if no model can have that name."""
    if not _NAME.fullmatch(name):
        text = f"a model cannot be called {cleaned(name)!r}"
        raise VgpuError(ErrorCode.INVALID, text, "use at most 48 letters, digits, '.', '_' and '-'")
    return name


def placed(tensors: Iterable[Stored], granularity: int) -> tuple[tuple[Placed, ...], int]:
    """One behind the other, and the size of the allocation."""
    found: list[Placed] = []
    at = 0
    for tensor in tensors:
        found.append(Placed(tensor.name, tensor.dtype, tensor.shape, at, tensor.size_bytes))
        at += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
    return tuple(found), max(1, -(-at // granularity)) * granularity


def table_of(message: Message) -> Table:
    """From the owner. ``VgpuError`` (version) of an owner of another release; ``ProtocolError`` of a broken one."""
    version = message.get("version")
    if version != VERSION:
        text = f"the owner of the model speaks version {version} of the protocol, and this program version {VERSION}"
        raise VgpuError(ErrorCode.VERSION, text, "start the owner again with this release")
    try:
        rows = [Placed(n, d, tuple(s), o, size, digest) for n, d, s, o, size, digest in message["tensors"]]
        table = Table(**{field: message[field] for field in Table.__slots__ if field != "tensors"}, tensors=tuple(rows))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the owner of the model sent no whole table: {cleaned(str(error))}") from error
    for row in table.tensors:
        _check(row, table.total_bytes)
    return table


def _check(row: Placed, total_bytes: int) -> None:
    fits: Any = row.dtype in DTYPES and 0 <= row.offset <= row.offset + row.size_bytes <= total_bytes
    if not fits:
        raise ProtocolError(f"the owner of the model sent a tensor that is none: {cleaned(row.name)}")
