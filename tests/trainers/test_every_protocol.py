"""Every trainer of provers and verifiers runs on every protocol of both scenarios."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.resolving.resolution import resolve_experiment
from tests.kit.experiments import run_in

TRAINERS = ("vanilla_ppo", "mappo", "reinforce", "spg", "solo_agent")
SCENARIOS = {
    "graph_isomorphism": (
        "graph_isomorphism.dataset.num_train=24",
        "graph_isomorphism.dataset.num_test=8",
        "graph_isomorphism.agents.default.num_gnn_layers=1",
    ),
    "image_classification": ("image_classification.dataset.max_train_size=64",),
}
SMALL = (
    "rl.frames_per_batch=32",
    "rl.steps_per_env_per_iteration=4",
    "rl.minibatch_size=16",
    "rl.num_epochs=1",
    "rl.num_test_iterations=1",
)


def _case(scenario: str, trainer: str, protocol: str, zero_knowledge: bool) -> Any:
    """Not slow: each protocol with vanilla_ppo, and reinforce on graphs, which no preset has."""
    is_on_graphs = scenario == "graph_isomorphism"
    is_quick = trainer == "vanilla_ppo" and (
        protocol == "nip" or (is_on_graphs and not zero_knowledge)
    )
    is_quick |= (trainer, protocol) == ("reinforce", "nip") and is_on_graphs
    name = f"{scenario}-{trainer}-{protocol}{'-zk' * zero_knowledge}"
    marks = () if is_quick else pytest.mark.slow
    return pytest.param(scenario, trainer, protocol, zero_knowledge, id=name, marks=marks)


@pytest.mark.parametrize(
    ("scenario", "trainer", "protocol", "zero_knowledge"),
    [
        _case(*parts)
        for parts in product(SCENARIOS, TRAINERS, map(str, InteractionProtocolType), (False, True))
    ],
)
def test_a_test_run_ends_with_results(
    scenario: str, trainer: str, protocol: str, zero_knowledge: bool, tmp_path: Path
) -> None:
    overrides = [f"interaction_protocol={protocol}", *SCENARIOS[scenario]]
    if trainer != "solo_agent":
        overrides += [*SMALL, f"protocol_common.zero_knowledge={str(zero_knowledge).lower()}"]
    resolved = resolve_experiment(trainer=trainer, scenario=scenario, overrides=overrides)
    run = run_in(tmp_path, resolved, test_run=True)
    assert json.loads((run / "results.json").read_text())["after"]
    assert (run / "model").is_dir()
    assert "<svg" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("trainer", "short"),
    [("vanilla_ppo", SMALL), ("spg", SMALL), ("solo_agent", ("solo_agent.num_epochs=2",))],
)
def test_networks_with_every_option_learn(
    trainer: str, short: tuple[str, ...], tmp_path: Path
) -> None:
    options = ("use_dual_gnn=true", "gnn_output_digits=4", "use_batch_norm=true")
    options += ("noise_sigma=0.1", "transformer_dropout=0.1")
    agents = [f"graph_isomorphism.agents.default.{option}" for option in options]
    overrides = ["interaction_protocol=nip", *SCENARIOS["graph_isomorphism"], *agents, *short]
    resolved = resolve_experiment(
        trainer=trainer, scenario="graph_isomorphism", overrides=overrides
    )
    run = run_in(tmp_path, resolved, test_run=True, num_threads=1)
    after = json.loads((run / "results.json").read_text())["after"]
    numbers = [value for value in after.values() if isinstance(value, float)]
    assert numbers
    assert all(map(math.isfinite, numbers))
