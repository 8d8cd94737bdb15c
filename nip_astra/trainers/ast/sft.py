"""Supervised training of an attacker on given probes, or on the best found so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from nip_astra.parameters.conditions import where
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.policy_losses import nll_loss
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.rollouts.messages import Role, Turn
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.executor import AsyncRolloutParameters
from nip_astra.scenario_base.conversation.prompts import read_probe_conversations
from nip_astra.trainers.ast.base import AstTrainer
from nip_astra.trainers.ast.rollouts import CreditParameters
from nip_astra.trainers.registry import register_trainer
from nip_astra.utils.seeding import derived_generator

FINDS_ITS_OWN = where("probes", None)
"""Condition of the parameters that define the best probes so far."""


@register_trainer(TrainerType.AST_SFT)
class AstSftTrainer(AstTrainer):
    """Supervised fine-tuning on given probes, or on the best probes found so far.

    Loss: `-log pi(probe)`, mean over the tokens of all probes of a step. With a file of `probes`
    each episode's opening is answered by a row of it, each probe in the context of the turns before
    it; this is a warm start (arXiv:2202.03286,
    supervised learning). Without one the trainer keeps the best probes that it has met, in their
    contexts, and imitates these: best-of-n distilled again and again.
    """

    class Parameters(AsyncRolloutParameters):
        """Training probes; asynchronous rollouts need no correction."""

        probes: str | None = None
        """File of probes, in the formats of prompt files; null for the best so far. All probes of a
        row with messages are learned, each after the turns before it."""
        num_best: Annotated[int, FINDS_ITS_OWN] = Field(default=256, ge=1)
        """Maximum number of best probes kept. Larger is more varied and slower to improve."""
        num_samples: Annotated[int, FINDS_ITS_OWN] = Field(default=64, ge=1)
        """Training probes per iteration, drawn from those kept without replacement."""
        min_score: Annotated[float, FINDS_ITS_OWN] = Field(default=0.5, ge=0, le=1)
        """Minimum response score of a kept probe."""
        credit: Annotated[CreditParameters, FINDS_ITS_OWN] = CreditParameters()
        """Credit by which the best are ranked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._best: list[Sample] = []
        self._given: list[tuple[tuple[str, str], ...]] = []
        if self.parameters.probes is not None:
            self._given = read_probe_conversations(
                self.parameters.probes, self.scenario_instance.scenario_dir
            )

    def flatten(self, tree: RolloutTree) -> list[Sample]:
        generator = derived_generator(self.hyper_params.seed, "imitated", self.state.iteration)
        if self._given:
            choice = torch.randint(len(self._given), (tree.num_episodes,), generator=generator)
            return [
                sample
                for episode, index in enumerate(choice.tolist())
                for sample in self._samples_after_opening(tree, episode, self._given[index])
            ]
        is_good_N = tree.nodes["response_score"] >= self.parameters.min_score
        met = [*self._best, *probes_that_worked(tree, is_good_N)]
        self._best = best_of(met, self.parameters.num_best)
        order = torch.randperm(len(self._best), generator=generator).tolist()
        self.log_metrics({"best/kept": float(len(order))})
        drawn = [self._best[index] for index in order[: self.parameters.num_samples]]
        # A probe kept from an earlier iteration belongs to no episode of this one.
        return [
            {"context": kept["context"], "probe": kept["probe"], "episode": torch.tensor(number)}
            for number, kept in enumerate(drawn)
        ]

    def _samples_after_opening(
        self, tree: RolloutTree, episode: int, turns: tuple[tuple[str, str], ...]
    ) -> Iterator[Sample]:
        """Yield a sample for each probe of a conversation that follows an episode's opening."""
        # In the attacker's template it is the assistant, and the target is the user.
        roles: dict[str, Role] = {"user": "assistant", "assistant": "user"}
        heard = [Turn("user", tree.prompts[episode])]
        for role, text in turns:
            if role == "user":
                context = tree.contexts[episode]
                if len(heard) > 1:
                    (context,) = self.attacker.contexts([self.attacker.tokenize(heard)])
                yield {
                    "context": torch.tensor(context),
                    "probe": torch.tensor(self.attacker.encode_turn(text.strip())),
                    "episode": torch.tensor(episode),
                }
            heard.append(Turn(roles[role], text.strip()))

    def trainer_state(self) -> dict[str, Any]:
        return {"best": self._best}

    def load_trainer_state(self, state: dict[str, Any]) -> None:
        self._best = state["best"]

    def loss(self, batch: TensorDict) -> LossOutput:
        logprobs_BT = self.policy_scores(batch).logprobs_BT
        mask_BT = batch["probe_mask"].to(logprobs_BT.device)
        return nll_loss(logprobs_BT, mask_BT, normaliser=self.num_tokens_in_step(batch))


def probes_that_worked(tree: RolloutTree, is_good_N: Tensor) -> list[Sample]:
    """Return `context`, `probe` and `credit` of the selected nodes with a credit."""
    nodes = tree.nodes
    is_kept_N = is_good_N & ~nodes["credit"].isnan()
    return [
        {
            "context": torch.tensor(tree.context_of(node)),
            "probe": nodes["probe"][node][nodes["probe_mask"][node]],
            "credit": nodes["credit"][node],
        }
        for node in is_kept_N.nonzero().flatten().tolist()
    ]


def best_of(samples: Iterable[Sample], number: int) -> list[Sample]:
    """Return the probes with the highest credit, each once per context: its latest occurrence.

    Among equal credits, the first of each context precedes the second of any, so that successful
    probes after one opening do not displace those after another.
    """
    by_context: dict[tuple[int, ...], dict[tuple[int, ...], Sample]] = {}
    for sample in samples:
        probes = by_context.setdefault(tuple(sample["context"].tolist()), {})
        probes[tuple(sample["probe"].tolist())] = sample
    ranked = [
        (-float(sample["credit"]), place, sample)
        for probes in by_context.values()
        for place, sample in enumerate(sorted(probes.values(), key=lambda s: -float(s["credit"])))
    ]
    ranked.sort(key=lambda entry: entry[:2])
    return [sample for _, _, sample in ranked[:number]]
