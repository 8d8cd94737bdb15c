"""The verified claims about presets, again with one seed: each beats its comparison.

The results of five seeds, from which thresholds keep their distance, are in `parameters/README.md`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nip_astra.evaluation.run_results import read_results
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.factory import build_scenario_instance
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.scenarios.graphs.wl import wl_accuracy
from tests.kit.experiments import metrics_of, run_in
from tests.kit.learning import Learning

pytestmark = pytest.mark.slow
ALONE = 0.57
"""The share of digits that the verifier tells alone, learning from labels."""


def run(folder: Path, trainer: str, *overrides: str, scenario: str | None = None) -> dict[str, Any]:
    resolved = resolve_experiment(trainer=trainer, scenario=scenario, overrides=overrides)
    return read_results(run_in(folder, resolved)).results


@pytest.mark.parametrize("trainer", ["mappo", "reinforce", "spg"])
def test_a_word_lifts_the_verifier_above_its_accuracy_alone(
    tmp_path: Path, learning: Learning, trainer: str
) -> None:
    low, _ = run(tmp_path, trainer, f"seed={learning.seed}")["after"]["mean_accuracy_interval"]
    learning.check(low, threshold=ALONE + 0.05, best=1.0)


@pytest.mark.parametrize(
    ("trainer", "overrides"),
    [
        *(
            (f"ast_{name}", ())
            for name in ("dpo", "ipo", "ppo", "grpo", "reinforce", "sft", "simpo")
        ),
        # By the paper's clip half of the probes are clipped at once: 0.04 to 0.16.
        (
            "ast_grpo",
            ("ast_grpo.variant=gspo", "ast_grpo.clip_low=0.03", "ast_grpo.clip_high=0.04"),
        ),
    ],
)
def test_an_attacker_learns_to_make_pocket_chat_fail(
    tmp_path: Path, learning: Learning, trainer: str, overrides: tuple[str, ...]
) -> None:
    short = ("ast_chat.evaluation.num_episodes=60", "ast_chat.evaluation.use_random_search=false")
    results = run(tmp_path, trainer, *short, *overrides, f"seed={learning.seed}")
    learning.check(results["before"]["failure_rate"], threshold=0.2, best=0.0)
    # Of 60 episodes, two standard deviations are .12.
    learning.check(results["after"]["failure_rate"], threshold=0.4, best=1.0)


@pytest.mark.parametrize(
    ("trainer", "num_iterations"), [("pure_text_ei", 5), ("pure_text_malt", 4)]
)
def test_a_verifier_in_words_learns_from_less_of_its_preset(
    trainer: str, num_iterations: int, tmp_path: Path, learning: Learning
) -> None:
    """The 95 % intervals before and after do not overlap; the guide has the complete presets."""
    shorter = (f"num_iterations={num_iterations}", "rollouts_per_iteration=128")
    overrides = [f"text_rl.{override}" for override in shorter]
    results = run(tmp_path, trainer, *overrides, f"seed={learning.seed}")
    before, after = results["before"], results["after"]
    _, high_before = before["mean_accuracy_interval"]
    low_after, _ = after["mean_accuracy_interval"]
    learning.check((low_after - high_before) / (1 - high_before), threshold=0.0, best=1.0)
    learning.check(after["mean_accuracy"], threshold=0.75, best=1.0)
    assert after["num_episodes"] == 200
    assert results["training"]["num_jobs"] == num_iterations - 1


# ---- a verifier learns by asking what it cannot decide alone, and a leak is detected

SMALL = "graph_isomorphism_small"


def test_alone_an_agent_distinguishes_as_much_as_its_rounds_of_message_passing(
    tmp_path: Path, learning: Learning
) -> None:
    after = run(tmp_path, "solo_agent", f"seed={learning.seed}", scenario=SMALL)["after"]
    bound = wl_accuracy(_test_scores(), 2)
    assert after["verifier/test_accuracy"] <= bound + 0.01
    learning.check(after["verifier/test_accuracy"] - bound, threshold=-0.05, best=0.0)
    learning.check(after["prover/test_accuracy"], threshold=0.97, best=1.0)


def test_one_question_lifts_the_verifier_above_its_accuracy_alone(
    tmp_path: Path, learning: Learning
) -> None:
    overrides = ("rl.num_iterations=70", f"seed={learning.seed}")
    after = run(tmp_path, "vanilla_ppo", *overrides, scenario=SMALL)["after"]
    low, _ = after["mean_accuracy_interval"]
    bound = wl_accuracy(_test_scores(), 2)
    learning.check((low - bound) / (1 - bound), threshold=0.05, best=1.0)


def test_with_a_shared_reward_the_prover_gives_the_label_away_and_the_probe_sees_it(
    tmp_path: Path, learning: Learning
) -> None:
    overrides = (
        f"seed={learning.seed}",
        "interaction_protocol=adp",
        "protocol_common.shared_reward=true",
        "graph_isomorphism.include_linear_message_space=true",
        "message_regression.regressor._type=linear",
        "rl.num_iterations=60",
        "rl.frames_per_batch=2048",
        "rl.pretrain_decisions=false",
    )
    after = run(tmp_path, "vanilla_ppo", *overrides, scenario=SMALL)["after"]
    learning.check(after["mean_accuracy"], threshold=0.9, best=1.0)
    rows = metrics_of(tmp_path / "run")
    name = "message_regression/prover"
    first, *_, last = [row[name] for row in rows if name in row]
    learning.check(first, threshold=0.65, best=0.5)
    learning.check(last, threshold=0.95, best=1.0)


def _test_scores() -> Tensor:
    resolved = resolve_experiment(trainer="solo_agent", scenario=SMALL)
    instance = build_scenario_instance(
        resolved.hyper_params, ExperimentSettings(), kind=resolved.kind
    )
    assert instance.test_dataset is not None
    return instance.test_dataset["wl_score"]
