"""Which points of a matrix ``make test`` leaves out, and which properties have fewer examples."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

heavy = settings(max_examples=max(1, settings.default.max_examples // 3))
"""A property whose examples take a second: a third of the profile's number."""


def slow(*values: Any) -> list[Any]:
    """Parameters that only ``make test-slow`` tries: ``parametrize("kind", ["plain", *slow("managed", "array")])``."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
