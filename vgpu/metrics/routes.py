"""``/metrics`` for Prometheus and ``/healthz`` for monitoring: a router for any FastAPI application on trio."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from vgpu.bounds import Bounded
from vgpu.errors import VgpuError
from vgpu.loggers import get_logger
from vgpu.metrics.exposition import exposition
from vgpu.metrics.source import Source

log = get_logger(__name__)

_OPENMETRICS: Final = "application/openmetrics-text"


class GpuHealth(Bounded):
    """``reason``: why its server does not answer."""

    index: int
    state: Literal["serving", "restarting", "failed"]
    reason: str


class Health(Bounded):
    """``ok``: the node answers, and serves all of its GPUs. ``degraded``: not all of them. ``down``: it does not
    answer."""

    status: Literal["ok", "degraded", "down"]
    reason: str
    gpus: tuple[GpuHealth, ...]


class Complaint:
    """In the log: once when the node falls silent, and once when it is back."""

    def __init__(self) -> None:
        self._silent = False

    def about(self, error: VgpuError | None) -> None:
        if error is not None and not self._silent:
            log.warning("the node does not answer", reason=str(error))
        elif error is None and self._silent:
            log.info("the node answers again")
        self._silent = error is not None


def router(control_socket: Path) -> APIRouter:
    """Of the node with this control socket. It is asked at each request; while it is down, both still answer."""
    source = Source(control_socket)
    routes = APIRouter(tags=["monitoring"])
    complaint = Complaint()

    @routes.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """All metrics, as text for Prometheus."""
        _, content_type = choose_encoder(request.headers.get("accept", ""))
        seen = await source.see()
        complaint.about(seen.error)
        body = exposition(seen, openmetrics=content_type.startswith(_OPENMETRICS))
        return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    @routes.get("/healthz", responses={503: {"model": Health}})
    async def healthz(response: Response) -> Health:
        """200 if the node answers and serves all of its GPUs, else 503; the body says which."""
        found = await health(source)
        response.headers["Cache-Control"] = "no-store"
        if found.status != "ok":
            response.status_code = 503
        return found

    return routes


async def health(source: Source) -> Health:
    try:
        found = await source.gpus()
    except VgpuError as error:
        return Health(status="down", reason=error.message, gpus=())
    gpus = tuple(GpuHealth(index=gpu.index, state=gpu.state, reason=gpu.reason) for gpu in found.gpus)
    silent = [str(gpu.index) for gpu in gpus if gpu.state != "serving"]
    reason = f"not served: GPU {', '.join(silent)}" if silent else ""
    return Health(status="degraded" if silent else "ok", reason=reason, gpus=gpus)
