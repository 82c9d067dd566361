"""Hypothesis profiles: dev while typing, ci for every push, nightly for depth, mutation for ``make mutation`` (the same
examples each time, and none made smaller: any of them kills a mutant). HYPOTHESIS_PROFILE chooses."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

# How fast or how choosy a strategy is says nothing about the code under test.
UNCHECKED = [HealthCheck.too_slow, HealthCheck.filter_too_much]
settings.register_profile("dev", max_examples=20, deadline=None, suppress_health_check=UNCHECKED)
settings.register_profile("ci", max_examples=80, deadline=None, suppress_health_check=UNCHECKED)
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
