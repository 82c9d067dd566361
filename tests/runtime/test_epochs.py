"""Epochs beyond 32 bits, and the words that pages have of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuserver.runtime.journal import EPOCH_RESERVE
from gpuserver.runtime.leases.epochs import WORDS, epoch_of, word_of

epochs = st.one_of(
    st.integers(1, 1 << 40), st.builds(lambda round_, near: round_ * WORDS + near, *[st.integers(1, 9)] * 2)
)


@given(epochs, st.integers(1, 1 << 30))
def test_a_word_means_the_newest_lease_that_has_it(epoch: int, ago: int) -> None:
    assert 1 <= word_of(epoch) <= WORDS
    assert epoch_of(word_of(epoch), epoch + ago) == epoch
    assert epoch_of(0, epoch) == 0


@given(epochs)
def test_of_two_leases_the_later_one_has_the_later_word(epoch: int) -> None:
    ahead = (word_of(epoch + 1) - word_of(epoch)) % 2**32
    assert ahead in {1, 2}
    assert (word_of(epoch + EPOCH_RESERVE) - word_of(epoch)) % 2**32 in {EPOCH_RESERVE, EPOCH_RESERVE + 1}
