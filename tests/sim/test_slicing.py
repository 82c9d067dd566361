"""The simulated GPU slices time as an H100 does, and says what each program truly ran. In virtual time."""

from __future__ import annotations

import pytest

from benchmarks.micro.slicing import BERT, GEMM, SCENES, STREAM, TRAINER, Scene, part, play
from cython_ext.simengine import Engine


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_programs_beside_each_other_do_what_they_did_on_an_h100(scene: Scene) -> None:
    assert part(scene) == pytest.approx(scene.measured, rel=0.08)


@pytest.mark.parametrize("scene", SCENES[1:3], ids=lambda scene: scene.name)
def test_a_trainer_keeps_what_it_kept_on_an_h100(scene: Scene) -> None:
    assert part(scene) == pytest.approx(scene.measured, abs=0.03)


def test_each_program_ran_what_it_submitted() -> None:
    for program in play([TRAINER, STREAM, BERT], seconds=1):
        done_ns = program.steps * program.load.kernels * program.load.kernel_ns
        in_flight_ns = program.load.depth * program.load.kernels * program.load.kernel_ns
        assert done_ns <= program.kernel_ns <= done_ns + in_flight_ns


def test_time_is_lost_to_switches_alone() -> None:
    engine = Engine()
    ran_ns = sum(program.kernel_ns for program in play([GEMM, GEMM], engine, seconds=1))
    assert ran_ns == engine.kernel_ns
    assert ran_ns == pytest.approx(1e9 * 2050 / (2050 + 138), rel=0.01)
