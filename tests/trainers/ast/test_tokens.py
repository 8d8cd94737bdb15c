"""Work is counted by what it was for."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.trainers.ast.tokens import rollout_token_metrics
from tests.tiny import experience_of


@pytest.mark.parametrize("name", ["ast_ppo", "ast_grpo"])
def test_scoring_again_is_done_once_and_counted_apart(name: str, tiny_scenario: Path) -> None:
    resolved = resolve_experiment(
        trainer=name,
        scenario=str(tiny_scenario),
        overrides=["ast_chat.attacker.language_model.dtype=bfloat16"],
    )
    trainer = prepare_experiment(resolved, progress=False).trainer
    policy = trainer.policy
    with (
        mock.patch.object(policy, "token_scores", wraps=policy.token_scores) as scored,
        policy.counting() as spent,
    ):
        tree = experience_of(trainer).tree
    assert scored.call_count == 1
    metrics = rollout_token_metrics({"attacker": spent}, tree)
    assert 1.0 <= metrics["tokens/attacker_forwarded_per_unique"] <= 1.3
    assert metrics["tokens/rescored"] > 0
    assert spent.scored == 0
    assert "value" not in tree.nodes
