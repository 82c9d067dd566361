"""The commands of ``vgpuctl`` as a person finds them: their order in ``--help``, and the words of other programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from typer.core import TyperGroup

from vgpu.ctl.commands import Commands
from vgpu.errors import ErrorCode, VgpuError

SECTIONS: Final = {
    "vGPUs": ("create", "ls", "inspect", "set", "suspend", "resume", "migrate", "rm", "prune", "advise"),
    "Programs in vGPUs": ("run", "exec", "wait", "ps", "models", "deactivate", "hook", "jupyter"),
    "Containers and clusters": ("container", "slurm", "ray", "ray-worker", "kubelet", "extender"),
    "See what happens": ("top", "dashboard", "metrics", "trace", "events", "usage", "why", "logs"),
    "The node": ("serve", "stop", "status", "gpu", "config", "quota", "queue", "systemd"),
    "This machine": ("doctor", "demo", "verify", "simulate", "support", "version"),
}
OTHER: Final = "Other commands"
SYNONYMS: Final = {
    "delete": "rm",
    "describe": "inspect",
    "list": "ls",
    "remove": "rm",
    "show": "inspect",
    "update": "set",
}
"""Words of other programs, each of which is one of our commands. Help and completion do not list them."""
MEANT: Final = {
    "add": "create",
    "attach": "exec",
    "down": "stop",
    "edit": "set",
    "info": "inspect",
    "kill": "rm -f",
    "make": "create",
    "monitor": "top",
    "move": "migrate",
    "new": "create",
    "pause": "suspend",
    "resize": "set",
    "start": "serve",
    "stats": "top",
    "unpause": "resume",
    "up": "serve",
    "watch": "ls -w",
}
"""Words that may mean something else than what we would do: an error names the command."""


def sections(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each section with those of ``names`` that belong there, in its order. At the end, those without a section."""
    for title, members in SECTIONS.items():
        if here := [name for name in members if name in names]:
            yield title, here
    placed = {name for members in SECTIONS.values() for name in members}
    if left := [name for name in names if name not in placed]:
        yield OTHER, left


class Overview(TyperGroup):
    """The top of ``vgpuctl``: its help lists commands by section, and it understands the words of other programs."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()  # type: ignore[assignment]  # it only reads them

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        word, *rest = args
        if word in MEANT and self.get_command(ctx, word) is None:
            meant = f"vgpuctl {MEANT[word]}"
            raise VgpuError(
                ErrorCode.INVALID, f"there is no command {word!r}. Did you mean {meant}?", f"{meant} --help"
            )
        return super().resolve_command(ctx, [SYNONYMS.get(word, word), *rest])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        known = {name: command for name in self.list_commands(ctx) if (command := self.get_command(ctx, name))}
        shown = [name for name, command in known.items() if not command.hidden]
        limit = formatter.width - 6 - max(map(len, shown))
        for title, members in sections(shown):
            with formatter.section(title):
                # One column for all sections.
                wide = [(name.ljust(max(map(len, shown))), known[name].get_short_help_str(limit)) for name in members]
                formatter.write_dl(wide)
