"""Whether the bytes of a model are still those that its owner loaded, where the driver lets replicas write."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from typing_extensions import Buffer

from vgpu.models.table import Placed

if TYPE_CHECKING:
    from vgpu.models.cuda import Mapping

DIGEST_BYTES: Final = 16
_MOST_THREADS: Final = 8


def digest(data: Buffer) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def changed(mapping: Mapping, tensors: Iterable[Placed]) -> list[str]:
    """The names of the tensors that differ. Those without bytes or without a digest are left out."""
    mapping.card.enter()
    hashed = [tensor for tensor in tensors if tensor.digest]

    def differs(tensor: Placed) -> bool:
        mapping.card.enter()
        return digest(mapping.card.read(mapping.address + tensor.offset, tensor.size_bytes)) != tensor.digest

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        return [tensor.name for tensor, found in zip(hashed, pool.map(differs, hashed), strict=True) if found]
