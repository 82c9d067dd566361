"""The order of commands in ``vgpuctl --help``: by what they are for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from typer.core import TyperGroup

SECTIONS: Final = {
    "vGPUs": ("create", "ls", "inspect", "set", "suspend", "resume", "migrate", "rm"),
    "Programs in vGPUs": ("run", "exec", "ps", "hook", "jupyter"),
    "See what happens": ("top", "dashboard", "metrics", "trace", "events", "logs"),
    "The node": ("serve", "stop", "status", "gpu", "config", "systemd"),
    "This machine": ("doctor", "demo", "verify", "support", "version"),
}
OTHER: Final = "Other commands"


def sections(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each section with those of ``names`` that belong there, in its order. At the end, those without a section."""
    for title, members in SECTIONS.items():
        if here := [name for name in members if name in names]:
            yield title, here
    placed = {name for members in SECTIONS.values() for name in members}
    if left := [name for name in names if name not in placed]:
        yield OTHER, left


class Overview(TyperGroup):
    """The top of ``vgpuctl``: its help lists commands by section."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        known = {name: command for name in self.list_commands(ctx) if (command := self.get_command(ctx, name))}
        shown = [name for name, command in known.items() if not command.hidden]
        limit = formatter.width - 6 - max(map(len, shown))
        for title, members in sections(shown):
            with formatter.section(title):
                # One column for all sections.
                wide = [(name.ljust(max(map(len, shown))), known[name].get_short_help_str(limit)) for name in members]
                formatter.write_dl(wide)
