"""The temporal scheduler's promises over random populations, judged from outside."""

from __future__ import annotations

from hypothesis import given

from gpuserver.core.temporal import TemporalScheduler
from tests.core import oracle
from tests.core.model import Run, S
from tests.core.populations import Population, temporal_populations


def simulate(population: Population, seconds: int = 3) -> tuple[Run, oracle.Watch]:
    scheduler = TemporalScheduler()
    watch = oracle.Watch(scheduler)
    run = Run(scheduler, list(population.shares), list(population.works), seed=population.seed, watch=watch)
    return run.run(seconds * S), watch


@given(temporal_populations())
def test_promises_hold_for_any_population(population: Population) -> None:
    run, watch = simulate(population)
    assert not watch.found
    for check in oracle.TEMPORAL_CHECKS:
        assert not check(run)


@given(temporal_populations(priorities=True))
def test_priority_takes_nobodys_guarantee(population: Population) -> None:
    run, watch = simulate(population)
    assert not watch.found
    assert not oracle.fairness(run)
    assert not oracle.limits(run)
    assert not oracle.one_holder(run)


@given(temporal_populations(priorities=True))
def test_the_books_say_what_was_seen(population: Population) -> None:
    """8."""
    run, _ = simulate(population)
    assert not oracle.books_agree(run.quiet())
