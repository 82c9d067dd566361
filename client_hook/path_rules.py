"""``VGPU_PREPEND_X`` and ``VGPU_APPEND_X`` join the list of paths ``X``: PATH, LD_LIBRARY_PATH or LD_PRELOAD.

An image or a job sets a rule without a word of what its base has set. A rule's entry stands in the list once, however
often a rule is applied. The hook stays the last entry of LD_PRELOAD. ``cython_ext/hook/attach/rules.pyx`` is the same
for programs in containers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

LISTS: Final = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")
HOOK_NAME: Final = "libvgpu_hook.so"
_PRELOAD: Final = re.compile(r"[ \t\n\v\f\r:]")


def applied(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with its rules applied."""
    given = dict(environment)
    for name in LISTS:
        before, after = (given.get(f"VGPU_{end}_{name}", "") for end in ("PREPEND", "APPEND"))
        if before or after:
            given[name] = joined(before, given.get(name, ""), after, preload=name == "LD_PRELOAD")
    return given


def joined(before: str, now: str, after: str, *, preload: bool = False) -> str:
    """``now`` between the entries of two rules. Blanks separate entries of a ``preload`` list, too."""

    def entries(text: str) -> list[str]:
        parts = _PRELOAD.split(text) if preload else text.split(":")
        return [part for part in parts if not preload or (part and not is_hook(part))] if text else []

    first = [entry for entry in dict.fromkeys(entries(before)) if entry]
    made = first + [entry for entry in entries(now) if not entry or entry not in first]
    made += (entry for entry in _unique(entries(after)) if entry not in made)
    hook = next(filter(is_hook, _PRELOAD.split(now)), None) if preload else None
    return ":".join([*made, *([hook] if hook else [])])


def _unique(entries: Iterable[str]) -> list[str]:
    return [entry for entry in dict.fromkeys(entries) if entry]


def is_hook(entry: str) -> bool:
    """Whether a preload entry is some copy of the hook."""
    return entry.rpartition("/")[2] == HOOK_NAME
