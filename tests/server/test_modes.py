"""Which mode a GPU Server enters on a card that cannot have spatial mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from gpuserver.device.simulated.card import SimulatedGpu
from gpuserver.device.simulated.profiles import PROFILES, Profile
from gpuserver.runtime.server import GpuServer
from vgpu.errors import ErrorCode, VgpuError
from vgpu.share import Mode


class Daemon:
    """A partitioner that counts its starts."""

    started = 0

    def start(self) -> None:
        self.started += 1


def server(card: Profile) -> tuple[GpuServer, Daemon]:
    gpu, daemon = SimulatedGpu(card), Daemon()
    return cast(GpuServer, SimpleNamespace(facts=gpu.facts, gpu=gpu, daemon=daemon)), daemon


@pytest.mark.parametrize("card", [card for card in PROFILES if not card.partitions], ids=lambda card: card.name)
def test_a_card_without_partitions_is_refused_spatial_mode(card: Profile) -> None:
    stand_in, daemon = server(card)
    with pytest.raises(VgpuError) as caught:
        GpuServer.enter_mode(stand_in, "spatial")
    assert caught.value.code is ErrorCode.MODE
    assert GpuServer.enter_mode(stand_in, "auto")[0] is Mode.TEMPORAL
    assert daemon.started == 0


@pytest.mark.parametrize("card", [card for card in PROFILES if card.partitions], ids=lambda card: card.name)
def test_every_other_card_may_have_it(card: Profile) -> None:
    stand_in, daemon = server(card)
    for choice in ("spatial", "auto"):
        assert GpuServer.enter_mode(stand_in, choice)[0] is Mode.SPATIAL
    assert daemon.started == 2
