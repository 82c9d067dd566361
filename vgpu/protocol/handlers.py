"""One handler for each request that a process answers. A process that lacks one does not start."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from vgpu.protocol.hello import Request
from vgpu.protocol.requests import Entry

Asker = TypeVar("Asker")
"""What a process knows of the other end of a link."""


class Handlers(Generic[Asker]):
    """The handlers of one process, by kind of request. ``process``: its name, for errors."""

    def __init__(
        self,
        process: str,
        entries: Iterable[Entry],
        handlers: Mapping[type[Request], Callable[[Any, Asker], Awaitable[BaseModel]]],
    ) -> None:
        """``TypeError``: a request has no handler, or a handler no request."""
        wanted = {entry.request for entry in entries}
        if wanted != handlers.keys():
            without = ", ".join(sorted(request.__name__ for request in wanted - handlers.keys()))
            useless = ", ".join(sorted(request.__name__ for request in handlers.keys() - wanted))
            raise TypeError(f"{process}: no handler for ({without}); no request for the handler of ({useless})")
        self._handlers = dict(handlers)

    def handles(self, request: Request) -> bool:
        return type(request) in self._handlers

    async def answer(self, request: Request, asker: Asker) -> BaseModel:
        """``KeyError``: this process has no handler for it (``handles``)."""
        return await self._handlers[type(request)](request, asker)
