"""The model behind a plan agrees with simulated runs."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from types import ModuleType

import pytest

from nip_astra.distributed.placement import Cluster, plan_for


def test_the_model_agrees_with_a_simulation(benchmark: ModuleType) -> None:
    cluster = Cluster(spread=0.1, hours_between_failures=2_000.0)
    work = replace(benchmark.RUN, num_iterations=150)
    hours = [benchmark.simulated_hours(work, 64, cluster, random.Random(seed)) for seed in range(5)]
    assert plan_for(work, 64, cluster).hours == pytest.approx(statistics.median(hours), rel=0.04)
