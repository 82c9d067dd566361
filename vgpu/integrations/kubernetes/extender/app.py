"""The extender's HTTP: what kube-scheduler asks for, and what a person may look at."""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vgpu.errors import ErrorCode, VgpuError, cleaned, in_plain_words
from vgpu.integrations.kubernetes.extender.messages import (
    Arguments,
    Binding,
    Message,
    filtered,
    inspected,
    prioritized,
)
from vgpu.integrations.kubernetes.extender.reservations import Reservations

PREFIXES: Final = ("/vgpu-scheduler", "/gpushare-scheduler")
MOST_BYTES: Final = 64 << 20
"""Of a request: a scheduler without ``nodeCacheCapable`` sends all nodes whole."""
Read = TypeVar("Read", bound=Message)


class Extender(Protocol):
    """What answers."""

    reservations: Reservations

    async def bind(self, asked: Binding) -> str:
        """ "": the pod is bound; else the reason."""


def application(extender: Extender) -> Starlette:
    async def filter_(request: Request) -> Response:
        arguments = await _read(request, Arguments)
        return JSONResponse(filtered(arguments, extender.reservations.survey(arguments.pod, arguments.names)))

    async def prioritize(request: Request) -> Response:
        arguments = await _read(request, Arguments)
        return JSONResponse(prioritized(extender.reservations.scores(arguments.pod, arguments.names)))

    async def bind(request: Request) -> Response:
        return JSONResponse({"Error": await extender.bind(await _read(request, Binding))})

    async def inspect(request: Request) -> Response:
        known = sorted(extender.reservations.gpus)
        node = request.path_params.get("node")
        if node is not None and node not in known:
            return _failed(f"no node {cleaned(node)} with GPUs is known", 404)
        return JSONResponse(inspected(extender.reservations, known if node is None else [node]))

    async def health(_: Request) -> Response:
        return Response("ok")

    routes = [Route("/healthz", health)]
    for prefix in PREFIXES:
        routes += [
            Route(f"{prefix}/filter", filter_, methods=["POST"]),
            Route(f"{prefix}/prioritize", prioritize, methods=["POST"]),
            Route(f"{prefix}/bind", bind, methods=["POST"]),
            Route(f"{prefix}/inspect", inspect),
            Route(f"{prefix}/inspect/{{node}}", inspect),
        ]
    return Starlette(routes=routes, exception_handlers={VgpuError: _refused})


async def _read(request: Request, kind: type[Read]) -> Read:
    """``VgpuError`` (invalid)."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise VgpuError(ErrorCode.INVALID, f"the request has more than {MOST_BYTES >> 20} MiB")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the request"
        raise VgpuError(ErrorCode.INVALID, f"{where}: {in_plain_words(problem['msg'])}") from None


async def _refused(_: Request, error: Any) -> Response:
    return _failed(str(error), 400)


def _failed(reason: str, code: int) -> Response:
    return JSONResponse({"Error": reason}, code)
