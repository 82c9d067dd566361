"""Hypothesis profiles: dev while typing, ci for every push, nightly for depth, mutation for ``make mutation`` (the same
examples each time, and none made smaller: any of them kills a mutant). HYPOTHESIS_PROFILE chooses.

And what tests have in common by their kind: which ones ``make test`` runs at the same time, and how long they may take.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

# How fast or how choosy a strategy is says nothing about the code under test.
UNCHECKED = [HealthCheck.too_slow, HealthCheck.filter_too_much]
settings.register_profile("dev", max_examples=20, deadline=None, suppress_health_check=UNCHECKED)
settings.register_profile(
    "ci",
    max_examples=80,
    deadline=None,
    derandomize=True,  # a push is judged by what it changes, not by its luck; dev and nightly look for what is new
    database=None,
    # Without Phase.explain, which traces every line while a failure is made smaller: that takes five times as long.
    phases=[Phase.explicit, Phase.generate, Phase.target, Phase.shrink],
    suppress_health_check=UNCHECKED,
)
settings.register_profile("nightly", max_examples=1500, deadline=None, suppress_health_check=UNCHECKED)
settings.register_profile(
    "mutation",
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# As our own processes start each other: pydantic would look through every installed distribution in each of them.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
# Tests may run in a container with a PID namespace of its own: nodes and programs are in the same one then.
os.environ.setdefault("VGPU_ALLOW_PID_NAMESPACE", "1")

TESTS = Path(__file__).parent
# No clock of this machine in them: the decision cores, native code that is called and not waited for, and the suite's
# rehearsal, of which no figure counts.
PARALLEL = [
    *("broker", "core", "trace", "vocabulary", "wheel"),
    *("ctl/test_config.py", "ctl/test_overview.py", "ctl/test_systemd.py"),
    *("protocol/test_codec.py", "protocol/test_codec_machine.py", "sim/test_cost.py", "sim/test_engine.py"),
    "metrics/test_exposition.py",
    *("benchmarks/test_rehearsal.py", "server/test_swapping.py"),
    *("node/test_events.py", "node/test_health.py", "node/test_logs.py", "node/test_survey.py"),
    "ctl/test_surroundings.py",
    *(
        f"native/test_{name}.py"
        for name in (
            *("ahead", "alloctable", "arenas", "baton", "board", "durations", "gate", "graphs", "ledger"),
            *("page_gate_machine", "pages", "pieces", "pools", "trace", "window", "window_length", "wire"),
        )
    ),
]
SHRINKING_S = 600.0
"""Hypothesis makes a failure smaller for five minutes at most. A time-out meanwhile would be taken for another failure,
one that cannot be reproduced."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    parallel = {TESTS / name for name in PARALLEL}
    for item in items:
        if parallel & {item.path, *item.path.parents}:
            item.add_marker(pytest.mark.parallel)
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.timeout(SHRINKING_S))
