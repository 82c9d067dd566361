"""Which mode a GPU Server enters on a card that cannot have spatial mode."""

from __future__ import annotations

from typing import Final, cast

import pytest

from gpuserver.device.base import Partitioner
from gpuserver.device.simulated.card import SimulatedGpu
from gpuserver.device.simulated.profiles import PROFILES, Profile
from gpuserver.runtime.mps import enter_mode
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import ModeChoice
from vgpu.share import Mode

MODES: Final[tuple[ModeChoice, ...]] = ("spatial", "auto")


class Daemon:
    """A partitioner that counts its starts."""

    started = 0

    def start(self) -> None:
        self.started += 1


def enter(card: Profile, daemon: Daemon, choice: ModeChoice) -> Mode:
    gpu = SimulatedGpu(card)
    return enter_mode(cast(Partitioner, daemon), gpu.facts, gpu.capabilities, choice)[0]


@pytest.mark.parametrize("card", [card for card in PROFILES if not card.partitions], ids=lambda card: card.name)
def test_a_card_without_partitions_is_refused_spatial_mode(card: Profile) -> None:
    daemon = Daemon()
    with pytest.raises(VgpuError) as caught:
        enter(card, daemon, "spatial")
    assert caught.value.code is ErrorCode.MODE
    assert enter(card, daemon, "auto") is Mode.TEMPORAL
    assert daemon.started == 0


@pytest.mark.parametrize("card", [card for card in PROFILES if card.partitions], ids=lambda card: card.name)
def test_every_other_card_may_have_it(card: Profile) -> None:
    daemon = Daemon()
    for choice in MODES:
        assert enter(card, daemon, choice) is Mode.SPATIAL
    assert daemon.started == 2
