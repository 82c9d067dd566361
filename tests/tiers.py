"""Which points of a matrix ``make test`` leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Parameters that only ``make test-slow`` tries: ``parametrize("kind", ["plain", *slow("managed", "array")])``."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
