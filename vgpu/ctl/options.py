"""Options that several commands take, each declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from vgpu import retired
from vgpu.ctl import completion
from vgpu.enums import LeaseChoice, OnServerLoss, Oversubscribe, PriorityName
from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from vgpu.spec import VgpuSpec


P = ParamSpec("P")
R = TypeVar("R")


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


class Listed(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    NAME = "name"
    YAML = "yaml"
    JSON = "json"


class Created(StrEnum):
    ID = "id"
    ENV = "env"
    FISH = "fish"
    JSON = "json"


class Shell(StrEnum):
    SH = "sh"
    FISH = "fish"


class Mode(StrEnum):
    AUTO = "auto"
    SPATIAL = "spatial"
    TEMPORAL = "temporal"


class Unmanaged(StrEnum):
    REPORT = "report"
    SUSPEND = "suspend"
    KILL = "kill"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="A table for people, JSON for programs.")]
VgpuArgument = Annotated[
    str,
    typer.Argument(metavar="VGPU", help="Id, unambiguous prefix of one, or name.", autocompletion=completion.vgpus),
]

# One text serves create, run and set. Only a new vGPU has defaults, and set changes nothing that is not given. So each
# text calls a default that of new vGPUs.
Sm = Annotated[str | None, typer.Option(metavar="PERCENT", help="Percent of the compute, as in 30; 20..60: by demand.")]
Mem = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Device memory, as in 8G; 8G..16G: by demand. New vGPUs: the same part as --sm."),
]
MemLimit = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="May use up to this while no vGPU was promised that memory. New vGPUs: --mem."),
]
MemPerProcess = Annotated[
    str | None, typer.Option(metavar="SIZE", help="The most that one process may allocate. New vGPUs: all of it.")
]
QuotaRequest = Annotated[
    str | None, typer.Option(metavar="PERCENT", help="Guaranteed percent of the time. New vGPUs: the limit.")
]
QuotaLimit = Annotated[str | None, typer.Option(metavar="PERCENT", help="Largest percent of the time. New vGPUs: 100.")]
BURST = "May use what is idle beyond its share."
OVERCOMMIT = "Admit it even if shares add up to more than the GPU; they become weights."
PriorityOption = Annotated[
    PriorityName | None, typer.Option(help="Which goes first of those that are owed time. New vGPUs: normal.")
]
Fraction = Annotated[
    str | None, typer.Option(metavar="PART", help="Part of compute and memory, as in 1/4; --sm and --mem override it.")
]
ShareGroup = Annotated[
    str | None, typer.Option(metavar="GROUP", help="Members of this Unix group may run programs in it.")
]
Group = Annotated[
    str | None, typer.Option(metavar="NAME", help="Your vGPUs with this name, one per GPU, hold at the same time.")
]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="A name to use instead of the id.")]
Ttl = Annotated[str | None, typer.Option(metavar="TIME", help="Remove it after this time, as in 8h. New vGPUs: never.")]
IdleSuspend = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Suspend it when idle for so long, as in 10m, until it is used; off: never."),
]
ResumeOn = Annotated[
    list[str] | None,
    typer.Option(metavar="TRIGGER", help="While it is idle-suspended, resume it on a connection, as in tcp:8000; off."),
]
OversubscribeOption = Annotated[
    Oversubscribe | None,
    typer.Option(help="Allow more memory than the card has left: we swap between tokens, or the driver pages."),
]
LeaseOption = Annotated[
    LeaseChoice | None,
    typer.Option(help="exclusive: never on the GPU beside others. New vGPUs: auto, beside others while light."),
]
SloOption = Annotated[
    str | None,
    typer.Option("--slo", metavar="TARGETS", help="Latency targets, as in tpot=30ms,ttft=500ms; or: off."),
]
LossOption = Annotated[
    OnServerLoss | None, typer.Option(help="What its programs do without the GPU Server. New vGPUs: block.")
]


Quantum = Annotated[str | None, typer.Option("--quantum", hidden=True)]
"""The old name of ``--period``."""


def renamed(old: str, said: str | None, value: str | None) -> str | None:
    """``value`` of an option that was called ``old``, and under that name has the value ``said``."""
    if said is None:
        return value
    from vgpu.ctl.exit_codes import say

    new = retired.OPTIONS[old]
    if value is not None:
        raise VgpuError(ErrorCode.INVALID, f"{old} and {new} are the same option", f"leave out {old}")
    say(retired.instead(old, new))
    return said


def tells_what_it_holds(ctx: typer.Context) -> None:
    """The callback of a group of commands: alone, it prints its help."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def explained(text: str) -> str:
    """``text`` as the end of a command's help: indented paragraphs are kept as they are, others are wrapped."""
    return "\n\n".join(f"\b\n{part}" if part.startswith(" ") else part for part in text.strip().split("\n\n"))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A vGPU as described by options: ``spec``, and the GPU it should be on (``auto``, an index or a UUID)."""

    spec: VgpuSpec
    gpu: str


def _wanted(
    sm: Sm = None,
    mem: Mem = None,
    mem_limit: MemLimit = None,
    mem_per_process: MemPerProcess = None,
    fraction: Fraction = None,
    quota_request: QuotaRequest = None,
    quota_limit: QuotaLimit = None,
    burst: Annotated[bool, typer.Option("--burst", help=BURST)] = False,
    priority: PriorityOption = None,
    gpu: Annotated[
        str,
        typer.Option("--gpu", metavar="GPU", help="auto, an index or a UUID.", autocompletion=completion.gpus_or_auto),
    ] = "auto",
    name: Name = None,
    ttl: Ttl = None,
    idle_suspend: IdleSuspend = None,
    resume_on: ResumeOn = None,
    overcommit: Annotated[bool, typer.Option("--overcommit", help=OVERCOMMIT)] = False,
    oversubscribe: OversubscribeOption = None,
    lease: LeaseOption = None,
    slo: SloOption = None,
    on_server_loss: LossOption = None,
    share_group: ShareGroup = None,
    group: Group = None,
) -> Wanted:
    from vgpu.spec import VgpuSpec

    if sm is None and fraction is None:
        sm = _default_share()
    spec = VgpuSpec.parse(
        sm_percent=sm,
        memory_bytes=mem,
        memory_limit_bytes=mem_limit,
        process_memory_bytes=mem_per_process,
        fraction=fraction,
        quota_request_percent=quota_request,
        quota_limit_percent=quota_limit,
        burst=burst,
        priority=priority,
        name=name,
        ttl_ns=ttl,
        idle_suspend_ns=idle_suspend,
        resume_on=resume_on or None,
        overcommit=overcommit,
        oversubscribe=oversubscribe,
        lease=lease,
        slo=slo,
        on_server_loss=on_server_loss,
        share_group=share_group,
        group=group,
    )
    return Wanted(spec, gpu)


def _default_share() -> str | None:
    """The share that the node's quota gives where a user does not say; None: there is none, or no node answers."""
    from vgpu.node.link import ControlLink

    try:
        with ControlLink() as node:
            share = node.quota().quota.get("default_sm")
    except VgpuError:
        return None
    return None if share is None else f"{share:g}"


def describes_vgpu(command: Callable[Concatenate[Wanted, P], R]) -> Callable[..., R]:
    """Gives ``command`` the options that describe a vGPU; it receives them as its first argument, one ``Wanted``."""
    described = inspect.signature(_wanted, eval_str=True)
    own = inspect.signature(command, eval_str=True)
    # Keyword-only, so that options with and without a default may come in any order.
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in (*described.parameters.values(), *list(own.parameters.values())[1:])
    ]

    @wraps(command)
    def with_options(**options: Any) -> R:
        wanted = _wanted(**{name: options.pop(name) for name in described.parameters})
        return command(wanted, **options)  # type: ignore[call-arg]

    # typer reads a command's options from its signature and annotations.
    with_options.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options
