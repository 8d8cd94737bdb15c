"""Adds part of the best following probe's reward to a probe's own, before pairs are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nip_astra.astra import DPO, ASTEnvironment, ASTNode
from nip_astra.astra.core.environment import Graph
from nip_astra.astra.datasets import CONVOKIT_REDDIT_DEV, CONVOKIT_REDDIT_TRAIN
from nip_astra.astra.ext.transformers.hf_ast_problem import HFASTConfiguration, HFASTTrainer
from tests.astra.examples.gpt2_train import GPT2System


class BackupEnv(ASTEnvironment):
    """Plays trees whose rewards include those of later turns."""

    def __init__(
        self,
        problem: Any,
        prompts: list[str],
        gamma: float = 0.9,
        tree_width: int = 2,
        tree_depth: int = 3,
    ) -> None:
        super().__init__(problem, prompts, tree_width, tree_depth)
        self.gamma = gamma
        self.played: list[Graph[str, str]] = []

    def rollout(self, seed: int | None = None) -> Graph[str, str]:
        graph = super().rollout(seed)
        for node in graph.children:
            self._back_up(node)
        self.played.append(graph)
        return graph

    def _back_up(self, node: ASTNode) -> float:
        if node.children:
            node.reward += self.gamma * max(self._back_up(child) for child in node.children)
        return node.reward


def main(model: str, scorer: Any, ckpt_dir: Path) -> Any:
    problem = GPT2System(model, scorer)
    env = BackupEnv(problem, CONVOKIT_REDDIT_TRAIN, gamma=0.9)
    trainer = HFASTTrainer(
        HFASTConfiguration(training_steps=2),
        env,
        DPO(problem),
        dev_prompts=CONVOKIT_REDDIT_DEV[:4],
        eval_every=1,
        ckpt_dir=str(ckpt_dir),
    )
    trainer.train()
    return trainer
