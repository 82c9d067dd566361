"""The table of requests: it is whole, and each process and the HTTP API follow it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel

from gpuserver.runtime.api import control as gpu_server
from vgpu.node import control as node
from vgpu.protocol.handlers import Handlers
from vgpu.protocol.messages import AnyRequest, List, MigrateIn, Set, SetGpu, Status, VgpuList
from vgpu.protocol.requests import ENTRY_OF, TABLE, Route, entry_of
from vgpu.spec import VgpuChanges
from vgpu.web.api import api

OF_THE_DASHBOARD = {"GET /history", "GET /labels", "GET /stream", "GET /gpus/{index}/timeline"}
"""Routes that are no request of the control link."""


def test_each_request_has_one_line() -> None:
    union = get_args(get_args(AnyRequest)[0])
    assert ENTRY_OF.keys() == {*union, MigrateIn}
    assert len({entry.op for entry in TABLE}) == len(TABLE)


def test_each_line_names_what_its_route_needs() -> None:
    for entry in TABLE:
        field = {Route.VGPU: "vgpu", Route.GPU: "gpu"}.get(entry.route)
        assert field is None or field in entry.request.model_fields, entry.op


def test_the_target_is_the_vgpu_or_the_gpu() -> None:
    change, gpu = Set(vgpu="train", changes=VgpuChanges()), SetGpu(gpu="1")
    assert entry_of(change).target(change) == "train"
    assert entry_of(gpu).target(gpu) == "1"


def test_what_the_node_passes_on_a_gpu_server_answers() -> None:
    passed_on = {entry.request for entry in TABLE if entry.route is not Route.NODE}
    assert passed_on <= {entry.request for entry in gpu_server.OWN}
    assert passed_on.isdisjoint(entry.request for entry in node.OWN)


def test_http_has_the_routes_of_the_table() -> None:
    router = api(Path("/nowhere"), None, None)  # type: ignore[arg-type]
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    served = {f"{method} {route.path.removeprefix(router.prefix)}" for route in routes for method in route.methods}
    assert served - OF_THE_DASHBOARD == {entry.http for entry in TABLE if entry.http}


def test_an_answer_over_http_is_the_tables_or_what_it_lists() -> None:
    router = api(Path("/nowhere"), None, None)  # type: ignore[arg-type]
    for route in router.routes:
        assert isinstance(route, APIRoute)
        for method in route.methods:
            for entry in TABLE:
                if entry.http == f"{method} {route.path.removeprefix(router.prefix)}":
                    listed = [field.annotation for field in entry.answer.model_fields.values()]
                    assert route.response_model in [entry.answer, *listed], entry.op


async def _answer(request: List, asker: str) -> VgpuList:
    return VgpuList(vgpus=())


async def _other(request: Status, asker: str) -> BaseModel:
    raise AssertionError


def test_a_process_without_a_handler_does_not_start() -> None:
    with pytest.raises(TypeError, match=r"node: no handler for \(Status\)"):
        Handlers[str]("node", [ENTRY_OF[List], ENTRY_OF[Status]], {List: _answer})


def test_a_handler_without_a_request_is_an_error_too() -> None:
    with pytest.raises(TypeError, match=r"the handler of \(Status\)"):
        Handlers[str]("node", [ENTRY_OF[List]], {List: _answer, Status: _other})
