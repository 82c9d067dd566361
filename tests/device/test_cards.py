"""The cards of the simulated device, against docs/reference/cards.md and against what NVML would report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuserver.device.nvidia.nvml import CHECKPOINT_DRIVER, capabilities_of, cores_per_sm
from gpuserver.device.simulated.profiles import PROFILES, Profile

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "cards.md"


def test_the_document_has_these_cards() -> None:
    rows = re.findall(r"^\| (.+) \|$", DOCUMENT.read_text(), re.M)[2:]
    assert [tuple(row.split(" | ")) for row in rows] == [
        (
            card.name,
            card.architecture,
            "{}.{}".format(*card.compute_capability),
            str(card.sm_count),
            f"{card.memory_gib} GiB",
            *("yes" if can else "no" for can in (card.preempts, card.partitions, card.checkpoints)),
        )
        for card in PROFILES
    ]


def test_no_card_is_there_twice_and_generations_are_in_order() -> None:
    assert len({card.name for card in PROFILES}) == len(PROFILES)
    capabilities = [card.compute_capability for card in PROFILES]
    assert capabilities == sorted(capabilities)
    generations = dict.fromkeys(card.architecture for card in PROFILES)
    assert list(generations) == ["Pascal", "Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell"]


@pytest.mark.parametrize("card", PROFILES, ids=lambda card: card.name)
def test_nvml_finds_the_same_sms_and_capabilities(card: Profile) -> None:
    assert card.cuda_cores % card.sm_count == 0
    assert card.cuda_cores // cores_per_sm(*card.compute_capability) == card.sm_count
    assert capabilities_of(card.compute_capability, CHECKPOINT_DRIVER) == card.capabilities


def test_an_older_driver_has_no_checkpoints_and_an_unknown_card_no_partitions() -> None:
    assert not capabilities_of((9, 0), CHECKPOINT_DRIVER - 1).checkpoints
    unknown = capabilities_of(None, CHECKPOINT_DRIVER)
    assert (unknown.compute_capability, unknown.preempts, unknown.partitions) == (None, False, False)
