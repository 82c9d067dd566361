"""vgpuctl quota: what a user may have, and has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vgpu.ctl.options import Output, OutputOption

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu.protocol.tenancy import QuotaReading


def quota(
    user: Annotated[
        str, typer.Argument(metavar="[USER]", help="As root: another user's, by name or uid.", show_default=False)
    ] = "",
    form: OutputOption = Output.TABLE,
) -> None:
    """What you may have of this node, and what you have.

    The sections [quota] of the node's configuration file say what each user may have: vgpuctl config --help.
    """
    from vgpu.api.owner import uid_of
    from vgpu.ctl.present import output
    from vgpu.node.link import ControlLink

    with ControlLink() as node:
        found = node.quota(uid_of(user) if user else None)
    if form is Output.JSON:
        output.print_json(found)
        return
    rows = list(_rows(found))
    if not rows:
        print(f"No quota holds for {found.user or f'uid {found.uid}'}.")
        return
    columns = (
        output.Column("QUOTA"),
        output.Column("VALUE"),
        output.Column("USED"),
        output.Column("LEFT"),
        output.Column("OF", elastic=True),
    )
    output.print_table(columns, rows)


def _rows(found: QuotaReading) -> Iterator[tuple[str, str, str, str, str]]:

    held = found.held
    used: dict[str, float] = {"sm_total": held.sm_percent, "mem_total": held.memory_bytes, "vgpus": held.vgpus}
    for key, value in found.quota.items():
        has, left = "", ""
        if key in used:
            has, left = in_words(key, used[key]), in_words(key, max(0, float(value) - used[key]))
        yield key, in_words(key, value), has, left, found.sections.get(key, "")


def in_words(key: str, value: object) -> str:
    """The value of a key of a quota, as people write it."""
    from vgpu.units import format_bytes, format_duration

    if not isinstance(value, int | float):
        return str(value)
    if key.endswith("mem") or key == "mem_total":
        return format_bytes(int(value))
    if key in {"ttl", "idle_limit", "idle_warning", "default_idle_suspend"}:
        return format_duration(int(value)) if value else "off"
    if key in {"sm", "sm_total", "default_sm"}:
        return f"{value:g} %"
    return f"{value:g}"


def register(app: typer.Typer) -> None:
    app.command("quota")(quota)
