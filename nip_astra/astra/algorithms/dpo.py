"""Preference algorithms: pairs of the best and the worst probe of a group of siblings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from nip_astra.astra.core.algorithm import Algorithm
from nip_astra.astra.core.aliases import is_overridden
from nip_astra.astra.core.common import ActionT, StateT
from nip_astra.astra.core.graphs import GraphTree, tree_of
from nip_astra.astra.core.sampler import Graph
from nip_astra.astra.core.system import System
from nip_astra.rl_objectives.preference import (
    PREFERENCE_KINDS,
    preference_loss,
    sequence_logprobs,
)
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.dpo import (
    AstDpoTrainer,
    AstIpoTrainer,
    PairParameters,
    PairSelection,
    select_pairs,
)
from nip_astra.trainers.ast.rollouts import credit_of


@dataclass
class DPOStep(Generic[StateT, ActionT]):
    """A pair.

    Attributes
    ----------
    prefix : StateT
        State before the probes.
    suffix_pos, suffix_neg : ActionT
        The probes with the higher and the lower reward.
    reference_logratio : float or None
        log p(suffix_pos) - log p(suffix_neg) under the reference, nats; None if not
        computed yet.
    """

    prefix: StateT
    suffix_pos: ActionT
    suffix_neg: ActionT
    reference_logratio: float | None = None


@dataclass
class DPOBatch(Generic[StateT, ActionT]):
    """Pairs, in lists of equal length; see `DPOStep`."""

    prefixes: Sequence[StateT]
    suffix_pos: Sequence[ActionT]
    suffix_neg: Sequence[ActionT]
    reference_logratios: Sequence[float | None] | None = None


class DPO(
    Algorithm[StateT, ActionT, DPOStep[StateT, ActionT], DPOBatch[StateT, ActionT]],
    Generic[StateT, ActionT],
):
    """Online direct preference optimisation, as the registered trainer `ast_dpo`.

    A subclass may override only `step`, and call `logratios` for the compared quantities.

    Parameters
    ----------
    system : System
        The trained problem; also `problem`.
    beta : float
        Inverse temperature, > 0. Larger stays closer to the reference.
    **options
        Other parameters of `ast_dpo` (of `ast_ipo` for IPO): `loss` (`sigmoid`, `robust`, `hinge`),
        `label_smoothing`, `length_normalised`, `min_reward_difference`, `min_score_difference`,
        `min_chosen_score`, `credit`.
    """

    Parameters: ClassVar[type[PairParameters]] = AstDpoTrainer.Parameters

    def __init__(
        self,
        system: System[StateT, ActionT] | None = None,
        beta: float | None = None,
        *,
        problem: System[StateT, ActionT] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(system, problem=problem)
        given = options if beta is None else {"beta": beta, **options}
        self.parameters: Any = self.Parameters.from_dict(given)
        unsupported = ["weak_supervision", "max_staleness", "divergence"]
        if getattr(self.parameters, "loss", "ipo") not in PREFERENCE_KINDS:
            unsupported.append("loss")
        self._refuse(self.parameters, *unsupported)
        self.beta: float = self.parameters.beta
        self.flatten_metrics: dict[str, float] = {}

    def flatten(self, graph: Graph[StateT, ActionT]) -> list[DPOStep[StateT, ActionT]]:
        """Return one pair per group of siblings, unless its rewards are tied or its texts equal."""
        return self._pairs([graph])

    def flatten_all(
        self, graphs: Sequence[Graph[StateT, ActionT]]
    ) -> list[DPOStep[StateT, ActionT]]:
        if is_overridden(self, "flatten", DPO):
            return super().flatten_all(graphs)
        return self._pairs(graphs)

    def _pairs(self, graphs: Sequence[Graph[StateT, ActionT]]) -> list[DPOStep[StateT, ActionT]]:
        tree = tree_of(graphs)
        tree.nodes["credit"] = credit_of(tree, self.parameters.credit)
        steps: list[DPOStep[StateT, ActionT]] = []
        counts = {"kept": 0, "ties": 0, "identical": 0, "below_margin": 0}
        for width in sorted({len(group) for group in tree.groups}):
            numbers = [n for group in tree.groups if len(group) == width for n in group]
            pairs = self._choose(tree, numbers, width)
            counts["kept"] += len(pairs.chosen)
            counts["ties"] += pairs.num_ties
            counts["identical"] += pairs.num_identical
            counts["below_margin"] += pairs.num_below_margin
            steps += [
                self._pair(tree, numbers[chosen], numbers[rejected])
                for chosen, rejected in zip(pairs.chosen, pairs.rejected, strict=True)
            ]
        self.flatten_metrics = {f"pairs/{name}": float(count) for name, count in counts.items()}
        return steps

    def _choose(self, tree: GraphTree, numbers: list[int], width: int) -> PairSelection:
        part: Any = tree.nodes[torch.tensor(numbers)]
        return select_pairs(
            RolloutTree(part, width, [], [tree.probes[n] for n in numbers], [], []),
            min_reward_difference=self.parameters.min_reward_difference,
            min_score_difference=self.parameters.min_score_difference,
            min_chosen_score=self.parameters.min_chosen_score,
        )

    def _pair(self, tree: GraphTree, chosen: int, rejected: int) -> DPOStep[StateT, ActionT]:
        best, worst = tree.graph_nodes[chosen], tree.graph_nodes[rejected]
        ratio = None
        if best.reference_logprobs is not None and worst.reference_logprobs is not None:
            ratio = float(
                self._sequence(best.reference_logprobs[None])
                - self._sequence(worst.reference_logprobs[None])
            )
        return DPOStep(best.context, best.probe, worst.probe, ratio)

    def _sequence(self, logprobs_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        mask_BT = torch.ones_like(logprobs_BT, dtype=torch.bool) if mask_BT is None else mask_BT
        return sequence_logprobs(
            logprobs_BT, mask_BT, length_normalised=self.parameters.length_normalised
        )

    @staticmethod
    def collate_fn(batch: Sequence[DPOStep[StateT, ActionT]]) -> DPOBatch[StateT, ActionT]:
        return DPOBatch(
            [step.prefix for step in batch],
            [step.suffix_pos for step in batch],
            [step.suffix_neg for step in batch],
            [step.reference_logratio for step in batch],
        )

    def logratios(self, batch: DPOBatch[StateT, ActionT]) -> tuple[Tensor, Tensor]:
        """Return log p(suffix_pos) - log p(suffix_neg) under policy and reference, `[B]` nats."""
        contexts = [*batch.prefixes, *batch.prefixes]
        probes = [*batch.suffix_pos, *batch.suffix_neg]
        scores = self.system.token_values(contexts, probes)
        chosen_B, rejected_B = self._sequence(scores.logprobs_BT, scores.mask_BT).chunk(2)
        known = [ratio for ratio in batch.reference_logratios or () if ratio is not None]
        if len(known) == len(batch.prefixes):
            return chosen_B - rejected_B, torch.tensor(known).to(chosen_B)
        reference_BT, mask_BT = self.system.reference_values(contexts, probes)
        best_B, worst_B = self._sequence(reference_BT, mask_BT).chunk(2)
        return chosen_B - rejected_B, (best_B - worst_B).to(chosen_B)

    def step(self, batch: DPOBatch[StateT, ActionT]) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of a batch of pairs, and metrics."""
        return self._output(
            preference_loss(
                *self.logratios(batch),
                kind=self.parameters.loss,
                beta=self.beta,
                label_smoothing=self.parameters.label_smoothing,
            )
        )

    @staticmethod
    def _output(found: LossOutput) -> tuple[Tensor, dict[str, Any]]:
        return found.loss, dict(found.metrics)


class IPO(DPO[StateT, ActionT]):
    """Online identity preference optimisation, as the registered trainer `ast_ipo`."""

    Parameters = AstIpoTrainer.Parameters

    def step(self, batch: DPOBatch[StateT, ActionT]) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of a batch of pairs, and metrics."""
        return self._output(preference_loss(*self.logratios(batch), kind="ipo", beta=self.beta))
