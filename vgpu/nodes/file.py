"""The file of ``vgpuctl --nodes FILE``, in TOML::

policy = "fit"                    # or "spread", "pack"

[node.alpha]
url = "http://127.0.0.1:7080"     # of a dashboard
token_file = "alpha.token"        # beside this file

[node.beta]
ssh = "user@beta"                 # vgpuctl is in the PATH there
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vgpu.errors import ErrorCode, VgpuError, in_plain_words

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
_Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@:%-]*$")]
"""No option of ssh begins so."""


class NodeEntry(BaseModel):
    """``url`` with ``token_file``, or ``ssh``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = ""
    token_file: Path | None = None
    ssh: _Host | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.url) == (self.ssh is not None):
            raise ValueError("give url or ssh")
        if self.ssh is not None and self.token_file is not None:
            raise ValueError("token_file goes with url")
        if self.url:
            parts = urlsplit(self.url)
            if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
                raise ValueError(f"{self.url!r} is no address such as http://127.0.0.1:7080")
        return self


class NodesFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["spread", "pack", "fit"] = "fit"
    node: dict[_Name, NodeEntry] = Field(min_length=1, max_length=1000)


def load(path: Path) -> NodesFile:
    """``token_file`` is relative to the file. ``VgpuError`` (invalid) names what is wrong."""
    try:
        read = NodesFile.model_validate(tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        raise VgpuError(ErrorCode.INVALID, f"--nodes: cannot read {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise VgpuError(ErrorCode.INVALID, f"--nodes: {path}: {error}", '[node.NAME] and ssh = "HOST"') from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        words = in_plain_words(problem["msg"])
        raise VgpuError(
            ErrorCode.INVALID, f"--nodes: {path}: {where}: {words}", '[node.NAME] and ssh = "HOST"'
        ) from None
    entries = {
        name: entry
        if entry.token_file is None
        else entry.model_copy(update={"token_file": path.parent / entry.token_file})
        for name, entry in read.node.items()
    }
    return read.model_copy(update={"node": entries})
