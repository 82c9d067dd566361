"""vgpuctl --nodes FILE: ls, create, top and usage over several nodes, and other commands with NODE/VGPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from vgpu.ctl import options
from vgpu.ctl.commands import LAUNCHING
from vgpu.ctl.exit_codes import Exit, report, say
from vgpu.ctl.observe.usage import SINCE, By, ByOption, Form, FormOption, UntilOption, between, show
from vgpu.ctl.options import Created, Listed, Wanted
from vgpu.ctl.present import output, tables
from vgpu.ctl.present.output import Column
from vgpu.ctl.time_options import SinceOption
from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from vgpu.nodes.file import NodesFile
    from vgpu.nodes.reach import Reached
    from vgpu.protocol.messages import Snapshot
    from vgpu.protocol.usage import UsageReport

Answer = TypeVar("Answer")
OPTION: Final = "--nodes"
COLUMN: Final = Column("NODE")
CREATE: Final = "create"


def given(arguments: Sequence[str]) -> tuple[Path, list[str]] | None:
    """The file, and the words that follow it; None: the option does not come first."""
    if not arguments:
        return None
    option, equals, file = arguments[0].partition("=")
    if option != OPTION:
        return None
    rest = list(arguments[1:])
    if not equals:
        file = rest.pop(0) if rest else ""
    if not file:
        raise VgpuError(ErrorCode.INVALID, f"{OPTION} names no file", f"vgpuctl {OPTION} FILE ls")
    return Path(file), rest


class Nodes:
    """The nodes of the file."""

    def __init__(self, file: NodesFile) -> None:
        from vgpu.nodes.reach import reached

        self.policy = file.policy
        self._nodes: dict[str, Reached] = {name: reached(entry) for name, entry in file.node.items()}

    def __getitem__(self, name: str) -> Reached:
        if name not in self._nodes:
            raise VgpuError(ErrorCode.NOT_FOUND, f"the file has no node {name}", f"one of: {', '.join(self._nodes)}")
        return self._nodes[name]

    def snapshots(self) -> tuple[dict[str, Snapshot], dict[str, VgpuError]]:
        """Of those that answer, and why the others do not."""
        return self._of_each(lambda node: node.snapshot())

    def usage(self, since: float, until: float, by: str) -> tuple[dict[str, UsageReport], dict[str, VgpuError]]:
        return self._of_each(lambda node: node.usage(since, until, by))

    def _of_each(self, question: Callable[[Reached], Answer]) -> tuple[dict[str, Answer], dict[str, VgpuError]]:
        from concurrent.futures import ThreadPoolExecutor

        def ask(node: Reached) -> Answer | VgpuError:
            try:
                return question(node)
            except VgpuError as error:
                return error

        with ThreadPoolExecutor(min(32, len(self._nodes))) as pool:
            answers = dict(zip(self._nodes, pool.map(ask, self._nodes.values()), strict=True))
        failed = {name: one for name, one in answers.items() if isinstance(one, VgpuError)}
        return {name: one for name, one in answers.items() if not isinstance(one, VgpuError)}, failed


def _complain(failed: Mapping[str, VgpuError]) -> int:
    """A line for each node that does not answer. The exit code: that of the first."""
    codes = [report(VgpuError(error.code, f"node {name}: {error.message}")) for name, error in failed.items()]
    return codes[0] if codes else Exit.OK


def application(file: Path, words: Sequence[str]) -> typer.Typer:
    """The commands over these nodes. ``VgpuError`` (invalid): the file cannot be used."""
    from vgpu.nodes.file import load

    nodes = Nodes(load(file))
    app = typer.Typer(
        name=f"vgpuctl {OPTION} FILE",
        help="Work with the nodes of a file. Other commands take NODE/VGPU, as in rm alpha/3f2a.",
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command("ls")(_ls(nodes))
    app.command(CREATE)(_create(nodes, words))
    app.command("top")(_top(nodes))
    app.command("usage")(_usage(nodes))
    return app


def run(file: Path, words: list[str]) -> Any:
    """As ``vgpu.ctl.main.run``, which makes exit codes of what this raises."""
    app = application(file, words)
    known = {command.name for command in app.registered_commands}
    first = next((word for word in words if not word.startswith("-")), "")
    if first and first not in known:
        return _passed_on(file, words)
    return app(words, prog_name=f"vgpuctl {OPTION} {file}", standalone_mode=False)


def _passed_on(file: Path, words: Sequence[str]) -> int:
    """A command whose words name vGPUs of one node."""
    from vgpu.nodes.file import load

    nodes, entries = Nodes(load(file)), load(file).node
    named = [word.partition("/")[0] for word in words[1:] if "/" in word and word.partition("/")[0] in entries]
    named = named[:1] if words[0] in LAUNCHING else sorted(set(named))
    if len(named) != 1:
        text = f"{words[0]} names no vGPU as NODE/VGPU" if not named else f"{words[0]} names several nodes"
        raise VgpuError(ErrorCode.INVALID, text, f"vgpuctl {OPTION} {file} {words[0]} {next(iter(entries))}/VGPU")
    (name,) = named
    own, program = list(words), words[0] in LAUNCHING  # what follows the vGPU is the program's
    for at, word in enumerate(words):
        if at and word.startswith(f"{name}/"):
            own[at] = word.removeprefix(f"{name}/")
            if program:
                break
    return nodes[name].run(own, terminal=sys.stdin.isatty() and sys.stdout.isatty())


def _ls(nodes: Nodes) -> Callable[..., int]:
    def ls(
        form: Annotated[
            Listed, typer.Option("-o", "--output", help="wide: all columns, uncut; name: NODE/VGPU alone.")
        ] = Listed.TABLE,
        quiet: Annotated[bool, typer.Option("-q", "--quiet", help="NODE/VGPU alone.")] = False,
        filters: Annotated[
            list[str] | None, typer.Option("--filter", metavar="KEY=VALUE", help="Those alone, as in state=idle.")
        ] = None,
        sort: Annotated[str, typer.Option(metavar="KEY", help="By a column, on each node.", show_default=False)] = "",
    ) -> int:
        """List the vGPUs of all nodes."""
        from vgpu.ctl.present.listing import chosen

        choose = chosen(filters or (), sort)
        snapshots, failed = nodes.snapshots()
        found = [(name, vgpu) for name, snapshot in snapshots.items() for vgpu in choose(snapshot.vgpus)]
        if form is Listed.JSON:
            print(json.dumps([{"node": name, **vgpu.model_dump(mode="json")} for name, vgpu in found], indent=2))
        elif form is Listed.YAML:
            raise VgpuError(ErrorCode.INVALID, "-o yaml is for one node", "-o json")
        elif quiet or form is Listed.NAME:
            for name, vgpu in found:
                print(f"{name}/{(not quiet and vgpu.name) or vgpu.vgpu_id}")
        else:
            rows = [(name, *tables.vgpu_row(vgpu)) for name, vgpu in found]
            output.print_table((COLUMN, *tables.VGPUS), rows, whole=form is Listed.WIDE)
        sys.stdout.flush()
        return _complain(failed)

    return ls


def _create(nodes: Nodes, words: Sequence[str]) -> Callable[..., int]:
    @options.describes_vgpu
    def create(
        wanted: Wanted,
        form: Annotated[Created, typer.Option("-o", "--output", help="NODE/VGPU, or everything.")] = Created.ID,
    ) -> int:
        """Make a vGPU on the node that the policy of the file chooses, and print NODE/VGPU."""
        from vgpu.nodes.choose import order

        if wanted.gpu != "auto":
            text = "--gpu is a GPU of one node, and the policy chooses node and GPU"
            raise VgpuError(ErrorCode.INVALID, text, "leave it out")
        if form not in {Created.ID, Created.JSON}:
            raise VgpuError(ErrorCode.INVALID, f"-o {form.value} is for a vGPU of this machine", "-o id, or -o json")
        described = words[words.index(CREATE) + 1 :]
        snapshots, failed = nodes.snapshots()
        refusal = None
        for name, gpu in order(nodes.policy, snapshots, wanted.spec):
            try:
                vgpu = nodes[name].create(wanted.spec, gpu, described)
            except VgpuError as error:
                named = VgpuError(error.code, f"node {name}, GPU {gpu}: {error.message}", error.hint)
                if error.code not in {ErrorCode.NO_ROOM, ErrorCode.UNAVAILABLE}:  # it may have made one
                    raise named from error
                refusal = refusal or named
                continue
            for warning in vgpu.warnings:
                say(f"{name}/{vgpu.vgpu_id}: {warning}")
            text = json.dumps({"node": name, **vgpu.model_dump(mode="json")}, indent=2)
            print(text if form is Created.JSON else f"{name}/{vgpu.vgpu_id}", flush=True)
            return Exit.OK
        code = _complain(failed)
        if refusal is None:
            return code or report(VgpuError(ErrorCode.UNREACHABLE, "no GPU of these nodes serves"))
        return report(refusal)

    return create


def _top(nodes: Nodes) -> Callable[..., int]:
    def top(
        once: Annotated[bool, typer.Option("--once", help="One reading, and end.")] = False,
        delay: Annotated[
            float, typer.Option("-d", "--delay", metavar="SECONDS", help="From one reading to the next.", min=0.5)
        ] = 2.0,
    ) -> int:
        """Watch the GPUs and vGPUs of all nodes; Ctrl-C ends it. Piped, it prints one reading."""
        if once or not sys.stdout.isatty():
            return _reading(nodes)
        try:
            while True:
                print("\x1b[H\x1b[2J", end="")
                _reading(nodes)
                time.sleep(delay)
        except KeyboardInterrupt:
            return Exit.OK

    return top


def _usage(nodes: Nodes) -> Callable[..., int]:
    def usage(
        since: SinceOption = SINCE, until: UntilOption = None, by: ByOption = By.USER, form: FormOption = Form.TABLE
    ) -> int:
        """GPU-hours that were promised, used and wasted on all nodes."""
        from vgpu.nodes.merge import merged

        begin, end = between(since, until)
        reports, failed = nodes.usage(begin, time.time() if end is None else end, by.value)
        if reports:
            show(merged(reports), form)
        sys.stdout.flush()
        return _complain(failed)

    return usage


def _reading(nodes: Nodes) -> int:
    snapshots, failed = nodes.snapshots()
    gpus = [(name, *tables.gpu_row(gpu)) for name, snapshot in snapshots.items() for gpu in snapshot.gpus]
    vgpus = [(name, *tables.vgpu_row(vgpu)) for name, snapshot in snapshots.items() for vgpu in snapshot.vgpus]
    output.print_table((COLUMN, *tables.GPUS), gpus)
    print()
    output.print_table((COLUMN, *tables.VGPUS), vgpus)
    sys.stdout.flush()
    return _complain(failed)
