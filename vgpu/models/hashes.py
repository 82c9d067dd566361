"""Whether the bytes of a model are still those that its owner loaded, where the driver lets replicas write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from typing_extensions import Buffer

from vgpu.models.table import Placed

if TYPE_CHECKING:
    from vgpu.models.cuda import Mapping

DIGEST_BYTES: Final = 16
PIECE_BYTES: Final = 64 << 20
"""So much is copied from the GPU at once."""
_MOST_THREADS: Final = 8


def digest(data: Buffer) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def changed(mapping: Mapping, tensors: Iterable[Placed], stopped: Callable[[], bool] = lambda: False) -> list[str]:
    """The names of the tensors that differ. Those without bytes or without a digest are left out. Once it is
    ``stopped``, the rest are, too."""
    mapping.card.enter()
    hashed = [tensor for tensor in tensors if tensor.digest]

    def differs(tensor: Placed) -> bool:
        mapping.card.enter()
        found = blake2b(digest_size=DIGEST_BYTES)
        for at in range(0, tensor.size_bytes, PIECE_BYTES):
            if stopped():
                return False
            size = min(PIECE_BYTES, tensor.size_bytes - at)
            found.update(mapping.card.read(mapping.address + tensor.offset + at, size))
        return found.digest() != tensor.digest

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        return [tensor.name for tensor, found in zip(hashed, pool.map(differs, hashed), strict=True) if found]
