"""vgpuctl hook install, uninstall, path: the hook for programs that are started without vgpuctl."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vgpu.ctl import options
from vgpu.ctl.options import Output, OutputOption
from vgpu.ctl.present import progress

if TYPE_CHECKING:
    from client_hook.install import Installed, UserInstallation

hook_app = typer.Typer(
    invoke_without_command=True,
    callback=options.tells_what_it_holds,
    help="The library that is preloaded into CUDA programs.",
)

SystemOption = Annotated[
    bool, typer.Option("--system", help="For every process of this machine (/etc/ld.so.preload); needs root.")
]


def user_installation() -> UserInstallation:
    from client_hook.install import UserInstallation

    home = Path.home()
    return UserInstallation(home, Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config"))


@hook_app.command("install")
def install(system: SystemOption = False, form: OutputOption = Output.TABLE) -> None:
    """Make a plain `export VGPU_ID=...` enough. Programs without it are left alone."""
    import shlex

    from client_hook import environment
    from client_hook.install import SystemInstallation
    from vgpu.ctl.present import output

    built, user = environment.hook_library(), user_installation()
    with progress.waiting("installing the hook"):
        done = SystemInstallation().install(built) if system else user.install(built)
    if form is Output.JSON:
        output.print_json(_report(done))
        return
    _print("installed", done)
    if system:
        print("Every process started from now on loads it; it sleeps until VGPU_ID is set.")
    else:
        print(f"New shells preload it. In this one: . {shlex.quote(str(user.snippet))}")


@hook_app.command("uninstall")
def uninstall(system: SystemOption = False, form: OutputOption = Output.TABLE) -> None:
    """Undo install."""
    from client_hook.install import SystemInstallation
    from client_hook.path_rules import HOOK_NAME
    from vgpu.ctl.present import output

    with progress.waiting("removing the hook"):
        done = SystemInstallation().uninstall() if system else user_installation().uninstall()
    if form is Output.JSON:
        output.print_json(_report(done))
    elif done is None:
        print("The hook was not installed" + (" for the system." if system else " for this user."))
    else:
        _print("removed", done)
        if HOOK_NAME in os.environ.get("LD_PRELOAD", ""):
            print("This shell still preloads it: unset LD_PRELOAD")


@hook_app.command("path")
def path(form: OutputOption = Output.TABLE) -> None:
    """Print where the hook of this installation is."""
    from client_hook.environment import hook_library
    from vgpu.ctl.present import output

    library = hook_library()
    if form is Output.JSON:
        output.print_json({"library": str(library)})
    else:
        print(library)


def _report(done: Installed | None) -> dict[str, Any]:
    if done is None:
        return {"library": "", "files": []}
    return {"library": str(done.library), "files": [str(file) for file in done.files]}


def _print(verb: str, done: Installed) -> None:
    print(f"{verb:<10}{done.library}")
    for file in done.files:
        print(f"{'changed' if file.exists() else 'removed':<10}{file}")


def register(app: typer.Typer) -> None:
    app.add_typer(hook_app, name="hook")
