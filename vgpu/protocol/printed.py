"""Types of the fields in messages that are displayed: a tenant's text is cleaned as the message is made or read."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from vgpu.printable import command_name, printable


def _fields(fields: dict[str, int | float | str]) -> dict[str, int | float | str]:
    return {printable(name): printable(value) if isinstance(value, str) else value for name, value in fields.items()}


Line = Annotated[str, AfterValidator(printable)]
"""Text in a message that is displayed."""
CommandName = Annotated[str, AfterValidator(command_name)]
Fields = Annotated[dict[str, int | float | str], AfterValidator(_fields)]
