"""What ``Vgpu.suspend`` takes to say what resumes the vGPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from vgpu.api.link import Link
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.triggers import canonical, in_order, moment_of
from vgpu.protocol.versions import TRIGGERS_SINCE, refuse_older

Moment = str | float | datetime | timedelta
"""``90m``, ``08:30``, a date; seconds since 1970; a time without a zone is local."""


def triggers_of(
    resume_on: str | Sequence[str], resume_at: Moment | None, open_link: Callable[[], Link]
) -> dict[str, Any]:
    """The fields of a request; empty: there is no trigger, and a node of any release understands it. ``VgpuError``
    (invalid; version)."""
    try:
        said = in_order(map(canonical, (resume_on,) if isinstance(resume_on, str) else resume_on))
    except ValueError as error:
        raise VgpuError(ErrorCode.INVALID, str(error), 'suspend(resume_on="tcp:8000")') from error
    fields: dict[str, Any] = {"resume_on": said} if said else {}
    if resume_at is not None:
        fields["resume_at_unix_s"] = _unix_s(resume_at)
    if fields:
        with open_link() as link:
            refuse_older(link.welcome["version"] < TRIGGERS_SINCE, "has no resume_on and no resume_at")
    return fields


def _unix_s(moment: Moment) -> float:
    if isinstance(moment, str):
        return moment_of(moment, option="resume_at")
    if isinstance(moment, timedelta):
        return (datetime.now() + moment).timestamp()
    return moment.timestamp() if isinstance(moment, datetime) else float(moment)
