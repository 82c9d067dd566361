"""Command lines that people type first: some mean what they look like, and others get the right command named."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from typer.core import TyperCommand

from vgpu.errors import ErrorCode, VgpuError

_GPU: Final = "--gpu"
_SIMULATE: Final = "--simulate"


class ServeCommand(TyperCommand):
    """``--simulate`` without a number is ``--simulate 1``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        whole = []
        for word, following in pairwise([*args, ""]):
            whole.append(word)
            if word == _SIMULATE and (not following or following.startswith("-")):
                whole.append("1")
        return super().parse_args(ctx, whole)


class SetCommand(TyperCommand):
    """``--gpu`` is a mistake that names ``migrate``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for word, following in pairwise([*args, ""]):
            if word.partition("=")[0] == _GPU:
                gpu = word.partition("=")[2] or following or "GPU"
                vgpu = args[0] if args[0] != word and not args[0].startswith("-") else "VGPU"
                raise VgpuError(
                    ErrorCode.INVALID, "set does not move a vGPU to another GPU", f"vgpuctl migrate {vgpu} --gpu {gpu}"
                )
        return super().parse_args(ctx, args)


def command_path(group: Any, words: list[str]) -> str:
    """The command that ``words`` begin with, such as ``vgpuctl gpu set``, for errors that do not say it themselves."""
    path = "vgpuctl"
    for word in words:
        below = getattr(group, "commands", {}).get(word)
        if below is None:
            break
        path, group = f"{path} {word}", below
    return path
