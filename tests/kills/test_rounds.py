"""Commands that are ended at random moments leave nothing behind (rounds.py)."""

from __future__ import annotations

import pytest

from tests.kills.rounds import drawn, play


def test_the_same_seed_gives_the_same_rounds() -> None:
    assert drawn(20, 7) == drawn(20, 7)
    assert drawn(20, 7) != drawn(20, 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_rounds_leave_nothing() -> None:
    assert play(50, 1, 4) == []
