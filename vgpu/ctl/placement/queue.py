"""vgpuctl queue: the requests that wait for room."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from vgpu.ctl.options import Output, OutputOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu.protocol.tenancy import QueueReading


def queue(form: OutputOption = Output.TABLE) -> None:
    """List the requests that wait for room, the next one first."""
    from vgpu.ctl.present import output
    from vgpu.node.link import ControlLink

    with ControlLink() as node:
        waiting = node.queue()
    if form is Output.JSON:
        output.print_json(waiting)
    elif not waiting:
        print("No request waits.")
    else:
        print_queue(waiting)


def print_queue(waiting: Sequence[QueueReading]) -> None:
    from vgpu.ctl.present import output
    from vgpu.ctl.present.tables import user_name
    from vgpu.spec import as_options
    from vgpu.units import format_duration

    columns = (
        output.Column("NEXT", right=True),
        output.Column("OWNER"),
        output.Column("NAME"),
        output.Column("ASKS FOR"),
        output.Column("WAITS", right=True),
        output.Column("REASON", elastic=True),
    )
    now = time.time()
    rows = [
        (
            str(one.position),
            user_name(one.owner_uid),
            one.spec.name or one.vgpu_id,
            as_options(one.spec.model_dump(exclude_defaults=True)),
            format_duration(max(0, int(now - one.since_unix_s)) * 10**9),
            one.reason,
        )
        for one in waiting
    ]
    output.print_table(columns, rows)


def register(app: typer.Typer) -> None:
    app.command("queue")(queue)
