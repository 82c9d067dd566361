"""Every number of a message has a lower and an upper bound, and what a peer asks has bounded texts and lists.

``Bounded`` and ``BoundedRequest`` are bases of pydantic models. They add the bounds that a field does not state itself,
so that no field is without: not the next one either.
"""

from __future__ import annotations

import sys
from typing import Any, Final, TypeAlias

from pydantic import BaseModel, GetCoreSchemaHandler

LEAST: Final = -(1 << 63)
MOST_STORED: Final = (1 << 63) - 1
"""What SQLite keeps, and what a signed word of a page holds."""
MOST_CARRIED: Final = (1 << 64) - 1
"""What msgpack carries: a counter may be an unsigned word of a page."""
LARGEST_REAL: Final = sys.float_info.max
LONGEST_TEXT: Final = 4096
MOST_ITEMS: Final = 1024

_Schema: TypeAlias = dict[str, Any]
_LISTS: Final = frozenset({"list", "tuple", "set", "frozenset", "dict"})
_NO_SCHEMA: Final = frozenset({"metadata", "config", "serialization", "default", "cls", "expected"})


def bounded(schema: Any, most: int, *, request: bool) -> Any:
    """``schema`` (of pydantic-core) with what is missing: whole numbers are at most ``most``, and texts and lists of a
    ``request`` have a length."""
    if isinstance(schema, list | tuple):
        return type(schema)(bounded(part, most, request=request) for part in schema)
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value if key in _NO_SCHEMA else bounded(value, most, request=request) for key, value in schema.items()
    }
    return found | _missing(found, most, request=request)


def _missing(schema: _Schema, most: int, *, request: bool) -> _Schema:
    match schema.get("type"):
        case "int":
            return _ends(schema, LEAST, most)
        case "float":
            return _ends(schema, -LARGEST_REAL, LARGEST_REAL) | {"allow_inf_nan": False}
        case "str" if request and "max_length" not in schema:
            return {"max_length": LONGEST_TEXT}
        case kind if request and kind in _LISTS and "max_length" not in schema:
            return {"max_length": MOST_ITEMS}
        case _:
            return {}


def _ends(schema: _Schema, least: float, most: float) -> _Schema:
    lower = {} if schema.keys() & {"ge", "gt"} else {"ge": least}
    upper = {} if schema.keys() & {"le", "lt"} else {"le": most}
    return lower | upper


class Bounded(BaseModel):
    """Base of answers: numbers are bounded by what msgpack carries."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return bounded(handler(source), MOST_CARRIED, request=False)


class BoundedRequest(BaseModel):
    """Base of requests: numbers are bounded by what SQLite keeps, and texts and lists have a longest length."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return bounded(handler(source), MOST_STORED, request=True)
