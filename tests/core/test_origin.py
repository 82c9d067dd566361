"""For whom a vGPU was made, and until when it stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from gpuserver.core.admission.origin import KEPT, NO_ASKER, Fate, Origin
from gpuserver.runtime.vgpus import Vgpu
from vgpu.identity import Process

ASKER = Process(4711, 99)
origins = st.builds(
    Origin, request_id=st.sampled_from(["", "a"]), confirmed=st.booleans(), asker=st.sampled_from([NO_ASKER, ASKER])
)


@given(origins, st.booleans(), st.booleans(), st.booleans())
def test_what_stays_and_what_goes(origin: Origin, held: bool, asker_lives: bool, attached: bool) -> None:
    fate = origin.fate(held=held, asker_lives=asker_lives, attached=attached)
    if held and (asker_lives or attached or not origin.of_process):
        assert fate is Fate.STAYS
    if not held and not origin.confirmed:
        assert fate is Fate.UNCONFIRMED, "no client knows of it"
    confirmed = origin.confirm().fate(held=held, asker_lives=asker_lives, attached=attached)
    assert confirmed is (Fate.ASKER_ENDED if origin.of_process and not asker_lives and not attached else Fate.STAYS)


@given(st.booleans(), st.booleans(), st.booleans())
def test_what_is_kept_never_goes_by_itself(held: bool, asker_lives: bool, attached: bool) -> None:
    assert KEPT.fate(held=held, asker_lives=asker_lives, attached=attached) is Fate.STAYS


def test_a_request_id_counts_for_its_user_alone() -> None:
    vgpu = SimpleNamespace(origin=Origin("a"), record=SimpleNamespace(owner=SimpleNamespace(uid=1000)))
    assert Vgpu.is_answer_to(cast(Vgpu, vgpu), 1000, "a")
    assert not Vgpu.is_answer_to(cast(Vgpu, vgpu), 1001, "a")
    assert not Vgpu.is_answer_to(cast(Vgpu, vgpu), 1000, "b")
