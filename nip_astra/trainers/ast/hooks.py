"""What a trainer of the AST family may define, and what its definitions may use.

Shape suffixes: `N` node, `B` sample, `T` token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.language_models.base import LanguageModel, TokenScores, pad_left
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rollouts.samples import Sample, collate
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.behaviour import Behaviour
from nip_astra.trainers.ast.rewards import credit_of


class AstHooks(ABC):
    """Hooks, `flatten` and `step` among them, which every trainer defines, and their tools.

    Attributes
    ----------
    parameters
        The trainer's own section.
    policy : LanguageModel
        The attacker's model.
    flatten_metrics : dict[str, float]
        What `flatten` noticed about the last tree and wants logged; `flatten` may set it.
    compares_with_sampler : bool
        Whether the loss compares with the log-probabilities that probes were sampled with. They are
        then scored anew where the model samples by another path than it scores.
    behaviour : Behaviour or None
        Which probabilities of probes are learnt from; by the trainer's parameter `behaviour`, a
        `BehaviourParameters`, where it has one.
    """

    parameters: Any
    policy: LanguageModel
    flatten_metrics: dict[str, float] = {}
    compares_with_sampler: ClassVar[bool] = False
    behaviour: Behaviour | None = None
    _step_batches: Sequence[TensorDict] = ()

    @abstractmethod
    def flatten(self, tree: RolloutTree) -> list[Sample]:
        """The training samples of a rollout; hook."""

    @abstractmethod
    def step(self, batch: TensorDict) -> LossOutput:
        """The loss of a batch, a mean over its samples, and scalars to log; hook."""

    def collate_fn(self, samples: Sequence[Sample]) -> TensorDict:
        """One batch of samples; hook."""
        return collate(samples)

    def credit(self, tree: RolloutTree) -> Tensor:
        """What each node is worth, `[N]`, from its reward and those that follow; hook."""
        parameters = getattr(self.parameters, "credit", None)
        return tree.nodes["reward"] if parameters is None else credit_of(tree, parameters)

    def build_modules(self) -> dict[str, torch.nn.Module]:
        """What learns beside the attacker, for instance a value head; hook."""
        return {}

    @property
    def modules_lr_factor(self) -> float:
        """Learning rate of what `build_modules` gives, as a multiple of the attacker's; hook."""
        return 1.0

    def trainer_state(self) -> dict[str, Any]:
        """What this trainer remembers beside weights, for a checkpoint; hook."""
        return {}

    def load_trainer_state(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have none
        """Take what `trainer_state` gave; hook."""

    def policy_logprobs(self, batch: TensorDict, *names: str) -> tuple[Tensor, ...]:
        """The attacker's log-probabilities of continuations of `context`, with gradient.

        All continuations go through the model in one pass.

        Parameters
        ----------
        batch : TensorDict
            Holds `context` and, for each name, tokens and `<name>_mask`.

        Returns
        -------
        tuple[Tensor, ...]
            One `[B, T]` tensor a name, all of the width of the longest, nats, 0 on padding.
        """
        width = max(batch[name].shape[1] for name in names)
        ids, masks = [], []
        for name in names:
            padding = (0, width - batch[name].shape[1])
            ids.append(torch.nn.functional.pad(batch[name], padding))
            masks.append(torch.nn.functional.pad(batch[f"{name}_mask"], padding))
        logprobs = self.policy.logprobs(
            batch["context"].repeat(len(names), 1),
            batch["context_mask"].repeat(len(names), 1),
            torch.cat(ids),
            torch.cat(masks),
        )
        return logprobs.chunk(len(names))

    @torch.no_grad()
    def probe_logprobs(self, tree: RolloutTree) -> Tensor:
        """The attacker's log-probabilities of every probe, `[N, T]`, nats, 0 on padding."""
        contexts = [tree.context_of(node) for node in range(tree.num_nodes)]
        padded = pad_left(contexts, torch.device("cpu"))
        return self.policy.logprobs(*padded, tree.nodes["probe"], tree.nodes["probe_mask"]).cpu()

    def policy_scores(
        self, batch: TensorDict, *, needs_entropy: bool = False, needs_hidden: bool = False
    ) -> TokenScores:
        """What the attacker thinks of the tokens of `probe` after `context`, with gradient.

        Under the distribution that `behaviour` says; `probe_logprobs` are always the model's own.

        Parameters
        ----------
        needs_entropy, needs_hidden
            See `LanguageModel.token_scores`.
        """
        drawn = self.behaviour.drawn(batch) if self.behaviour is not None else None
        return self.policy.token_scores(
            *(batch["context"], batch["context_mask"], batch["probe"], batch["probe_mask"]),
            needs_entropy=needs_entropy,
            needs_hidden=needs_hidden,
            drawn=drawn,
        )

    def num_tokens_in_step(self, batch: TensorDict) -> float:
        """The part of a batch, by samples, of the probe tokens of the whole optimizer step.

        A sum over tokens divided by it is a mean over the step's tokens once the loop has averaged
        the batches by their samples, however the step is split into batches.
        """
        batches = self._step_batches or [batch]
        num_tokens = sum(int(part["probe_mask"].sum()) for part in batches)
        return num_tokens * len(batch) / sum(len(part) for part in batches)
