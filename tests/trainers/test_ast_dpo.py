"""Online DPO learns, and each of its parameters and of its scenario's acts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.scenarios.ast_chat import AstChatScenario
from nip_astra.scorers.base import SCORERS, Scorer, register_scorer
from nip_astra.trainers.ast_dpo import AstDpoTrainer
from tests.kit.tiny import experience_of, write_scenario

FAST = (
    "ast_chat.evaluation.use_random_search=false",
    "ast_chat.evaluation.num_episodes=2",
    "training.num_iterations=2",
)


@pytest.fixture
def _cat_scorer() -> Iterator[None]:
    snapshot = SCORERS.snapshot()

    @register_scorer("says_cat")
    class SaysCat(Scorer):
        """1 for a text that begins with the word cat."""

        def _score(self, texts: Sequence[str]) -> list[float]:
            return [float(text.startswith("cat ")) for text in texts]

    yield
    SCORERS.restore(snapshot)


@pytest.mark.usefixtures("_cat_scorer")
def test_an_attacker_learns_to_say_what_is_rewarded(tmp_path: Path) -> None:
    scenario = write_scenario(
        tmp_path,
        scorer={"_type": "says_cat"},
        reward={"w_response": 0.0, "w_combined": 1.0, "w_likelihood": 0.0},
        tree_width=4,
        tree_depth=1,
    )
    resolved = resolve_experiment(
        trainer="ast_dpo",
        scenario=str(scenario),
        overrides=[
            "training.num_iterations=15",
            "training.lr=1e-2",
            "training.num_episodes_per_experience=16",
            "training.minibatch_size=16",
            "ast_dpo.beta=0.05",
            "ast_chat.evaluation.use_random_search=false",
        ],
    )
    trainer = prepare_experiment(resolved, progress=False).trainer

    def says_cat(iteration: int) -> float:
        tree = experience_of(trainer, iteration).tree
        return float(tree.nodes["combined_score"].mean())

    before = says_cat(1000)
    trainer.train()
    assert before < 0.5
    assert says_cat(1000) > 0.9


CHANGES: dict[str, object] = {
    "ast_dpo.beta": 2.0,
    "ast_dpo.min_reward_difference": 0.3,
    "ast_dpo.min_score_difference": 0.5,
    "ast_dpo.min_chosen_score": 0.6,
    "ast_chat.tree_width": 3,
    "ast_chat.tree_depth": 1,
    "ast_chat.failure_threshold": 0.9,
    "ast_chat.reward.w_response": 3.0,
    "ast_chat.reward.w_combined": 0.0,
    "ast_chat.reward.w_likelihood": 2.0,
    "ast_chat.reward.likelihood_model": "target",
    "ast_chat.attacker.max_new_tokens": 3,
    "ast_chat.attacker.min_new_tokens": 4,
    "ast_chat.attacker.temperature": 0.3,
    "ast_chat.attacker.top_k": 2,
    "ast_chat.attacker.top_p": 0.3,
    "ast_chat.attacker.preamble": "hello",
    "ast_chat.attacker.format": "plain",
    "ast_chat.target.max_new_tokens": 2,
    "ast_chat.target.temperature": 0.0,
    "ast_chat.scorer.label": "civil",
}


@cache
def _outcome(scenario: Path, *overrides: str) -> tuple[Any, ...]:
    resolved = resolve_experiment(
        trainer="ast_dpo", scenario=str(scenario), overrides=[*FAST, *overrides]
    )
    trainer = prepare_experiment(resolved, progress=False).trainer
    trainer.train()
    return [p.sum().item() for p in trainer.policy.parameters()], trainer.results


@pytest.mark.parametrize("path", CHANGES)
def test_every_parameter_of_the_experiment_acts(tiny_scenario: Path, path: str) -> None:
    assert _outcome(tiny_scenario) != _outcome(tiny_scenario, f"{path}={CHANGES[path]}")


def _every_field(model: type[SubParameters]) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield model.__qualname__, name
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, SubParameters):
            yield from _every_field(annotation)


@pytest.mark.parametrize("model", [AstChatScenario.Parameters, AstDpoTrainer.Parameters])
def test_no_field_is_accepted_and_never_read(model: type[SubParameters]) -> None:
    root = Path(__file__).parents[2] / "nip_astra"
    source = "\n".join(path.read_text() for path in root.rglob("*.py"))
    for owner, name in _every_field(model):
        assert re.search(rf"\.{name}\b", source), f"nothing reads {owner}.{name}"
