"""The temporal scheduler's promises over random populations, judged from outside."""

from __future__ import annotations

from hypothesis import example, given

from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core import oracle
from tests.core.model import MS, US, Run, S, Work
from tests.core.populations import Population, temporal_populations
from vgpu.share import PPM, Priority, Share

SMALL_ONES_WITH_CREDIT = Population(
    shares=(
        *(Share(r, PPM, priority=Priority.LOW) for r in (400_000, 150_000, 30_000, 30_000)),
        Share(30_000, PPM, priority=Priority.NORMAL),
    ),
    works=(
        *(Work(jitter=0.0, refill_ns=0, start_ns=start * MS) for start in (0, 391, 391)),
        *(Work(jitter=0.0, refill_ns=0, burst=1, pause_ns=MS, start_ns=start * MS) for start in (386, 0)),
    ),
    seed=0,
)
"""A vGPU far ahead, in virtual time, of one with 3 % and idle credit owes nothing. It is not to be penalised."""

SHORT_HAND_OVERS = Population(
    shares=(
        Share(333_333, priority=Priority.LOW),
        *(Share(333_333),) * 2,
    ),
    works=(
        *(Work(kernel_ns=2 * MS, jitter=0.3, start_ns=425 * MS, tails=True),) * 2,
        Work(kernel_ns=2 * MS, jitter=0.3, start_ns=425 * MS),
    ),
    seed=340,
)
"""What costs 0.1 ms counts as 0.2: the period, and with it each token, is twice as long."""


def simulate(population: Population, seconds: int = 3) -> tuple[Run, oracle.Watch]:
    scheduler = TemporalScheduler()
    watch = oracle.Watch(scheduler)
    return population.run(scheduler, watch).run(seconds * S), watch


BESIDE_ONES_THAT_DO_NOT_DRAIN = Population(
    shares=(
        *(Share(30_000, 30_000), Share(80_000), Share(570_000), Share(40_000)),
        Share(90_000, 90_000),
    ),
    works=(
        Work(kernel_ns=5 * MS, jitter=0.0, refill_ns=0, burst=8, pause_ns=102 * MS, start_ns=502 * MS),
        Work(kernel_ns=30 * MS, jitter=0.0, refill_ns=0, burst=19, pause_ns=165 * MS, start_ns=427 * MS),
        Work(kernel_ns=5 * MS, refill_ns=400 * US, start_ns=30 * MS, tails=True),
        Work(kernel_ns=30 * MS, jitter=0.3, start_ns=454 * MS, tails=True),
        Work(kernel_ns=30 * MS, jitter=0.3, burst=15, pause_ns=100 * MS, start_ns=21 * MS),
    ),
    seed=132,
)
"""Others pay for the overlap with the first one's lease, which went on and on: its bucket did not show what it used."""

A_FAIR_TOKEN_BESIDE_FEW = Population(
    shares=(
        *(Share(30_000, 39_000), Share(180_000), Share(30_000), Share(30_000)),
        Share(570_000, 741_000),
    ),
    works=(
        Work(jitter=0.3, burst=15, pause_ns=150 * MS, start_ns=311 * MS, tails=True),
        Work(kernel_ns=2 * MS, jitter=0.0, refill_ns=0, start_ns=600 * MS),
        Work(kernel_ns=30 * MS, refill_ns=0, start_ns=118 * MS),
        Work(kernel_ns=5 * MS, jitter=0.3, start_ns=163 * MS),
        Work(kernel_ns=30 * MS, refill_ns=0, start_ns=118 * MS, tails=True),
    ),
    seed=1183,
)
"""One has a token of 32 ms beside another of 3 %, before a third one comes and a fourth one's limit lets it again."""

TWO_TURNS_AS_THE_ONLY_ONE = Population(
    shares=(
        *(Share(22_900), Share(412_213, 412_213), Share(61_068, 61_068), Share(68_702)),
        Share(435_114, 565_648),
    ),
    works=(
        Work(kernel_ns=2 * MS, jitter=0.0, refill_ns=0, start_ns=125 * MS, tails=True),
        Work(kernel_ns=2 * MS, jitter=0.0, start_ns=599 * MS),
        *(Work(kernel_ns=2 * MS, jitter=0.0, refill_ns=0, start_ns=600 * MS),) * 2,
        Work(kernel_ns=5 * MS, jitter=0.0, start_ns=76 * MS),
    ),
    seed=3697,
)
"""The first one's last two turns began while the last one's bucket was empty, and ended because others came."""

TAIL_AFTER_TAIL = Population(
    shares=(
        *(Share(30_000, 30_000), Share(30_000), Share(30_000), Share(30_000)),
        Share(50_000, 50_000),
    ),
    works=(
        Work(jitter=0.0, refill_ns=0, burst=4, pause_ns=MS, start_ns=404 * MS),
        Work(kernel_ns=5 * MS, refill_ns=0, burst=1, pause_ns=MS, start_ns=406 * MS),
        Work(jitter=0.0, refill_ns=0, start_ns=4 * MS, tails=True),
        Work(jitter=0.0, refill_ns=0),
        Work(jitter=0.0, refill_ns=0, burst=1, pause_ns=MS, start_ns=MS),
    ),
    seed=0,
)
"""The last one has a kernel of 1 ms in each lease, of which 0.15 ms are at another one's tail."""


@given(temporal_populations())
@example(BESIDE_ONES_THAT_DO_NOT_DRAIN)
@example(A_FAIR_TOKEN_BESIDE_FEW)
@example(TWO_TURNS_AS_THE_ONLY_ONE)
@example(TAIL_AFTER_TAIL)
def test_promises_hold_for_any_population(population: Population) -> None:
    run, watch = simulate(population)
    assert not watch.found
    for check in oracle.TEMPORAL_CHECKS:
        assert not check(run)


@given(temporal_populations(priorities=True))
@example(SMALL_ONES_WITH_CREDIT)
@example(SHORT_HAND_OVERS)
def test_priority_takes_nobodys_guarantee(population: Population) -> None:
    run, watch = simulate(population)
    assert not watch.found
    assert not oracle.fairness(run)
    assert not oracle.limits(run)
    assert not oracle.one_holder(run)


A_GO_AT_A_TAIL_THAT_CROSSED_ITS_WITHDRAWAL = Population(
    shares=(Share(220_000), Share(340_000), Share(420_000, priority=Priority.LOW)),
    works=(
        Work(kernel_ns=5 * MS, jitter=0.0, refill_ns=0, burst=1, pause_ns=185 * MS, start_ns=76 * MS),
        Work(kernel_ns=2 * MS, start_ns=76 * MS, tails=True),
        Work(kernel_ns=MS, refill_ns=400 * US, start_ns=81 * MS),
    ),
    seed=0,
)


@given(temporal_populations(priorities=True))
@example(A_GO_AT_A_TAIL_THAT_CROSSED_ITS_WITHDRAWAL)
def test_the_books_say_what_was_seen(population: Population) -> None:
    """8."""
    run, _ = simulate(population)
    assert not oracle.books_agree(run.quiet())
