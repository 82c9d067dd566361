"""Every number of every message has two bounds; what a peer sends beyond them is refused with a code."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

import gpuserver
import vgpu
from vgpu.bounds import Bounded, BoundedRequest
from vgpu.errors import VgpuError, cleaned
from vgpu.protocol.messages import FORWARDS, REQUESTS, Events, Failure
from vgpu.spec import VgpuChanges, VgpuSpec, explain
from vgpu.units import parse_bytes, parse_duration_ns, parse_fraction, parse_percent

NOT_FROM_PEERS = {"gpuserver.runtime.journal._Found", "vgpu.limits.Limits"}


def models() -> Iterator[type[BaseModel]]:
    for package in (vgpu, gpuserver):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    stack: list[type[BaseModel]] = [BaseModel]
    while stack:
        for model in stack.pop().__subclasses__():
            stack.append(model)
            if model.__module__.startswith(("vgpu.", "gpuserver.")):
                yield model


def unbounded(schema: Any, path: str) -> Iterator[str]:
    """The places in a schema of pydantic-core where a number has no end, or NaN is one."""
    if isinstance(schema, list | tuple):
        for part in schema:
            yield from unbounded(part, path)
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind in {"int", "float"} and not (schema.keys() & {"ge", "gt"} and schema.keys() & {"le", "lt"}):
        yield path
    if kind == "float" and schema.get("allow_inf_nan") is not False and "ge" not in schema and "gt" not in schema:
        yield f"{path} (NaN)"
    for key, value in schema.items():
        if key not in {"metadata", "config", "serialization", "default", "cls"}:
            yield from unbounded(value, f"{path}.{key}" if key not in {"schema", "fields"} else path)


def test_every_number_of_every_model_has_two_bounds() -> None:
    found = {f"{model.__module__}.{model.__qualname__}": model for model in models()}
    assert {"vgpu.protocol.messages.Create", "vgpu.web.api.GpuChanges", "vgpu.spec.VgpuSpec"} <= found.keys()
    places = [
        place
        for name, model in found.items()
        if name not in NOT_FROM_PEERS
        for place in unbounded(model.__pydantic_core_schema__, name)
    ]
    assert places == []


def test_every_model_of_a_message_has_a_bounded_base() -> None:
    loose = [
        f"{model.__module__}.{model.__qualname__}"
        for model in models()
        if model.__module__.startswith(("vgpu.protocol.", "vgpu.web.", "vgpu.spec", "vgpu.metrics."))
        and not issubclass(model, Bounded | BoundedRequest)
    ]
    assert loose == []


HUGE = [
    1 << 63,
    (1 << 64) - 1,
    10**40,
    -(1 << 63) - 1,
    math.inf,
    -math.inf,
    math.nan,
    1e308,
    "9" * 5000 + "h",
    "1" * 400,
]


@pytest.mark.parametrize("value", HUGE, ids=lambda value: str(value)[:12])
@pytest.mark.parametrize("field", [*VgpuChanges.model_fields])
def test_no_field_of_a_specification_takes_a_number_without_end(field: str, value: float | str) -> None:
    if field == "name" and value == "1" * 400:
        value = "1" * 401
    with pytest.raises(ValidationError) as refused:
        VgpuChanges.model_validate({field: value})
    assert len(explain(refused.value)) < 700
    with pytest.raises(VgpuError):
        VgpuSpec.parse(**({"sm_percent": 10} | {field: value}))


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 5000 + "h", "1/" + "9" * 5000, "9" * 65])
def test_a_text_with_too_many_digits_is_refused_before_it_is_a_number(text: str) -> None:
    for parse in (parse_bytes, parse_percent, parse_fraction, parse_duration_ns):
        with pytest.raises(ValueError, match="is not a") as refused:
            parse(text)
        assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "message",
    [
        {"op": "watch", "interval_ns": (1 << 64) - 1},
        {"op": "events", "since_unix_s": math.nan},
        {"op": "events", "since_unix_s": math.inf},
        {"op": "status", "id": (1 << 64) - 1},
        {"op": "inspect", "vgpu": "x" * 5000},
        {"op": "watch", "vgpus": ["x"] * 2000},
        {"op": "trace", "gpu": "0", "duration_ns": 1 << 63},
        {"op": "set-gpu", "gpu": "0", "period_ns": 1 << 63},
    ],
    ids=str,
)
def test_requests_beyond_their_bounds_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        REQUESTS.validate_python(message)
    with pytest.raises(ValidationError):
        FORWARDS.validate_python({"op": "forward", "uid": 0, "request": message})


@pytest.mark.parametrize("uid", [-1, 1 << 32])
def test_a_uid_is_one(uid: int) -> None:
    with pytest.raises(ValidationError):
        FORWARDS.validate_python({"op": "forward", "uid": uid, "request": {"op": "status"}})


def test_readings_carry_an_unsigned_word_of_a_page() -> None:
    assert Failure(id=(1 << 64) - 1, code="internal", error="").id == (1 << 64) - 1  # type: ignore[arg-type]
    assert Events(since_unix_s=-1e9).since_unix_s == -1e9


def test_an_error_has_three_complaints_of_200_letters_and_nothing_for_a_terminal() -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(Events).validate_python({f"\x1b[2J{n}" + "x" * 5000: n for n in range(900)})
    text = explain(refused.value)
    assert text.endswith("; and more")
    assert [len(part) for part in text.split("; ")] == [200, 200, 200, 8]
    assert "\x1b" not in text
    assert (cleaned("a\nb\x07"), cleaned("x" * 200), len(cleaned("x" * 201))) == ("a�b�", "x" * 200, 200)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("memory_bytes", 1 << 70, "--mem: is too large"),
        ("name", "x" * 5000, "--name: is longer than 4096 characters"),
    ],
)
def test_what_is_out_of_bounds_is_told_without_the_bounds_of_a_machine_word(
    field: str, value: object, told: str
) -> None:
    with pytest.raises(VgpuError) as refused:
        VgpuSpec.parse(**{field: value})
    assert told in str(refused.value)
