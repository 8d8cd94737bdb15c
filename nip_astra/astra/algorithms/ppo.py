"""Token-level PPO.

Shape suffixes: `B` row, `N` node, `T` token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from nip_astra.astra.core.algorithm import Algorithm
from nip_astra.astra.core.aliases import is_overridden
from nip_astra.astra.core.batches import values_in_parts
from nip_astra.astra.core.common import ActionT, StateT
from nip_astra.astra.core.graphs import GraphTree, tree_of
from nip_astra.astra.core.sampler import Graph
from nip_astra.astra.core.system import System, TokenValues
from nip_astra.errors import ConfigurationError
from nip_astra.rollouts.samples import Sample, collate
from nip_astra.trainers.ast.ppo import PpoParameters, ppo_loss, ppo_samples


@dataclass
class PPOStep(Generic[StateT, ActionT]):
    """A probe and its reward.

    Attributes
    ----------
    prefix : StateT
        State before the probe.
    suffix : ActionT
        The probe.
    reward : float
        Its own reward.
    tokens : Sample
        `[T]` each: `old_logprobs`, `reference_logprobs`, `advantage`, `return`, `old_value`.
    """

    prefix: StateT
    suffix: ActionT
    reward: float
    tokens: Sample


@dataclass
class PPOBatch(Generic[StateT, ActionT]):
    """Probes, in lists of equal length.

    Attributes
    ----------
    tokens : TensorDict
        The columns of `PPOStep.tokens`, `[B, T]`, and `probe_mask`.
    normaliser : float or None
        Divisor of sums over tokens, set by the loop if a step has several batches; None for the
        number of tokens.
    """

    prefix: Sequence[StateT]
    suffix: Sequence[ActionT]
    reward: Sequence[float]
    tokens: TensorDict
    normaliser: float | None = None

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that count."""
        return int(self.tokens["probe_mask"].sum())


class PPO(
    Algorithm[StateT, ActionT, PPOStep[StateT, ActionT], PPOBatch[StateT, ActionT]],
    Generic[StateT, ActionT],
):
    """Proximal policy optimisation with a value function, as the registered trainer `ast_ppo`.

    The ratio is to the sampling attacker, advantages are estimated over all turns of a
    conversation, and every node is a training sample, for any `tree_width`.

    Parameters
    ----------
    system : ValueFunctionSystem
        The trained problem, also `problem`; it defines `value`.
    clip_range : float
        Maximum distance of the ratio from 1, > 0.
    vf_loss_coef : float
        Weight of the value loss, >= 0.
    **options
        Other parameters of `ast_ppo`, for instance `gamma`, `lam`, `kl={"weight": 0.1}`; not
        `behaviour`, since the system itself returns the log-probabilities of its probes, and not
        `max_staleness`.
    """

    def __init__(
        self,
        system: System[StateT, ActionT] | None = None,
        clip_range: float | None = None,
        vf_loss_coef: float | None = None,
        *,
        problem: System[StateT, ActionT] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(system, problem=problem)
        named = {
            **dict.fromkeys(("clip_low", "clip_high"), clip_range),
            "value_weight": vf_loss_coef,
        }
        given = {name: value for name, value in named.items() if value is not None}
        self.parameters = PpoParameters.from_dict({**given, **options})
        self._refuse(self.parameters, "max_staleness")
        if not callable(getattr(self.system, "value", None)):
            raise ConfigurationError(
                f"{type(self.system).__name__} has no value function, which PPO needs. Define "
                "value(context, continuation), derive from ValueFunctionSystem, or use DPO."
            )
        prepare = getattr(self.system, "add_value_head", None)
        if prepare is not None:
            prepare(trains_model=self.parameters.value_trains_model)
        self.modules_lr_factor = self.parameters.value_lr_factor
        self.kl = self.parameters.kl.controller()
        self.flatten_metrics: dict[str, float] = {}
        self._is_value_checked = False

    @property
    def clip_range(self) -> float:
        """Maximum distance of the ratio from 1."""
        return float(self.parameters.chosen_loss().options["clip_high"])

    @property
    def vf_loss_coef(self) -> float:
        """Weight of the value loss."""
        return self.parameters.value_weight

    def state(self) -> dict[str, Any]:
        return self.kl.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl.load_state(dict(state))

    def flatten(self, graph: Graph[StateT, ActionT]) -> list[PPOStep[StateT, ActionT]]:
        """Return one sample per node with a verdict."""
        return self._samples([graph])

    def flatten_all(
        self, graphs: Sequence[Graph[StateT, ActionT]]
    ) -> list[PPOStep[StateT, ActionT]]:
        if is_overridden(self, "flatten", PPO):
            return super().flatten_all(graphs)
        return self._samples(graphs)

    @torch.no_grad()
    def _samples(self, graphs: Sequence[Graph[StateT, ActionT]]) -> list[PPOStep[StateT, ActionT]]:
        tree = tree_of(graphs)
        if not tree.graph_nodes:
            return []
        values_NT, num_unmatched = self._complete(tree)
        samples, metrics = ppo_samples(tree, values_NT, self.parameters, kl_weight=self.kl.weight)
        self.flatten_metrics = metrics | {
            "kl/weight": self.kl.weight,
            "num_unmatched": float(num_unmatched),
        }
        self.kl.update(metrics["kl/reference"], num_samples=tree.num_nodes)
        rated = (~tree.nodes["reward"].isnan()).nonzero().flatten().tolist()
        return [
            PPOStep(node.context, node.probe, node.reward, _tokens(sample))
            for node, sample in zip(
                (tree.graph_nodes[number] for number in rated), samples, strict=True
            )
        ]

    def _complete(self, tree: GraphTree) -> tuple[Tensor, int]:
        """Add log-probabilities and masks to the tree, and return the values of its tokens.

        A node is excluded, and counted, if its stored log-probabilities have another number of
        tokens than the attacker now returns.
        """
        nodes = tree.graph_nodes
        contexts, probes = [node.context for node in nodes], [node.probe for node in nodes]
        now = values_in_parts(
            self.system, contexts, probes, partial(self.system.token_values, needs_values=True)
        )
        assert now.values_BT is not None
        mask_NT = now.mask_BT.cpu()
        lengths = mask_NT.sum(dim=1).tolist()
        logprobs_NT = now.logprobs_BT.float().cpu().clone()
        reference = [node.reference_logprobs for node in nodes]
        missing = [number for number, known in enumerate(reference) if known is None]
        if missing:
            scored_BT, is_token_BT, *_ = values_in_parts(
                self.system,
                [contexts[number] for number in missing],
                [probes[number] for number in missing],
                lambda *texts: TokenValues(*self.system.reference_values(*texts)),
            )
            for number, scored, is_token in zip(missing, scored_BT, is_token_BT, strict=True):
                reference[number] = scored[is_token].float().cpu()
        reference_NT = torch.zeros_like(logprobs_NT)
        reward_N = tree.nodes["reward"].clone()
        num_unmatched = 0
        is_kept = self.system.samples_as_it_scores
        for number, (node, known, length) in enumerate(zip(nodes, reference, lengths, strict=True)):
            own = logprobs_NT[number][:length]
            if node.logprobs is not None and is_kept:
                own = node.logprobs
            assert known is not None
            if len(own) != length or len(known) != length:
                reward_N[number] = torch.nan
                num_unmatched += 1
                continue
            logprobs_NT[number, :length] = own
            reference_NT[number, :length] = known
        tree.nodes.update(
            {
                "reward": reward_N,
                "probe": torch.zeros_like(mask_NT, dtype=torch.long),
                "probe_mask": mask_NT,
                "probe_logprobs": logprobs_NT,
                "reference_logprobs": reference_NT,
            }
        )
        return now.values_BT.float().cpu(), num_unmatched

    @staticmethod
    def collate_fn(batch: Sequence[PPOStep[StateT, ActionT]]) -> PPOBatch[StateT, ActionT]:
        tokens = collate([step.tokens for step in batch])
        columns = {name: tokens[name] for name in batch[0].tokens}
        mask_BT = tokens["advantage_mask"]
        return PPOBatch(
            [step.prefix for step in batch],
            [step.suffix for step in batch],
            [step.reward for step in batch],
            TensorDict({**columns, "probe_mask": mask_BT}, batch_size=mask_BT.shape),
        )

    def step(self, batch: PPOBatch[StateT, ActionT]) -> tuple[Tensor, dict[str, Any]]:
        """Return the sum of policy, value, divergence and entropy losses, and metrics."""
        now = self.system.token_values(
            batch.prefix,
            batch.suffix,
            needs_values=True,
            needs_entropy=self.parameters.entropy_weight > 0,
        )
        assert now.values_BT is not None
        learns_values = self.parameters.value_weight > 0 and torch.is_grad_enabled()
        if learns_values and not self._is_value_checked:
            check_value_is_trained(self.system, now)
            self._is_value_checked = True
        tokens = batch.tokens.to(now.logprobs_BT.device)
        width = tokens["probe_mask"].shape[1]
        # Nodes that do not match the sampled tokens must not be trained on.
        is_same_B = now.mask_BT.sum(dim=1) == tokens["probe_mask"].sum(dim=1)
        tokens["probe_mask"] = tokens["probe_mask"] & is_same_B[:, None]
        found = ppo_loss(
            _of_width(now.logprobs_BT, width),
            _of_width(now.values_BT, width),
            tokens,
            self.parameters,
            kl_weight=self.kl.weight,
            normaliser=batch.normaliser,
            entropy_BT=None if now.entropy_BT is None else _of_width(now.entropy_BT, width),
        )
        unmatched = (~is_same_B).double().mean()
        return found.loss, {**found.metrics, "unmatched_share": unmatched}


def _tokens(sample: Sample) -> Sample:
    names = ("old_logprobs", "reference_logprobs", "advantage", "return", "old_value")
    return {name: sample[name] for name in names}


def _of_width(values_BT: Tensor, width: int) -> Tensor:
    """Truncate or pad rows on the right to a width."""
    return pad(values_BT, (0, width - values_BT.shape[1]))


def check_value_is_trained(system: System[Any, Any], found: TokenValues) -> None:
    """Raise for a value function that training would not update.

    Its own part, which the log-probabilities do not depend on, must be among `parameters()`; part
    of it suffices, since the rest may be frozen on purpose.

    Raises
    ------
    ConfigurationError
        When values carry no gradient, or depend on parameters of their own of which none is there.
    """
    assert found.values_BT is not None
    name = type(system).__name__
    if not found.values_BT.requires_grad:
        raise ConfigurationError(
            f"the values of {name} have no gradient. Compute them outside torch.no_grad(), with "
            "parameters that require gradients, or use PPO with vf_loss_coef=0."
        )
    shared = {id(leaf) for leaf in leaves_of(found.logprobs_BT)}
    own = [leaf for leaf in leaves_of(found.values_BT) if id(leaf) not in shared]
    trained = {id(parameter) for parameter in system.parameters()}
    if own and not any(id(leaf) in trained for leaf in own):
        shapes = ", ".join(str(list(leaf.shape)) for leaf in own[:4])
        raise ConfigurationError(
            f"the {len(own)} tensors of the value head of {name} (shapes {shapes}) are not among "
            "parameters(), so no optimizer updates them. Let parameters() yield from "
            "self.value_head.parameters() too."
        )


def leaves_of(value: Tensor) -> list[Tensor]:
    """Return the parameters that a tensor was computed from, as recorded by autograd."""
    leaves: list[Tensor] = []
    seen: set[Any] = set()
    waiting = [value.grad_fn]
    if value.grad_fn is None and value.requires_grad:
        return [value]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        waiting += [parent for parent, _ in node.next_functions]
    return leaves
