"""vgpuctl usage: what was promised, used and wasted, also of vGPUs that are gone."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from vgpu.ctl.exit_codes import say
from vgpu.ctl.time_options import SinceOption, clock_time, parse_since
from vgpu.errors import ErrorCode, VgpuError
from vgpu.units import three_digits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu.ctl.present.output import Column
    from vgpu.protocol.usage import UsageReport, UsageRow


class By(StrEnum):
    USER = "user"
    VGPU = "vgpu"
    CLAIM = "claim"


class Form(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


SINCE: Final = "7d"
AMOUNTS: Final = (
    "promised_gpu_hours",
    "used_gpu_hours",
    "wasted_gpu_hours",
    "memory_promised_gib_hours",
    "memory_used_gib_hours",
)
EXPLAINED: Final = """
\b
since       seven days ago, unless --since is given
GPU-hours   hours of one whole GPU: --sm 25 for 4 hours is 1
wasted      promised and not used
GiB-hours   memory times how long
"""


UntilOption = Annotated[
    str | None, typer.Option("--until", metavar="TIME", help="As --since; by default now.", show_default=False)
]
ByOption = Annotated[By, typer.Option("--by", help="One row for each of them.")]
FormOption = Annotated[Form, typer.Option("-o", "--output", help="A table for people, JSON or CSV for programs.")]


def usage(
    since: SinceOption = SINCE, until: UntilOption = None, by: ByOption = By.USER, form: FormOption = Form.TABLE
) -> None:
    """GPU-hours that were promised, used and wasted."""
    from vgpu.ctl.present import tables
    from vgpu.node.link import ControlLink

    begin, end = between(since, until)
    with ControlLink() as node:
        show(tables.with_users(node.usage(since_unix_s=begin, until_unix_s=end, by=by.value)), form)


def between(since: str | None, until: str | None) -> tuple[float, float | None]:
    """The two times, in seconds since 1970; None: now. ``VgpuError`` (invalid): one of them is none."""
    begin = max(0.0, parse_since(since))
    end = None if until is None else max(0.0, parse_since(until, option="--until"))
    if (time.time() if end is None else end) <= begin:
        raise VgpuError(ErrorCode.INVALID, "--until is not after --since", "vgpuctl usage --since 7d --until 1d")
    return begin, end


def show(found: UsageReport, form: Form) -> None:
    from vgpu.ctl.present import output

    if form is Form.JSON:
        output.print_json(found)
    elif form is Form.CSV:
        _print_csv(found)
    else:
        _print_table(found)
    if form is not Form.JSON:
        for note in found.notes:
            say(note)


def _print_csv(found: UsageReport) -> None:
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("since", "until", "user", "uid", "vgpu", "name", "claim", "measured_hours", *AMOUNTS))
    begin, end = clock_time(found.since_unix_s), clock_time(found.until_unix_s)
    for row in found.rows:
        who = row.user, row.owner_uid, row.vgpu_id, row.name, row.claim
        writer.writerow((begin, end, *who, row.measured_hours, *(getattr(row, amount) for amount in AMOUNTS)))


def _print_table(found: UsageReport) -> None:
    from vgpu.ctl.present import output

    rows = [(*_subject(row, found.by), *_amounts([row])) for row in found.rows]
    columns = _columns(found.by)
    if len(rows) > 1:
        subject = ("all", *("" for _ in range(len(columns) - len(_amounts(())) - 1)))
        rows.append((*subject, *_amounts(found.rows)))
    output.print_table(columns, rows)


def _columns(by: str) -> list[Column]:
    from vgpu.ctl.present.output import Column

    subjects = {
        "user": (Column("USER"),),
        "vgpu": (Column("VGPU"), Column("NAME", elastic=True), Column("USER"), Column("CLAIM", extra=True)),
        "claim": (Column("CLAIM", elastic=True), Column("USER")),
    }
    figures = ("PROMISED GPU-H", "USED GPU-H", "WASTED GPU-H", "WASTED")
    memory = ("PROMISED GIB-H", "USED GIB-H")
    return [
        *subjects[by],
        *(Column(title, right=True) for title in figures),
        *(Column(title, right=True, extra=True) for title in memory),
    ]


def _subject(row: UsageRow, by: str) -> tuple[str, ...]:
    match by:
        case "vgpu":
            return row.vgpu_id, row.name, row.user, row.claim
        case "claim":
            return row.claim or "none", row.user
        case _:
            return (row.user,)


def _amounts(rows: Sequence[UsageRow]) -> tuple[str, ...]:
    promised, used, wasted, memory_promised, memory_used = (
        sum(getattr(row, amount) for row in rows) for amount in AMOUNTS
    )
    part = f"{wasted / promised:.0%}" if promised else ""
    return (*map(three_digits, (promised, used, wasted)), part, *map(three_digits, (memory_promised, memory_used)))


def register(app: typer.Typer) -> None:
    app.command("usage", epilog=EXPLAINED)(usage)
