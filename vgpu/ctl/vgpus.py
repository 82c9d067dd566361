"""vgpuctl create, ls, inspect, ps, set, rm: vGPUs, from first to last."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from vgpu.ctl import completion, options
from vgpu.ctl.exit_codes import Exit, report, say
from vgpu.ctl.mistakes import SetCommand
from vgpu.ctl.new_vgpus import node_for_vgpu
from vgpu.ctl.options import Created, Listed, Output, OutputOption, VgpuArgument, Wanted
from vgpu.ctl.placement.room import WaitingCommand, WaitOption, limit_ns, made_when_there_is_room
from vgpu.ctl.present import output, progress, tables
from vgpu.ctl.present.output import Cell
from vgpu.errors import ErrorCode, VgpuError
from vgpu.share import MEANING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vgpu.node.link import ControlLink
    from vgpu.protocol.messages import VgpuDetail, VgpuStatus
    from vgpu.protocol.tenancy import QueueReading
    from vgpu.spec import VgpuChanges


class AttachChoice(StrEnum):
    """Which processes the vGPU admits."""

    OWNER = "owner"
    MOUNT = "mount"


IDLE: Final = frozenset({"idle", "suspended", "idle-suspended", "swapped", "failed"})
"""States in which ``prune`` removes a vGPU without programs."""


@options.describes_vgpu
def create(
    wanted: Wanted,
    form: Annotated[
        Created, typer.Option("-o", "--output", help="The id, lines for eval (env; fish), or everything.")
    ] = Created.ID,
    owner: Annotated[
        str | None, typer.Option(metavar="USER", help="As root: the user whose vGPU it will be, by name or uid.")
    ] = None,
    attach: Annotated[
        AttachChoice, typer.Option(help="mount: containers of any user that have its directory mounted may use it.")
    ] = AttachChoice.OWNER,
    wait: WaitOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make nothing; print which GPU it would get, and why.")
    ] = False,
) -> int:
    """Make a vGPU and print its VGPU_ID."""
    from vgpu.api.owner import uid_of

    if dry_run:
        from vgpu.ctl.placement.explain import explain

        return explain(wanted)
    owner_uid = None if owner is None else uid_of(owner)
    asked: dict[str, Any] = {"confirm": False, "owner_uid": owner_uid, "attach": attach.value}
    if (longest_ns := limit_ns(wait)) is not None:
        with made_when_there_is_room(longest_ns, spec=wanted.spec, gpu=wanted.gpu, **asked) as (node, vgpu):
            _keep(node, vgpu, form)
        return Exit.OK
    with node_for_vgpu() as node:
        with progress.waiting("making a vGPU"):
            vgpu = node.create(wanted.spec, wanted.gpu, **asked)
        _keep(node, vgpu, form)
    return Exit.OK


def _keep(node: ControlLink, vgpu: VgpuStatus, form: Created) -> None:
    warn(vgpu)
    _print_made(vgpu, form)  # until its id is out, it goes with this process
    node.confirm(vgpu)


def _print_made(vgpu: VgpuStatus, form: Created) -> None:
    if form is Created.JSON:
        output.print_json(vgpu)
    elif form in {Created.ENV, Created.FISH}:
        from client_hook.environment import activation, fish_lines, shell_lines
        from vgpu.ctl.programs import attachment

        lines = fish_lines if form is Created.FISH else shell_lines
        print(lines(activation(attachment([vgpu]), os.environ)))
    else:
        print(vgpu.vgpu_id)
    sys.stdout.flush()


def warn(vgpu: VgpuStatus) -> None:
    """Print the vGPU's warnings on stderr; inspect prints them again."""
    for warning in vgpu.warnings:
        say(f"{vgpu.vgpu_id}: {warning}")


def ls(
    vgpus: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VGPU]...", help="These alone: ids, prefixes, or names.", autocompletion=completion.vgpus
        ),
    ] = None,
    form: Annotated[
        Listed, typer.Option("-o", "--output", help="wide: all columns, uncut; name: names, or ids of those without.")
    ] = Listed.TABLE,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Ids only.")] = False,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Keep the table current until Ctrl-C.")] = False,
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", metavar="KEY=VALUE", help="Those alone, as in state=idle, name=a*; may be repeated."),
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="KEY", help="By a column, as in memory: the largest first.", show_default=False)
    ] = "",
) -> None:
    """List the vGPUs of this node."""
    from vgpu.ctl.present.listing import chosen, named
    from vgpu.node.link import ControlLink

    if watch and (quiet or form is not Listed.TABLE):
        raise VgpuError(
            ErrorCode.INVALID, "--watch shows a table; it goes with neither -q nor another -o", "vgpuctl ls -w"
        )
    choose = chosen(filters or (), sort)
    with ControlLink() as node:
        if watch:
            snapshots = (notice.snapshot for notice in node.watch())
            _watch(choose(named(vgpus, one.vgpus)) for one in snapshots if one is not None)
            return
        everything = node.list()
        is_shown = form in {Listed.TABLE, Listed.WIDE} and not quiet and not vgpus and sys.stdout.isatty()
        waiting = _waiting(node) if is_shown else ()  # a program that reads the table expects nothing but its rows
    found = choose(named(vgpus, everything, missing_is_error=True))
    if form is Listed.JSON:
        output.print_json(found)
    elif form is Listed.YAML:
        output.print_yaml(found)
    elif quiet or form is Listed.NAME:
        for vgpu in found:
            print(vgpu.vgpu_id if quiet else vgpu.name or vgpu.vgpu_id)
    elif not found and sys.stdout.isatty():
        print("No vGPU fits." if everything else "No vGPU yet. vgpuctl run --sm 30 --mem 8G COMMAND makes one.")
    else:
        output.print_table(tables.VGPUS, map(tables.vgpu_row, found), whole=form is Listed.WIDE)
    if waiting:
        from vgpu.ctl.placement.queue import print_queue

        print()
        print_queue(waiting)


def _waiting(node: ControlLink) -> tuple[QueueReading, ...]:
    """The requests that wait for room; none of a node of an older release."""
    from vgpu.protocol.versions import QUEUE_SINCE

    return node.queue() if node.welcome.version >= QUEUE_SINCE else ()


def _watch(states: Iterable[list[VgpuStatus]]) -> None:
    from rich.live import Live

    with Live(console=output.console(), auto_refresh=False) as live:
        for vgpus in states:
            rows = map(tables.vgpu_row, vgpus)
            live.update(output.table_text(tables.VGPUS, rows, live.console.width), refresh=True)


def inspect(vgpu: VgpuArgument, form: OutputOption = Output.TABLE) -> None:
    """Everything about one vGPU: promised, used, and by whom."""
    from vgpu.node.link import ControlLink

    with ControlLink() as node:
        detail = node.inspect(vgpu)
    if form is Output.JSON:
        output.print_json(detail)
    else:
        _print_detail(detail)


def facts(detail: VgpuDetail) -> dict[str, str | Cell]:
    """The facts about a vGPU, by name."""
    from vgpu.protocol.triggers import awaited
    from vgpu.units import counted, format_bytes, format_duration

    vgpu, gpu = detail.vgpu, detail.gpu
    idle_ns = vgpu.spec.idle_suspend_ns
    part = tables.percent(vgpu.sm_percent_granted / 100)
    refused, last = counted(vgpu.memory_refusals, "allocation"), format_bytes(vgpu.memory_refused_bytes)
    width = f", on {part} of the SMs" if vgpu.sm_percent_granted < 100 else ""
    busy = format_duration(tables.rounded_ns(vgpu.busy_ns))
    return {
        "vGPU": vgpu.vgpu_id + (f" ({vgpu.name})" if vgpu.name else ""),
        "state": Cell(f"{vgpu.state}: {vgpu.reason}", "red") if vgpu.reason else tables.state(vgpu.state),
        "GPU": f"{tables.gpu_label(gpu.index, gpu.simulated)}, {gpu.name}, {gpu.mode} mode",
        "share": f"{tables.share(vgpu.guarantee_ratio, vgpu.limit_ratio)} of the time{width}",
        **_scaling(vgpu),
        **({"lifetime": f"ends with process {vgpu.asker_pid}"} if vgpu.lifetime == "process" else {}),
        "priority": vgpu.spec.priority,
        "group": vgpu.spec.group or "none",
        "when idle": f"suspended after {format_duration(idle_ns)}{_also(vgpu)}" if idle_ns else "stays on the GPU",
        **({"resumes on": until} if (until := awaited(vgpu.resume_on, vgpu.resume_at_unix_s)) else {}),
        "used": f"{tables.percent(vgpu.busy_ratio)} of the GPU, {_tokens(vgpu)}",
        **({"lease": _lease(vgpu)} if vgpu.mode == "temporal" and vgpu.demand_ratio else {}),
        **tables.targets(vgpu),
        **_moving(vgpu),
        "total": f"{counted(vgpu.tokens, 'token')}, {busy} of GPU time, {counted(vgpu.launches, 'launch')}",
        "memory": f"{tables.used_of(vgpu.memory_used_bytes, vgpu.memory_limit_bytes)}, "
        f"peak {format_bytes(vgpu.memory_peak_bytes)}",
        "refused": f"{refused}, the last of {last}" if vgpu.memory_refusals else "no allocation",
        "owner": f"uid {vgpu.owner_uid}" + (f", group {vgpu.spec.share_group}" if vgpu.spec.share_group else ""),
    }


def _also(vgpu: VgpuStatus) -> str:
    """What resumes it by itself, besides a CUDA call."""
    from vgpu.protocol.triggers import awaited

    ports = awaited(vgpu.spec.resume_on, None)
    return f", until a CUDA call or {ports}" if ports else ""


def _scaling(vgpu: VgpuStatus) -> dict[str, str]:
    """The bounds between which the node changes its size."""
    from vgpu.units import range_text

    sm, memory = vgpu.spec.sm_range_percent, vgpu.spec.memory_range_bytes
    said = [f"--sm {range_text(sm, is_size=False)}"] if sm is not None else []
    said += [f"--mem {range_text(memory, is_size=True)}"] if memory is not None else []
    wanted = ["one replica more is wanted"] if vgpu.replicas_wanted else []
    return {"scales": ", ".join([" ".join(said), *wanted])} if said else {}


def _tokens(vgpu: VgpuStatus) -> str:
    """Which tokens it has, or how many."""
    if vgpu.shares:
        return "a shared token"
    return "a token without an end" if vgpu.open_ended else f"{tables.token_rate(vgpu)} tokens/s"


def _lease(vgpu: VgpuStatus) -> str:
    """Which leases it gets, and why."""
    from vgpu.units import format_duration

    needs = f"its programs need the GPU for {tables.percent(vgpu.demand_ratio)} of their time"
    if vgpu.burst_ns:
        needs += f", {format_duration(tables.rounded_ns(vgpu.burst_ns))} of work between two waits"
    if vgpu.shares:
        return f"shared, beside the other vGPUs: {needs}"
    if vgpu.light and vgpu.spec.lease == "exclusive":
        return f"exclusive, as asked for: {needs}"
    return f"{'light' if vgpu.light else 'heavy'}, in turns beside others: {needs}"


def _print_detail(detail: VgpuDetail) -> None:
    output.print_facts(facts(detail))
    for kind, notes in detail.remarks.items():
        for note in notes:
            for word, line in zip_longest([kind], output.wrapped(note, indent=10), fillvalue=""):
                print(f"{word:<10}{line}")
    if detail.processes:
        print()
        rows = [tables.process_row(process, detail.vgpu) for process in detail.processes]
        output.print_table(tables.PROCESSES, rows)


def _moving(vgpu: VgpuStatus) -> dict[str, str]:
    """Facts that are only sometimes worth a line."""
    from vgpu.units import counted, format_bytes, format_duration

    facts = {}
    if vgpu.waiting_ns:
        facts["waiting"] = f"for a token, since {format_duration(tables.rounded_ns(vgpu.waiting_ns))}"
    if vgpu.window_ns:
        facts["window"] = f"{format_duration(vgpu.window_ns)} of work in flight, while others want"
    if vgpu.swaps_out or vgpu.swaps_in:
        away = format_bytes(vgpu.memory_away_bytes)
        facts["swapped"] = f"{counted(vgpu.swaps_out, 'time')} out, {vgpu.swaps_in} in; {away} is away"
    if vgpu.memory_shared_bytes:
        facts["shared"] = f"{format_bytes(vgpu.memory_shared_bytes)} of its memory, with processes that are not charged"
    if vgpu.memory_imported_bytes:
        facts["imported"] = f"{format_bytes(vgpu.memory_imported_bytes)}, charged to the vGPU that shares it"
    if vgpu.memory_pinned_bytes:
        facts["host memory"] = f"pinned for {format_bytes(vgpu.memory_pinned_bytes)} of a swap"
    return facts


def ps(
    vgpu: Annotated[
        str,
        typer.Argument(metavar="VGPU", help="Only this vGPU's.", show_default=False, autocompletion=completion.vgpus),
    ] = "",
    everyone: Annotated[
        bool, typer.Option("-a", "--all", help="Also programs that use a GPU of this node outside all vGPUs.")
    ] = False,
    form: OutputOption = Output.TABLE,
) -> None:
    """List the processes that run in vGPUs."""
    from vgpu.node.link import ControlLink

    if everyone and vgpu:
        raise VgpuError(ErrorCode.INVALID, "--all lists those of every vGPU and of none: it goes with no VGPU", "")
    with ControlLink() as node:
        found = node.processes(vgpu)
        vgpus = {one.vgpu_id: one for one in node.list()} if form is Output.TABLE else {}
        outside = [one for gpu in node.gpus() for one in gpu.outside] if everyone else []
    if form is Output.JSON:
        output.print_json([*found.processes, *outside])
    elif not found.processes and not outside and sys.stdout.isatty():
        print("No program runs in this vGPU." if vgpu else "No program runs in a vGPU.")
    else:
        rows = [tables.process_row(process, vgpus.get(process.vgpu_id)) for process in found.processes]
        output.print_table(tables.PROCESSES, [*rows, *map(tables.outside_row, outside)])
    for index in found.silent_gpus:
        say(f"GPU {index} does not answer: its programs are not listed", "vgpuctl gpu ls")


def set_(
    vgpu: VgpuArgument,
    sm: options.Sm = None,
    mem: options.Mem = None,
    mem_limit: options.MemLimit = None,
    mem_per_process: options.MemPerProcess = None,
    quota_request: options.QuotaRequest = None,
    quota_limit: options.QuotaLimit = None,
    burst: Annotated[bool | None, typer.Option(help=options.BURST, show_default=False)] = None,
    overcommit: Annotated[bool | None, typer.Option(help=options.OVERCOMMIT, show_default=False)] = None,
    priority: options.PriorityOption = None,
    name: options.Name = None,
    ttl: options.Ttl = None,
    idle_suspend: options.IdleSuspend = None,
    resume_on: options.ResumeOn = None,
    lease: options.LeaseOption = None,
    slo: options.SloOption = None,
    on_server_loss: options.LossOption = None,
    form: OutputOption = Output.TABLE,
) -> None:
    """Resize a vGPU, also while programs run in it. What is not given stays as it is.

    Takes effect with the next token.
    """
    from vgpu.node.link import ControlLink

    if any(size is not None and size.strip()[:1] in {"+", "-"} for size in (sm, mem)):
        with ControlLink() as node:
            sm, mem = _absolute(node.inspect(vgpu), sm, mem)
    changes = changes_of(
        sm=sm,
        mem=mem,
        mem_limit=mem_limit,
        mem_per_process=mem_per_process,
        quota_request=quota_request,
        quota_limit=quota_limit,
        burst=burst,
        overcommit=overcommit,
        priority=priority,
        name=name,
        ttl=ttl,
        idle_suspend=idle_suspend,
        resume_on=resume_on,
        lease=lease,
        slo=slo,
        on_server_loss=on_server_loss,
    )
    with ControlLink() as node:
        changed = node.set(vgpu, changes)
        warn(changed)
        _print_changed(node, "set", changed, form)


def _print_changed(node: ControlLink, how: str, changed: VgpuStatus, form: Output) -> None:
    """Sentences on a terminal; elsewhere the vGPU's row, or JSON."""
    if form is Output.JSON:
        output.print_json(changed)
    elif sys.stdout.isatty():
        from vgpu.ctl.present.sentences import print_changed

        print_changed(node, how, [changed])
    else:
        output.print_table(tables.VGPUS, [tables.vgpu_row(changed)])


def _absolute(detail: VgpuDetail, sm: str | None, mem: str | None) -> tuple[str | None, str | None]:
    """``--sm`` and ``--mem`` of a vGPU, where a sign says by how much they change."""
    from vgpu.units import parse_bytes, parse_percent

    spec = detail.vgpu.spec

    def changed(text: str | None, option: str, now: float, parse: Callable[[str], float]) -> str | None:
        if text is None or text.strip()[:1] not in {"+", "-"}:
            return text
        try:
            by = parse(text.strip()[1:])
        except ValueError as error:
            raise VgpuError(ErrorCode.INVALID, f"{option}: {error}", "vgpuctl set VGPU --sm +10 --mem -2G") from error
        result = now + (by if text.strip()[0] == "+" else -by)
        if result <= 0:
            raise VgpuError(
                ErrorCode.INVALID, f"{option} {text} would leave nothing", f"vgpuctl inspect {detail.vgpu.vgpu_id}"
            )
        return f"{result:g}" if option == "--sm" else str(int(result))

    memory_bytes = spec.memory_on(detail.gpu.total_memory_bytes)
    return changed(sm, "--sm", spec.compute_ratio * 100, parse_percent), changed(
        mem, "--mem", memory_bytes, parse_bytes
    )


def changes_of(**given: object) -> VgpuChanges:
    """The changes that ``set`` is to make, by the names of its options; None: not given. ``VgpuError`` (invalid)."""
    from vgpu.spec import VgpuChanges

    fields = {
        "sm": "sm_percent",
        "mem": "memory_bytes",
        "mem_limit": "memory_limit_bytes",
        "mem_per_process": "process_memory_bytes",
        "quota_request": "quota_request_percent",
        "quota_limit": "quota_limit_percent",
        "ttl": "ttl_ns",
        "idle_suspend": "idle_suspend_ns",
    }
    given["resume_on"] = given.get("resume_on") or None  # an option that may be repeated is never None
    changes = VgpuChanges.parse(**{fields.get(option, option): value for option, value in given.items()})
    if not changes.model_fields_set:
        raise VgpuError(ErrorCode.INVALID, "nothing to change", "vgpuctl set VGPU --sm 50 --mem 16G")
    return changes


def suspend(
    vgpu: VgpuArgument,
    resume_on: Annotated[
        list[str] | None,
        typer.Option(metavar="TRIGGER", help="call: a CUDA call resumes it; tcp:8000: a connection. May be repeated."),
    ] = None,
    resume_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="As in 90m, 08:30 or 2027-01-31T08:30; local time.")
    ] = None,
    form: OutputOption = Output.TABLE,
) -> None:
    """Pause a vGPU's programs and free their GPU memory. Temporal mode.

    The first trigger resumes it; without one it stays suspended until vgpuctl resume.
    """
    from vgpu.protocol.triggers import moment_of

    at_unix_s = None if resume_at is None else moment_of(resume_at)
    _move(vgpu, form, "suspend", "its memory goes to the host", triggers=resume_on or (), at_unix_s=at_unix_s)


def resume(vgpu: VgpuArgument, form: OutputOption = Output.TABLE) -> None:
    """Bring a suspended vGPU back."""
    _move(vgpu, form, "resume", "its memory comes back to the GPU")


def migrate(
    vgpu: VgpuArgument,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="GPU", help="An index or a UUID.", autocompletion=completion.gpus)
    ],
    form: OutputOption = Output.TABLE,
) -> None:
    """Move a vGPU, with its running programs, to another GPU. Temporal mode."""
    _move(vgpu, form, "migrate", f"it moves to GPU {gpu}", gpu)


def _move(
    vgpu: str,
    form: Output,
    how: str,
    meanwhile: str,
    gpu: str = "",
    triggers: Sequence[str] = (),
    at_unix_s: float | None = None,
) -> None:
    from vgpu.node.link import ControlLink

    sample = None if how == "migrate" else progress.Move(vgpu, away=how == "suspend")
    with ControlLink() as node:
        with progress.waiting(f"{vgpu}: {meanwhile}", sample):
            if how == "migrate":
                changed = node.migrate(vgpu, gpu)
            else:
                changed = node.suspend(vgpu, triggers, at_unix_s) if how == "suspend" else node.resume(vgpu)
        _print_changed(node, how, changed, form)


def rm(
    vgpus: Annotated[
        list[str],
        typer.Argument(metavar="VGPU", help="Ids, unambiguous prefixes, or names.", autocompletion=completion.vgpus),
    ],
    force: Annotated[
        bool, typer.Option("-f", "--force", help="Also with programs in it; their next GPU call fails.")
    ] = False,
) -> int:
    """Remove vGPUs and say what became free; piped: the ids."""
    from vgpu.node.link import ControlLink

    worst = 0
    gone = []
    with ControlLink() as node:
        for vgpu in vgpus:
            try:
                with progress.waiting(f"removing {vgpu}"):
                    removed = node.remove(vgpu, force=force)
                gone.append(removed)
                if not sys.stdout.isatty():
                    print(removed.vgpu_id)
            except VgpuError as error:
                worst = max(worst, report(error))
        if gone and sys.stdout.isatty():
            from vgpu.ctl.present.sentences import print_changed

            print_changed(node, "rm", gone)
            own = {one.strip() for one in os.environ.get("VGPU_ID", "").split(",")}
            if own & {word for vgpu in gone for word in (vgpu.vgpu_id, vgpu.name)}:
                say("this shell's VGPU_ID still names it: its next program has no GPU", 'eval "$(vgpuctl deactivate)"')
    return worst


def prune(
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> int:
    """Remove your vGPUs that have no program in them."""
    from vgpu.node.link import ControlLink
    from vgpu.units import counted

    with ControlLink() as node:
        mine = [vgpu for vgpu in node.list() if vgpu.owner_uid == os.getuid()]
        empty = [vgpu for vgpu in mine if not vgpu.processes and vgpu.lifetime == "kept" and vgpu.state in IDLE]
    if not empty:
        say("each of your vGPUs has a program" if mine else "you have no vGPU")
        return 0
    if not yes:
        if not (sys.stdin and sys.stdin.isatty()):
            raise VgpuError(
                ErrorCode.INVALID, f"prune would remove {counted(len(empty), 'vGPU')}", "vgpuctl prune --yes"
            )
        names = ", ".join(vgpu.name or vgpu.vgpu_id for vgpu in empty)
        typer.confirm(f"Remove {counted(len(empty), 'vGPU')}: {names}?", abort=True, err=True)
    return rm([vgpu.vgpu_id for vgpu in empty])


def wait(
    vgpus: Annotated[list[str], typer.Argument(metavar="VGPU...", autocompletion=completion.vgpus)],
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="Fail after this time, such as 10m.")
    ] = None,
) -> None:
    """Wait until no program runs in these vGPUs."""
    from vgpu.node.link import ControlLink
    from vgpu.units import parse_duration_ns

    limit_s = float("inf") if timeout is None else parse_duration_ns(timeout) / 1e9
    deadline = time.monotonic() + limit_s
    with ControlLink() as node:
        wanted = {node.inspect(one).vgpu.vgpu_id for one in vgpus}
        for notice in node.watch():
            assert notice.snapshot is not None
            running = [v.vgpu_id for v in notice.snapshot.vgpus if v.vgpu_id in wanted and v.processes]
            alive = [v.vgpu_id for v in notice.snapshot.vgpus if v.vgpu_id in wanted and v.lifetime == "process"]
            if not running and not alive:
                return
            if time.monotonic() >= deadline:
                raise VgpuError(ErrorCode.TIMEOUT, f"programs run in {', '.join(running or alive)}", "vgpuctl ps")


def register(app: typer.Typer) -> None:
    commands: dict[str, Callable[..., object]] = {
        "create": create,
        "ls": ls,
        "inspect": inspect,
        "ps": ps,
        "set": set_,
        "suspend": suspend,
        "resume": resume,
        "migrate": migrate,
        "rm": rm,
        "prune": prune,
        "wait": wait,
    }
    for name, command in commands.items():
        explained = options.explained(MEANING) if name in ("create", "set") else None
        classes = {"set": SetCommand, "create": WaitingCommand}
        app.command(name, cls=classes.get(name), epilog=explained)(command)
