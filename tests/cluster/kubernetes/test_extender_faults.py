"""The model of ``test_extender_reservations`` finds a fault that is planted into the extender's reservations."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.cluster.kubernetes import test_extender_reservations as model
from vgpu.integrations.kubernetes.extender import reservations

WHOLE = settings(
    max_examples=3000,
    stateful_step_count=60,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def _forgets(patch: pytest.MonkeyPatch) -> None:
    """What is decided and not yet written does not count."""
    patch.setattr(reservations.Reservations, "begin", lambda self, held: None)


@pytest.mark.slow
def test_the_model_finds_a_planted_fault() -> None:
    with pytest.MonkeyPatch.context() as patch:
        _forgets(patch)
        with pytest.raises(AssertionError):
            run_state_machine_as_test(model.Cluster, settings=WHOLE)  # type: ignore[no-untyped-call]
