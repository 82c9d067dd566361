"""What describes a vGPU: the options of ``vgpuctl create`` and ``set`` as keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypedDict

Size = int | str
"""Bytes, or a text such as ``8G``."""
Percent = float | str
"""0–100, or a text such as ``30%``."""

_FIELDS: Final = {
    "sm": "sm_percent",
    "mem": "memory_bytes",
    "mem_limit": "memory_limit_bytes",
    "mem_per_process": "process_memory_bytes",
    "quota_request": "quota_request_percent",
    "quota_limit": "quota_limit_percent",
    "ttl": "ttl_ns",
    "idle_suspend": "idle_suspend_ns",
}


class Changes(TypedDict, total=False):
    """Options that ``Vgpu.resize`` takes, besides ``sm`` and ``mem``. ``ttl``, ``idle_suspend``: a text such as ``8h``,
    or nanoseconds. ``resume_on``: ``tcp:8000``, or several; ``off``: none."""

    mem_limit: Size
    mem_per_process: Size
    quota_request: Percent
    quota_limit: Percent
    burst: bool
    overcommit: bool
    priority: Literal["high", "normal", "low"]
    lease: Literal["auto", "exclusive"]
    slo: str
    on_server_loss: Literal["block", "error", "run"]
    name: str
    ttl: int | str
    idle_suspend: int | str
    resume_on: str | Sequence[str]


class Options(TypedDict, total=False):
    """Options that ``create`` takes, besides ``sm``, ``mem``, ``name``, ``gpu``, ``owner`` and ``keep``."""

    fraction: float | str
    mem_limit: Size
    mem_per_process: Size
    quota_request: Percent
    quota_limit: Percent
    burst: bool
    overcommit: bool
    oversubscribe: Literal["swap", "managed"]
    priority: Literal["high", "normal", "low"]
    lease: Literal["auto", "exclusive"]
    slo: str
    on_server_loss: Literal["block", "error", "run"]
    ttl: int | str
    idle_suspend: int | str
    resume_on: str | Sequence[str]
    share_group: str
    group: str


def fields_of(known: type, **options: Any) -> dict[str, Any]:
    """The options as fields of a request; None: not given. ``TypeError``: ``known`` has no such option."""
    for option in options:
        if option not in {"sm", "mem", "name", *known.__annotations__}:
            raise TypeError(f"a vGPU has no option {option!r}")
    return {_FIELDS.get(option, option): value for option, value in options.items() if value is not None}


def words_of(options: Mapping[str, Any]) -> list[str]:
    """The options as they are typed after ``vgpuctl``; None and False: not given."""
    words = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        if name == "resume_on" and not isinstance(value, str):
            words += [word for one in value for word in ("--resume-on", str(one))]
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            is_time = name in {"ttl", "idle_suspend"} and isinstance(value, int)
            words.append(f"{value}ns" if is_time else str(value))
    return words
