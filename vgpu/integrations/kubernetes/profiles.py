"""Profiles: sizes of vGPUs with a name, as in ``30sm-8g``: 30 percent of a GPU's compute, and 8 GiB of its memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from vgpu.errors import ErrorCode, VgpuError

GIB: Final = 1 << 30
_NAME: Final = re.compile(r"([1-9]\d?|100)sm-([1-9]\d{0,3})g")


@dataclass(frozen=True, slots=True)
class Profile:
    sm: int
    memory_gib: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """``VgpuError`` (invalid): it is no profile."""
        found = _NAME.fullmatch(text)
        if found is None:
            raise VgpuError(ErrorCode.INVALID, f"{text!r} is no profile", "30sm-8g is 30 percent and 8 GiB of a GPU")
        return cls(int(found[1]), int(found[2]))

    @property
    def name(self) -> str:
        return f"{self.sm}sm-{self.memory_gib}g"

    @property
    def memory_bytes(self) -> int:
        return self.memory_gib * GIB

    def count(self, sm: int, memory_bytes: int) -> int:
        """How many fit into so much compute (percent) and memory."""
        return max(0, min(sm // self.sm, memory_bytes // self.memory_bytes))


def parse_all(text: str) -> tuple[Profile, ...]:
    """Of a list with commas; the order is kept, doubles go. ``VgpuError`` (invalid)."""
    return tuple(dict.fromkeys(Profile.parse(part.strip()) for part in text.split(",") if part.strip()))
