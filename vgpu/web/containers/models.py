"""What the dashboard says of containers, and what it is asked for."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field

from vgpu.bounds import Bounded, BoundedRequest
from vgpu.spec import Name

ENTRY_LABEL: Final = "vgpu.dev/image"
"""Of each container that the dashboard starts: the name of its image in the configuration file."""


class Container(Bounded):
    """``entry``: its image's name in the configuration file; "": the dashboard did not start it. ``state`` and
    ``status``: in the engine's words. ``vgpus``: their ids; those of its label, else those that its programs are in."""

    id: str
    name: str
    image: str
    entry: str
    command: str
    state: str
    status: str
    created_unix_s: float
    vgpus: tuple[str, ...]


class Image(Bounded):
    """What may be started: ``[image.NAME]`` of the configuration file."""

    name: str
    image: str
    command: tuple[str, ...]
    sm_percent: float
    memory_bytes: int | None
    mode: Literal["spatial", "temporal"] | None


class NewContainer(BoundedRequest):
    """``image``: the name of an entry, not that of an image. ``name``: of the container and its vGPU; None: one is made
    of the entry's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: Annotated[str, Field(min_length=1, max_length=63)]
    name: Name | None = None
