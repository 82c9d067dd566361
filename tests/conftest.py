"""What all tests have in common; tests/README.md says how they are laid out.

Hypothesis profiles, of which HYPOTHESIS_PROFILE chooses one: dev while typing; quick for ``make test``; ci for
``make test-slow``; nightly for depth; mutation for ``make mutation`` (the same examples each time, and none made
smaller: any of them kills a mutant).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

# How fast or how choosy a strategy is says nothing about the code under test.
UNCHECKED = [HealthCheck.too_slow, HealthCheck.filter_too_much]
settings.register_profile("dev", max_examples=20, deadline=None, suppress_health_check=UNCHECKED)
for name, max_examples in (("quick", 15), ("ci", 80)):
    settings.register_profile(
        name,
        max_examples=max_examples,
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
# Where a test expects that no node answers, none starts.
os.environ["VGPU_ON_DEMAND"] = "off"


def default_dispositions() -> None:
    """What tests start does not depend on how they were started: a shell's background job ignores SIGINT and SIGQUIT,
    ``nohup`` SIGHUP, and a child inherits that and every blocked signal. A caught signal is a default one after
    ``exec``; caught here by what does nothing, it is still ignored here."""
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python's own, which ``Popen`` restores
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


default_dispositions()

TESTS = Path(__file__).parent
LONGEST = (
    "upgrade/test_upgrade.py",
    "benchmarks/test_rehearsal.py",
    "integration/test_swapping.py",
    "core/test_gangs_and_classes.py",
    "core/test_planted_faults.py",
    "integration/test_migration.py",
    "ctl/test_on_demand.py",
    "integration/test_recovery.py",
    "kills/test_kills.py",
)
"""Files of minutes, the longest first. A file runs in one worker: if one of these began last, all others would wait."""
FIRST = {TESTS / name: place for place, name in enumerate(LONGEST)}

SHRINKING_S = 600.0
"""Hypothesis makes a failure smaller for five minutes at most. A time-out meanwhile would be taken for another failure,
one that cannot be reproduced."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.get(item.path, len(FIRST)))
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.timeout(SHRINKING_S))
