"""vgpuctl exec and run: programs in a vGPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand

from vgpu.ctl import completion, options
from vgpu.ctl.exit_codes import report, say
from vgpu.ctl.new_vgpus import node_for_vgpu
from vgpu.ctl.options import Shell, Wanted
from vgpu.ctl.placement.room import (
    FOREVER,
    WAIT,
    WaitOption,
    is_time,
    limit_ns,
    made_when_there_is_room,
    waits_for_room,
    whole,
)
from vgpu.ctl.present import progress
from vgpu.errors import ErrorCode, VgpuError, not_yours
from vgpu.share import MEANING

if TYPE_CHECKING:
    from client_hook.environment import Attachment
    from client_hook.launcher import Supervision
    from vgpu.ctl.detached import Detached
    from vgpu.protocol.messages import VgpuStatus

COMMAND: Final = "vgpu.ctl.command"


class LaunchingCommand(TyperCommand):
    """A command line that is not parsed from another program's name on. That is the first word after the options and
    arguments of this command, or after ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own, command = self._divided(args)
        if not command and not ctx.resilient_parsing and not {"-h", "--help"} & set(own):
            raise VgpuError(
                ErrorCode.INVALID, "which program? It is missing", f"vgpuctl {ctx.info_name} ... python train.py"
            )
        if command and not command[0]:
            raise VgpuError(
                ErrorCode.INVALID,
                "the program's name is empty",
                "if a variable stands there: it is not set in this shell",
            )
        ctx.meta[COMMAND] = command
        return super().parse_args(ctx, whole(own) if waits_for_room(self) else own)

    def _divided(self, args: list[str]) -> tuple[list[str], list[str]]:
        """The words for this command, and those of the program."""
        options = [one for one in self.params if one.param_type_name == "option"]
        valued = {name for one in options if not getattr(one, "is_flag", False) for name in one.opts}
        arguments = len(self.params) - len(options)
        waits = waits_for_room(self)
        at = 0
        while at < len(args) and args[at] != "--":
            if args[at] == WAIT and waits:  # its time may be left out
                at += 2 if at + 1 < len(args) and (is_time(args[at + 1]) or args[at + 1] == FOREVER) else 1
            elif args[at].startswith("-"):
                at += 2 if args[at] in valued and args[at + 1 : at + 2] != ["--"] else 1
            elif arguments:
                arguments, at = arguments - 1, at + 1
            else:
                return args[:at], args[at:]
        return args[:at], args[at + 1 :]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[--] COMMAND [ARGUMENT]..."]


AllowUnhooked = Annotated[
    bool, typer.Option("--allow-unhooked", help="Start a program that does not load the hook, without its limits.")
]


def exec_(
    ctx: typer.Context,
    vgpu: Annotated[
        str,
        typer.Argument(
            metavar="VGPU",
            envvar="VGPU_ID",
            help="Id, unambiguous prefix of one, or name.",
            autocompletion=completion.vgpus,
        ),
    ] = "",
    allow_unhooked: AllowUnhooked = False,
) -> None:
    """Run a program in an existing vGPU. It takes the place of vgpuctl: exit code and signals are its own."""
    from client_hook.launcher import replace_process
    from vgpu.node.link import ControlLink

    if not vgpu:
        raise VgpuError(
            ErrorCode.INVALID, "no vGPU named and VGPU_ID is not set", "vgpuctl exec VGPU COMMAND, or vgpuctl ls"
        )
    if not allow_unhooked:
        check_program(ctx)
    try:
        with ControlLink() as node:
            vgpus = [node.inspect(one.strip()).vgpu for one in vgpu.split(",")]
    except VgpuError as error:
        if error.code is ErrorCode.NOT_FOUND and os.environ.get("VGPU_ID") not in {None, "", vgpu}:
            hint = f"if it is a program for the vGPU in VGPU_ID: vgpuctl exec -- {vgpu} ..."
            raise VgpuError(error.code, error.message, hint) from error
        raise
    for one in vgpus:
        _check_owner(one)
    replace_process(ctx.meta[COMMAND], environment_for(ctx.meta[COMMAND], vgpus))


def check_program(ctx: typer.Context) -> None:
    """Check before anything is made. Reason: a program that loads no hook has the whole GPU, without a sign of it."""
    from client_hook.environment import hook_to_preload
    from client_hook.preloadable import check_preloadable

    system_hook = hook_to_preload() is None
    command = f"vgpuctl {ctx.info_name}"
    check_preloadable(ctx.meta[COMMAND], os.environ, system_hook=system_hook, command=command)


def _check_owner(vgpu: VgpuStatus) -> None:
    """Refuse another user's vGPU, because its broker would not admit the program, with an error of CUDA. The broker
    itself checks the members of a group."""
    if vgpu.spec.share_group is None and os.getuid() not in {0, vgpu.owner_uid}:
        raise not_yours(vgpu.vgpu_id, vgpu.owner_uid, os.getuid())


@options.describes_vgpu
def run(
    wanted: Wanted,
    ctx: typer.Context,
    allow_unhooked: AllowUnhooked = False,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Return once the vGPU is made; print its id. Output goes to a file.")
    ] = False,
    wait: WaitOption = None,
) -> int:
    """Make a vGPU, run a program in it, and remove it after. Exit code and signals are the program's own.

    However run ends, the vGPU goes, as soon as no process is attached to it.
    """
    from client_hook.launcher import Supervision
    from vgpu.ctl.detached import detach as fork
    from vgpu.ctl.detached import log_of

    if not allow_unhooked:
        check_program(ctx)
    child = fork() if detach else None
    if isinstance(child, tuple):
        vgpu_id, code = child
        if vgpu_id:
            print(vgpu_id)
            say(
                f"the program's output goes to {log_of(vgpu_id)}", f"vgpuctl wait {vgpu_id}, or vgpuctl rm -f {vgpu_id}"
            )
        return code
    longest_ns = limit_ns(wait)
    if longest_ns is not None:
        # Before signals are held: a person may give up. If this process ends, the vGPU goes.
        with made_when_there_is_room(longest_ns, spec=wanted.spec, gpu=wanted.gpu, lifetime="process") as (_, vgpu):
            pass
        with Supervision() as supervision:
            return _supervised(ctx, supervision, vgpu, child)
    asking = node_for_vgpu()  # before signals are held: a node that it starts would inherit that
    with Supervision() as supervision:
        with asking as node, progress.waiting("making a vGPU"):
            vgpu = node.create(wanted.spec, wanted.gpu, lifetime="process")
        return _supervised(ctx, supervision, vgpu, child)


def _supervised(ctx: typer.Context, supervision: Supervision, vgpu: VgpuStatus, child: Detached | None) -> int:
    """Run the program, and remove the vGPU when it has ended."""
    try:
        if child is not None:
            child.made(vgpu.vgpu_id)
        return supervision.run(ctx.meta[COMMAND], environment_for(ctx.meta[COMMAND], [vgpu]))
    finally:
        _remove(vgpu.vgpu_id)


def _remove(vgpu_id: str) -> None:
    """Remove the vGPU on a fresh link, because the program may have run for days. A node that is gone has recorded the
    vGPU for the next one."""
    from vgpu.node.link import PATIENT_S, ControlLink

    try:
        with ControlLink(timeout_s=PATIENT_S) as node, progress.waiting(f"removing {vgpu_id}"):
            node.remove(vgpu_id, force=True)
    except VgpuError as error:
        if error.code is ErrorCode.UNREACHABLE:
            say(f"{vgpu_id} stays: {error.message}", f"once a node runs again: vgpuctl rm {vgpu_id}")
        elif error.code is not ErrorCode.NOT_FOUND:  # its --ttl may have ended first
            report(error)


def environment_for(command: Sequence[str], vgpus: Sequence[VgpuStatus]) -> dict[str, str]:
    """The environment of ``command`` in these vGPUs. The hook is preloaded last. A sanitizer's runtime that the program
    is linked with is preloaded first."""
    from client_hook.sanitizers import with_sanitizers_first

    return with_sanitizers_first(command[0], attachment(vgpus).environment(os.environ))


def attachment(vgpus: Sequence[VgpuStatus]) -> Attachment:
    """What makes a process one of these vGPUs, which all belong to one node."""
    from client_hook.environment import Attachment, Simulation, hook_to_preload, simulation_libraries

    environment = vgpus[0].environment
    simulation = None
    if vgpus[0].simulated:
        simulation = Simulation(Path(environment["VGPU_SIM_DIR"]), simulation_libraries())
    return Attachment(
        vgpu_ids=tuple(vgpu.vgpu_id for vgpu in vgpus),
        runtime_dir=Path(environment["VGPU_RUNTIME_DIR"]),
        hook=hook_to_preload(),
        simulation=simulation,
    )


def deactivate(shell: Annotated[Shell, typer.Option(help="Which shell reads the lines.")] = Shell.SH) -> None:
    """Print lines for eval that undo create -o env."""
    from client_hook.environment import deactivation, fish_lines, shell_lines

    if changes := deactivation(os.environ):
        print((fish_lines if shell is Shell.FISH else shell_lines)(changes))


def register(app: typer.Typer) -> None:
    app.command("exec", cls=LaunchingCommand)(exec_)
    app.command("deactivate")(deactivate)
    app.command("run", cls=LaunchingCommand, epilog=options.explained(MEANING))(run)
