"""What the hook's fast path rests on: who revokes fences the threads that launch, which have no fence of their own."""

from __future__ import annotations

import threading

import pytest

from cython_ext.testing.fake_peer import Revocation
from tests.tiers import slow


def unseen(rounds: int) -> int:
    revocation = Revocation()
    launching = threading.Thread(target=revocation.launch, args=(rounds,))
    launching.start()
    try:
        return revocation.revoke(rounds, True)
    finally:
        launching.join()


@pytest.mark.parametrize("rounds", [20_000, *slow(180_000)])
def test_no_launch_is_let_through_unseen(rounds: int) -> None:
    try:
        assert unseen(rounds) == 0
    except RuntimeError as error:  # the hook's launches execute a fence each, then
        pytest.skip(str(error))
