"""Public words that have another name now. Each old word works for one release, with a message about the new one.

Only this module and CHANGELOG.md have the words; ``tests/vocabulary/test_retired.py`` holds that.
"""

from __future__ import annotations

from typing import Any, Final

GOES_WITH: Final = "0.2"
"""The release that no longer knows the old words."""
OPTIONS: Final = {"--quantum": "--period"}
"""Options of ``vgpuctl serve`` and ``vgpuctl gpu set``."""
CONFIG_KEYS: Final = {"quantum": "period"}
"""Keys of ``[serve]`` and ``[gpu.INDEX]``."""
STATES: Final = {"dozing": "idle-suspended"}
"""States of a vGPU, as a GPU Server of an older release reports them."""
EVENTS: Final = {"stranded": "killed-on-resume"}
"""Kinds of events, in the histories that an older release wrote, and for ``vgpuctl events --kind``."""


def instead(old: str, new: str) -> str:
    """The message for a person that writes the old word."""
    return f"{old} is called {new} now; {old} goes with release {GOES_WITH}"


def renewed(table: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """A configuration file's content with today's keys, and where it had old ones. A key that the file has under both
    names stays as it is: the old one is then refused as unknown."""
    found: list[tuple[str, ...]] = []

    def section(keys: tuple[str, ...], values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        made = {}
        for key, value in values.items():
            new = CONFIG_KEYS.get(key)
            if new is None or new in values:
                made[key] = value
            else:
                made[new] = value
                found.append((*keys, key))
        return made

    made = dict(table)
    if "serve" in table:
        made["serve"] = section(("serve",), table["serve"])
    if isinstance(table.get("gpu"), dict):
        made["gpu"] = {index: section(("gpu", index), values) for index, values in table["gpu"].items()}
    return made, found
