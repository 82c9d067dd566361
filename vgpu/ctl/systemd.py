"""vgpuctl systemd show and install: the units of the node and its companions, with the path of this installation."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from client_hook import interpreter
from vgpu import extras
from vgpu.ctl import options
from vgpu.errors import ErrorCode, VgpuError

systemd_app = typer.Typer(
    invoke_without_command=True,
    callback=options.tells_what_it_holds,
    help="Units for systemd: the node as a service.",
)

_PROGRAM: Final = "/usr/bin/vgpuctl"
"""The program in the units of ``deploy/systemd``, for packages of a distribution."""


class Unit(StrEnum):
    NODE = "vgpu"
    DASHBOARD = "vgpu-dashboard"
    METRICS = "vgpu-metrics"


_EXTRAS: Final = {Unit.DASHBOARD: "web", Unit.METRICS: "metrics"}

UnitsArgument = Annotated[
    list[Unit] | None, typer.Argument(metavar="UNIT...", help="vgpu, vgpu-dashboard, vgpu-metrics.")
]
UserOption = Annotated[bool, typer.Option("--user", help="The node of this user alone, not of the machine.")]


@systemd_app.command("show")
def show(units: UnitsArgument = None, user: UserOption = False) -> None:
    """Print units as install would write them; vgpu if none is named."""
    print("\n".join(text(unit, user=user) for unit in units or [Unit.NODE]), end="")


@systemd_app.command("install")
def install(units: UnitsArgument = None, user: UserOption = False) -> None:
    """Put units in their place; vgpu if none is named. Nothing is started."""
    chosen = units or [Unit.NODE]
    for unit, extra in _EXTRAS.items():
        if unit in chosen:
            extras.need(f"{unit}.service", extra)
    folder = user_folder() if user else Path("/etc/systemd/system")
    texts = {folder / f"{unit}.service": text(unit, user=user) for unit in chosen}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in texts.items():
            path.write_text(content)
            print(f"installed {path}")
    except PermissionError as error:
        hint = "sudo vgpuctl systemd install; or, for a node of your own: vgpuctl systemd install --user"
        raise VgpuError(ErrorCode.NOT_YOURS, f"cannot write {error.filename}", hint) from error
    control = "systemctl --user" if user else "systemctl"
    print(f"start them, now and at boot: {control} daemon-reload && {control} enable --now {' '.join(chosen)}")
    if user:
        print("without a login, too: loginctl enable-linger")


def text(unit: Unit, *, user: bool) -> str:
    """The unit, for the program that runs now. ``VgpuError``: the installation lacks it, or there is none for users."""
    from vgpu.data_files import shipped

    if user and unit is not Unit.NODE:
        raise VgpuError(
            ErrorCode.INVALID,
            f"{unit} is a unit of the machine",
            f"in a user's session: vgpuctl {unit.partition('-')[2]}",
        )
    name = "vgpu-user" if user else unit.value
    return shipped(f"systemd/{name}.service").read_text().replace(_PROGRAM, " ".join(map(quoted, program())))


def program() -> list[str]:
    """The argv by which systemd, which knows no virtual environment, starts this very vgpuctl."""
    script = Path(interpreter.command("")[0]).with_name("vgpuctl")
    return [str(script)] if os.access(script, os.X_OK) else interpreter.command("vgpu.ctl")


def quoted(argument: str) -> str:
    """As a word of ``ExecStart=`` (systemd.service(5)): % and $ are doubled, white space and quotes are quoted."""
    doubled = argument.replace("%", "%%").replace("$", "$$")
    if any(character in doubled for character in " \t\"'\\;"):
        return '"' + doubled.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return doubled


def user_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def register(app: typer.Typer) -> None:
    app.add_typer(systemd_app, name="systemd")
