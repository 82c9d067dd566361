"""The whole application of the dashboard: page, API, its documentation, and further routes of a node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from vgpu.errors import ErrorCode, VgpuError, cleaned
from vgpu.protocol.service import software_version
from vgpu.spec import explain, in_one_line
from vgpu.web.api import STATUS_OF, Refused, api
from vgpu.web.feed import Feed
from vgpu.web.files import STATIC
from vgpu.web.guard import Guard, Rules
from vgpu.web.timelines import Timelines

OF_STATUS: Final = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.INVALID}


def application(
    control_socket: Path,
    feed: Feed,
    timelines: Timelines,
    rules: Rules,
    routers: Sequence[APIRouter] = (),
    engine: str = "",
) -> Guard:
    """An ASGI application. ``routers``: more of a node's, served beside the API and under the same rules. ``engine``:
    the socket of the container engine that one of them reaches."""
    app = FastAPI(
        title="st-vgpu",
        version=software_version(),
        description="The vGPUs of one node. What `vgpuctl` can ask, with the same models.",
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(api(control_socket, feed, timelines, engine))
    for router in routers:
        app.include_router(router)
    _add_pages(app)
    app.exception_handler(VgpuError)(_refused)
    app.exception_handler(RequestValidationError)(_malformed)
    app.exception_handler(HTTPException)(_no_such)
    app.exception_handler(ValidationError)(_unfit)
    app.exception_handler(Exception)(_failed)
    return Guard(app, rules)


def _add_pages(app: FastAPI) -> None:
    from swagger_ui_bundle import swagger_ui_path

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _file("index.html")

    @app.get("/api/docs", include_in_schema=False)
    async def documentation() -> Response:
        return _file("docs.html")

    @app.get("/api", include_in_schema=False)
    async def api_root() -> Response:
        return RedirectResponse("/api/docs")

    app.mount("/static", _Fresh(directory=STATIC))
    app.mount("/api/swagger", StaticFiles(directory=swagger_ui_path))


class _Fresh(StaticFiles):
    """Browsers revalidate these files at every load, because another release has other files under the same names."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers["Cache-Control"] = "no-cache"
        return response


def _file(name: str) -> Response:
    return FileResponse(STATIC / name, headers={"Cache-Control": "no-cache"})


def _answer(status: int, code: ErrorCode, error: str, hint: str = "") -> JSONResponse:
    return JSONResponse(Refused(code=code, error=error, hint=hint).model_dump(mode="json"), status_code=status)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, VgpuError)
    return _answer(STATUS_OF[error.code], error.code, error.message, error.hint)


async def _malformed(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = [
        {"loc": [part for part in problem["loc"] if part not in {"body", "query", "path"}], "msg": problem["msg"]}
        for problem in error.errors()
    ]
    return _answer(STATUS_OF[ErrorCode.INVALID], ErrorCode.INVALID, in_one_line(problems), "see /api/docs")


async def _unfit(_: Request, error: Exception) -> JSONResponse:
    """What fits a route's parameters, and no request to the node."""
    assert isinstance(error, ValidationError)
    return _answer(STATUS_OF[ErrorCode.INVALID], ErrorCode.INVALID, explain(error), "see /api/docs")


async def _failed(_: Request, error: Exception) -> JSONResponse:
    text = f"an error of st-vgpu: {cleaned(repr(error))}"
    return _answer(STATUS_OF[ErrorCode.INTERNAL], ErrorCode.INTERNAL, text, "see the log of vgpuctl dashboard")


async def _no_such(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = OF_STATUS.get(error.status_code, ErrorCode.INVALID)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return _answer(error.status_code, code, text, "see /api/docs")
