"""The configuration file: the values of ``vgpuctl serve`` and other commands that their command line leaves open.

``find`` finds the file, ``parse`` reads its text (pure), ``load`` does both. An unknown key is an error, with its line
and the nearest known key. Reason: a misspelt key must not be ignored for months.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from vgpu.bounds import BoundedRequest
from vgpu.enums import PlacementName
from vgpu.errors import ErrorCode, VgpuError, in_plain_words
from vgpu.http.listening import split_address
from vgpu.integrations.engines import socket_path
from vgpu.limits import Limits
from vgpu.queueing.rules import DEFAULT_RULES, QueueRules
from vgpu.quotas.quota import NO_QUOTAS, Quota, Quotas
from vgpu.retired import CONFIG_KEYS, instead, renewed
from vgpu.spec import Memory, Name, Percent, PeriodNs, VgpuSpec, WindowNs
from vgpu.units import parse_bytes, parse_duration_ns

ModeName = Literal["auto", "spatial", "temporal"]
UnmanagedName = Literal["report", "suspend", "kill"]
MOST_GPUS: Final = 256
MOST_SIMULATED: Final = 16

_HEADER: Final = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]")
_PART: Final = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_IN_FILE: Final = "in a file"
_KEY: Final = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")


def _size(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


def _duration(value: Any, info: ValidationInfo) -> Any:
    """A duration. In a file, a number without a unit is refused as it is on the command line."""
    return parse_duration_ns(str(value)) if info.context == _IN_FILE else value


def _address(text: str) -> str:
    split_address(text)
    return text


class _Section(BoundedRequest):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GpuConfig(_Section):
    """``[gpu.INDEX]``: how this GPU is shared, where it differs from ``[serve]``."""

    mode: ModeName | None = None
    period_ns: Annotated[PeriodNs, BeforeValidator(_duration)] | None = Field(None, alias="period")
    window_ns: Annotated[WindowNs, BeforeValidator(_duration)] | None = Field(None, alias="window")


class ServeConfig(_Section):
    """``[serve]``: as the options of ``vgpuctl serve``. ``gpus`` None: all; ``host_memory_bytes`` None: half of the
    host's; ``period_ns``, ``window_ns`` None: the last ones of ``vgpuctl gpu set``, else the policy's."""

    gpus: Annotated[tuple[Annotated[int, Field(ge=0, lt=MOST_GPUS)], ...], Field(min_length=1)] | None = None
    simulate: int = Field(0, ge=0, le=MOST_SIMULATED)
    mode: ModeName = "temporal"
    period_ns: Annotated[PeriodNs, BeforeValidator(_duration)] | None = Field(None, alias="period")
    window_ns: Annotated[WindowNs, BeforeValidator(_duration)] | None = Field(None, alias="window")
    host_memory_bytes: Annotated[int, BeforeValidator(_size), Field(ge=0)] | None = Field(None, alias="host_memory")
    unmanaged: UnmanagedName = "report"
    placement: PlacementName = PlacementName.SPREAD


class ListenConfig(_Section):
    """``[metrics]``, and a part of ``[dashboard]``: where it listens; None is the command's own default."""

    listen: Annotated[str, AfterValidator(_address)] | None = None


def _socket(text: str) -> str:
    socket_path(text)
    return text


def _image(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w./:@-]*", text, re.ASCII):
        raise ValueError(f"{text!r} is not the name of an image: write example/train:1")
    return text


class DashboardConfig(ListenConfig):
    """``[dashboard]``. ``containers``: the socket of a container engine, as ``unix:///run/docker.sock``; None: off."""

    containers: Annotated[str, AfterValidator(_socket)] | None = None


class ImageConfig(_Section):
    """``[image.NAME]``: what the dashboard may start as a container, and the size of its vGPU. ``mode`` None: a GPU of
    any mode; ``network`` None: as the engine does it."""

    image: Annotated[str, Field(max_length=512), AfterValidator(_image)]
    command: tuple[str, ...] = ()
    sm_percent: Percent = Field(alias="sm")
    memory_bytes: Memory | None = Field(None, alias="mem")
    mode: Literal["spatial", "temporal"] | None = None
    network: Literal["bridge", "host", "none"] | None = None

    def spec(self, name: str) -> VgpuSpec:
        return VgpuSpec(sm_percent=self.sm_percent, memory_bytes=self.memory_bytes, name=name)


class Config(_Section):
    """The whole file. Every section and every key may be left out."""

    serve: ServeConfig = ServeConfig()
    gpu: dict[Annotated[int, Field(ge=0, lt=MOST_GPUS)], GpuConfig] = Field(default_factory=dict)
    metrics: ListenConfig = ListenConfig()
    dashboard: DashboardConfig = DashboardConfig()
    image: dict[Name, ImageConfig] = Field(default_factory=dict)
    limits: Limits = Limits()
    quota: Quotas = NO_QUOTAS
    queue: QueueRules = DEFAULT_RULES

    def with_options(self, **options: Any) -> Config:
        """This configuration with the options of ``serve``'s command line (None: not given), which count for every GPU.
        The keys are those of ``[serve]``. If the command line asks for another number of simulated GPUs, ``gpus`` and
        the sections of single GPUs do not count.

        ``VgpuError`` (invalid) names the option that is wrong.
        """
        said = {key: value for key, value in options.items() if value is not None}
        others = said.get("simulate", self.serve.simulate) != self.serve.simulate
        kept = self.serve.model_dump(by_alias=True, exclude_defaults=True, exclude={"gpus"} if others else None)
        try:
            serve = ServeConfig.model_validate(kept | said)
        except ValidationError as error:
            problem = error.errors()[0]
            option = str(problem["loc"][0]).replace("_", "-").replace("gpus", "gpu")
            raise VgpuError(ErrorCode.INVALID, f"--{option}: {in_plain_words(problem['msg'])}") from None
        everywhere = said.keys() & known_keys("gpu")
        gpus = {
            index: GpuConfig.model_validate(
                {key: value for key, value in gpu.model_dump(by_alias=True).items() if key not in everywhere}
            )
            for index, gpu in ({} if others else self.gpu).items()
        }
        return self.model_copy(update={"serve": serve, "gpu": gpus})


@dataclass(frozen=True, slots=True)
class Problem:
    """An error in a file; ``line`` counts from 1, 0 is the file as a whole."""

    line: int
    message: str

    def at(self, path: Path) -> str:
        return f"{path}:{self.line}: {self.message}" if self.line else f"{path}: {self.message}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, its file (None: there is no file, all is default) and the file's text."""

    config: Config
    path: Path | None = None
    text: str = ""

    def source(self, *keys: str) -> str:
        """Where the value at ``keys`` (as written in the file) comes from: ``PATH:LINE`` or ``default``."""
        if self.path is None:
            return "default"
        now, _ = renewed(tomllib.loads(self.text))
        return f"{self.path}:{line_of(self.text, keys)}" if _holds(now, keys) else "default"

    def retired(self) -> list[Problem]:
        """The old words in it, which work for one more release."""
        return retired(self.text)


def find(environment: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """``$VGPU_CONFIG``; without it ``/etc/vgpu/config.toml`` for root, ``~/.config/vgpu/config.toml`` for a user."""
    named = environment.get("VGPU_CONFIG")
    if named:
        return Path(named).absolute()
    if (os.getuid() if uid is None else uid) == 0:
        return Path("/etc/vgpu/config.toml")
    own = environment.get("XDG_CONFIG_HOME") or f"{environment.get('HOME', '/nonexistent')}/.config"
    return Path(own) / "vgpu" / "config.toml"


def load(path: Path | None = None, environment: Mapping[str, str] = os.environ) -> Loaded:
    """The file at ``path``, else the one that ``find`` names; that one may be missing unless ``$VGPU_CONFIG`` named it.

    ``VgpuError``: it cannot be read (not found), or something in it is wrong (invalid); the first thing, with its line.
    """
    meant = path or find(environment)
    try:
        text = meant.read_text()
    except FileNotFoundError:
        if path is None and not environment.get("VGPU_CONFIG"):
            return Loaded(Config())
        raise VgpuError(
            ErrorCode.NOT_FOUND, f"there is no configuration file {meant}", "see: vgpuctl config --help"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise VgpuError(ErrorCode.INVALID, f"cannot read {meant}: {error}") from error
    found = parse(text)
    if isinstance(found, Config):
        return Loaded(found, meant, text)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise VgpuError(ErrorCode.INVALID, found[0].at(meant) + more, f"vgpuctl config check {meant}")


def parse(text: str) -> Config | list[Problem]:
    """The configuration in ``text``, or everything that is wrong with it, in the order of the file."""
    try:
        return Config.model_validate(renewed(tomllib.loads(text))[0], context=_IN_FILE)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(where[1]) if where else text.count("\n") + 1  # "at end of document"
        return [Problem(line, f"this is not TOML: {error}")]
    except ValidationError as error:
        found = {
            Problem(line_of(text, keys), _complaint(keys, problem["type"], problem["msg"]))
            for problem in error.errors()
            for keys in [tuple(str(part) for part in problem["loc"] if part != "[key]")]
        }
        return sorted(found, key=lambda problem: (problem.line, problem.message))


def retired(text: str) -> list[Problem]:
    """The old words in the configuration ``text``, which is valid, and what they are called now."""
    _, found = renewed(tomllib.loads(text))
    return [Problem(line_of(text, keys), instead(keys[-1], CONFIG_KEYS[keys[-1]])) for keys in found]


def known_keys(*sections: str) -> list[str]:
    """The keys that ``sections`` may have (a GPU's index stands for that of any GPU, an image's name for any)."""
    of_section: dict[str, type[BaseModel]] = {
        "gpu": GpuConfig,
        "serve": ServeConfig,
        "limits": Limits,
        "dashboard": DashboardConfig,
        "image": ImageConfig,
        "queue": QueueRules,
    }
    of_section["quota"] = Quotas if len(sections) == 1 else Quota
    model = of_section.get(sections[0], ListenConfig) if sections else Config
    return [field.alias or name for name, field in model.model_fields.items()]


def _complaint(keys: tuple[str, ...], kind: str, message: str) -> str:
    if kind != "extra_forbidden":
        return f"{'.'.join(keys)}: {in_plain_words(message)}"
    *sections, key = keys
    here = known_keys(*sections)
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.5)
    place = f"[{'.'.join(sections)}]" if sections else "the file"
    there_are = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(here)}"
    return f"{place} has no {key!r}; {there_are}"


def _holds(table: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    value: Any = table
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True


def line_of(text: str, keys: tuple[str, ...]) -> int:
    """The line, from 1, that has ``keys`` or the longest beginning of it; 0 if none does.

    tomllib does not keep lines. This function recognises tables, and dotted and quoted keys. For a key within an inline
    table it returns the line of the table.
    """
    best, at = 0, 0
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            path = table = _parts(header[1])
        elif key := _KEY.match(line):
            path = (*table, *_parts(key[1]))
        else:
            continue
        if len(path) > best and _today(path) == _today(keys)[: len(path)]:
            best, at = len(path), number
    return at


def _today(path: tuple[str, ...]) -> tuple[str, ...]:
    return (*path[:-1], CONFIG_KEYS.get(path[-1], path[-1])) if path else path


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_PART, dotted))
