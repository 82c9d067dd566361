"""vgpuctl gpu drain, undrain and defragment: vGPUs that move so that a GPU gets empty, or has room."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from vgpu.ctl import completion
from vgpu.ctl.exit_codes import Exit, report, say
from vgpu.ctl.options import Mem, Output, OutputOption, Sm
from vgpu.ctl.placement.room import WaitingCommand, WaitOption, limit_ns
from vgpu.ctl.present import progress
from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from vgpu.node.link import ControlLink
    from vgpu.placement.moves import Move, Plan

POLICY: Final = "fit"
"""By which the vGPUs find their other GPU: it leaves most for requests such as those that are here."""
AGAIN_S: Final = 2.0
GpuArgument = Annotated[str, typer.Argument(metavar="GPU", help="Index or UUID.", autocompletion=completion.gpus)]


def drain(
    gpu: GpuArgument,
    migrate: Annotated[
        bool, typer.Option("--migrate/--stay", help="Move its vGPUs to other GPUs, or leave them.")
    ] = True,
    wait: WaitOption = None,
) -> Exit:
    """Let a GPU take no new vGPUs, and move its vGPUs to other GPUs.

    Exits with 4 if vGPUs stay on it; asked again, it goes on. gpu undrain takes it back.
    """
    from vgpu.node.link import ControlLink
    from vgpu.units import counted

    longest_ns = limit_ns(wait)
    deadline = time.monotonic() + (longest_ns or 0) / 1e9
    said: set[tuple[str, str]] = set()
    with ControlLink() as node:
        index = node.set_gpu(gpu, draining=True).index
        while True:
            stay = _moved_away(node, index) if migrate else ()
            left = [vgpu.vgpu_id for vgpu in node.list() if vgpu.gpu_index == index]
            if not left:
                print(f"GPU {index} is drained, and has no vGPU")
                return Exit.OK
            if time.monotonic() >= deadline:
                break
            for one in set(stay) - said:
                say(f"{one[0]} stays on GPU {index}: {one[1]}")
            said |= set(stay)
            time.sleep(min(AGAIN_S, max(0.0, deadline - time.monotonic())))
    for vgpu_id, reason in stay:
        if (vgpu_id, reason) not in said:
            say(f"{vgpu_id} stays on GPU {index}: {reason}")
    say(f"GPU {index} takes no new vGPUs, and still has {counted(len(left), 'vGPU')}: {', '.join(left)}")
    return Exit.REFUSED


def undrain(gpu: GpuArgument) -> None:
    """Let a drained GPU take vGPUs again."""
    from vgpu.node.link import ControlLink

    with ControlLink() as node:
        found = node.set_gpu(gpu, draining=False)
    print(f"GPU {found.index} takes vGPUs")


def defragment(
    sm: Sm = None,
    mem: Mem = None,
    apply: Annotated[bool, typer.Option("--apply", help="Carry the plan out. Otherwise it is only printed.")] = False,
    form: OutputOption = Output.TABLE,
) -> Exit:
    """Plan migrations that make room for a vGPU of a size, or that empty a GPU.

    With --sm (and --mem), one GPU has room for such a vGPU afterwards. Without, one GPU has no vGPU. The plan copies as
    little memory as possible. Exits with 4 if there is none.
    """
    from vgpu.ctl.present import output
    from vgpu.node.link import ControlLink
    from vgpu.placement.moves import consolidate, make_room
    from vgpu.spec import VgpuSpec, as_options
    from vgpu.units import counted, format_bytes

    if mem is not None and sm is None:
        raise VgpuError(ErrorCode.INVALID, "--mem goes with --sm: it is the size of one vGPU", "--sm 30 --mem 8G")
    spec = None if sm is None else VgpuSpec.parse(sm_percent=sm, memory_bytes=mem)
    with ControlLink() as node:
        now = node.look()
        plan = (
            consolidate(POLICY, now.gpus, now.vgpus) if spec is None else make_room(POLICY, spec, now.gpus, now.vgpus)
        )
        size = "" if spec is None else as_options(spec.model_dump(exclude_defaults=True))
        if plan is None:
            raise VgpuError(
                ErrorCode.NO_ROOM,
                f"no plan makes room for {size}" if size else "no GPU can be emptied by migrations",
                "see: vgpuctl ls; vgpuctl gpu ls",
            )
        if form is Output.JSON:
            output.print_json({"gpu": plan.gpu, "moves": [_fields(move) for move in plan.moves]})
        elif not plan.moves:
            print(f"GPU {plan.gpu} has room for {size} already")
        else:
            for move in plan.moves:
                print(_line(move))
            result = f"GPU {plan.gpu} has room for {size}" if size else f"GPU {plan.gpu} has no vGPU"
            moves, copied = counted(len(plan.moves), "migration"), format_bytes(plan.copied_bytes)
            print(f"then {result}: {moves}, {copied} to copy" + ("" if apply else "; --apply does it"))
        return _carried_out(node, plan) if apply else Exit.OK


def _moved_away(node: ControlLink, index: int) -> tuple[tuple[str, str], ...]:
    """Move the vGPUs of the GPU to others. Returns those that stay, with the reason."""
    from vgpu.placement.moves import drain as planned

    now = node.look()
    plan = planned(POLICY, index, now.gpus, now.vgpus)
    stay = list(plan.stay)
    for move in plan.moves:
        print(_line(move), flush=True)
        try:
            _migrate(node, move)
        except VgpuError as error:
            stay.append((move.vgpu_id, error.message))
    return tuple(stay)


def _carried_out(node: ControlLink, plan: Plan) -> Exit:
    """Carries the plan out. The first move that fails ends it: the moves after it may need its room."""
    for move in plan.moves:
        try:
            _migrate(node, move)
        except VgpuError as error:
            report(error)
            say(f"{move.vgpu_id} did not move; what moved before stays where it is now")
            return Exit.REFUSED
    return Exit.OK


def _migrate(node: ControlLink, move: Move) -> None:
    with progress.waiting(f"{move.vgpu_id} moves to GPU {move.target}"):
        node.migrate(move.vgpu_id, str(move.target))


def _line(move: Move) -> str:
    from vgpu.units import format_bytes

    return f"{move.vgpu_id}: GPU {move.source} to GPU {move.target}, {format_bytes(move.memory_bytes)}"


def _fields(move: Move) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(move)


def add_to(app: typer.Typer) -> None:
    """Adds them to ``vgpuctl gpu``."""
    app.command("drain", cls=WaitingCommand)(drain)
    app.command("undrain")(undrain)
    app.command("defragment")(defragment)
