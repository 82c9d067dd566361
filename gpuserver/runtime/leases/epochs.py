"""Epochs of leases: the scheduler's grow for ever, those in the pages are their last 32 bits, so to say.

Pages compare epochs on a circle (``cython_ext/pages/layout.pxd``) that has no 0. A GPU in spatial mode goes round it in
weeks, so a GPU Server must be able to as well.
"""

from __future__ import annotations

from typing import Final

WORDS: Final = (1 << 32) - 1


def word_of(epoch: int) -> int:
    """Of a lease, as pages and dispatcher have it: 1 … 2³² − 1."""
    return epoch if epoch <= WORDS else (epoch - 1) % WORDS + 1


def epoch_of(word: int, next_epoch: int) -> int:
    """Which lease a word means, of those before ``next_epoch``: the newest. 0 is none."""
    if word == 0 or next_epoch <= WORDS + 1:
        return word
    last = next_epoch - 1
    return last - (word_of(last) - word) % WORDS
