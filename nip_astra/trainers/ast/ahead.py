"""Rollouts that are played one iteration ahead, while an earlier one is learnt from.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.base import TokenCount, TokenModel
from nip_astra.parameters.conditions import where_above
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.rl_objectives.importance import (
    ImportanceLevel,
    effective_sample_size,
    importance_weights,
)
from nip_astra.rl_objectives.kl import kl_estimate
from nip_astra.rl_objectives.reductions import masked_mean
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.scenario_base.agents import Speaker
from nip_astra.scenario_base.text_attackers import TextAttacker
from nip_astra.trainers.ast.behaviour import Behaviour
from nip_astra.trainers.ast.rollouts import Rollouts

if TYPE_CHECKING:
    from nip_astra.trainers.ast_base import AstTrainer

logger = logging.getLogger(__name__)

IS_AHEAD = where_above("max_staleness", 0)
"""Condition of what corrects for older weights."""


class PlayedAheadParameters(SubParameters):
    """Whether rollouts are played ahead of what is learnt."""

    max_staleness: int = Field(default=0, ge=0, le=1)
    """Iterations that the weights that play are behind those that learn. 0 plays and learns in
    turn; with 1, actors (settings.num_actors) play the next iteration while this one is learnt
    from, and what is learnt from was said by an attacker that is one iteration older."""


class CorrectedAheadParameters(PlayedAheadParameters):
    """Whether rollouts are played ahead, and how policy gradients correct for it."""

    staleness_weights: Annotated[ImportanceLevel, IS_AHEAD] = "token"
    """What gradients are multiplied by where older weights have played: token, how much likelier
    each token is under the weights that learn; sequence, how much likelier the whole probe is,
    which alone is exact where nothing is truncated, at the price of much variance. Losses with one
    ratio a probe (the variants gspo and rloo of ast_grpo) take sequence alone."""
    max_staleness_weight: Annotated[float, IS_AHEAD] = Field(default=2.0, gt=0)
    """Those weights are truncated to it. Larger has less bias and more variance."""


@dataclass
class Ahead:
    """A rollout that was begun before its iteration.

    Attributes
    ----------
    version : int
        Iterations that the weights that play had learnt from.
    counts : dict[str, TokenCount]
        By role, what playing has taken so far.
    finish : Callable or None
        Waits for the tree, while it is not there.
    tree : RolloutTree or None
        Yet to be rated.
    """

    version: int
    counts: dict[str, TokenCount]
    finish: Callable[[], RolloutTree] | None = None
    tree: RolloutTree | None = None


@dataclass
class PlayingAhead:
    """The rollouts of a run that are begun with the weights of one iteration before.

    The rollout of iteration i is played by the weights that had learnt from i - 1 iterations, that
    of the first by those that had learnt from none, however fast either side is: they are sent when
    it begins. So the numbers of a run depend neither on timing nor on whether there are actors.

    Parameters
    ----------
    rollouts : Rollouts
        What plays.
    models : Mapping[str, TokenModel]
        Whose work is counted, by role.
    num_iterations : int
        Of the run; nothing is begun for those that come after.
    """

    rollouts: Rollouts
    models: Mapping[str, TokenModel]
    num_iterations: int
    _begun: dict[int, Ahead] = field(default_factory=dict)

    def take(self, iteration: int) -> tuple[RolloutTree, dict[str, TokenCount]]:
        """The rated rollout of an iteration, and by role what playing it took.

        The one after it is begun, with the weights of now.
        """
        self._begin(iteration, version=iteration)
        self.wait()
        found = self._begun.pop(iteration)
        assert found.tree is not None
        tree = found.tree
        tree.staleness = iteration - found.version
        # Before the next begins: actors would rate only after they have played it.
        self.rollouts.sampler.rate(tree)
        if iteration + 1 < self.num_iterations:
            self._begin(iteration + 1, version=iteration)
        return tree, found.counts

    def _begin(self, iteration: int, *, version: int) -> None:
        if iteration in self._begun:
            return
        with self._counting() as counts:
            finish = self.rollouts.begin(iteration)
        self._begun[iteration] = Ahead(version, counts, finish)

    def wait(self) -> None:
        """Wait for what is being played; raises what went wrong in it."""
        for one in self._begun.values():
            if one.finish is not None:
                with self._counting() as counts:
                    one.tree, one.finish = one.finish(), None
                for role, spent in counts.items():
                    one.counts[role].add(spent)

    @contextmanager
    def _counting(self) -> Iterator[dict[str, TokenCount]]:
        with ExitStack() as stack:
            yield {
                role: stack.enter_context(model.counting()) for role, model in self.models.items()
            }

    def state(self) -> dict[int, Any]:
        """The rollouts that are not used yet, those that are being played among them."""
        self.wait()
        return {
            iteration: {
                "version": one.version,
                "counts": {role: asdict(count) for role, count in one.counts.items()},
                "tree": one.tree.to_plain() if one.tree is not None else None,
            }
            for iteration, one in self._begun.items()
        }

    def load_state(self, state: Mapping[int, Any]) -> None:
        """Take up what `state` gave."""
        self._begun = {}
        for iteration, plain in state.items():
            # What a data set says beside a prompt is no plain value.
            prompts = self.rollouts.prompts_of(iteration)
            tree = RolloutTree.from_plain(plain["tree"], prompts)
            counts = {role: TokenCount(**count) for role, count in plain["counts"].items()}
            self._begun[iteration] = Ahead(plain["version"], counts, tree=tree)


def playing_ahead_of(trainer: AstTrainer) -> PlayingAhead | None:
    """What plays ahead, where a trainer's parameters ask for it.

    Raises
    ------
    ConfigurationError
        See `check_ahead`.
    """
    if not getattr(trainer.parameters, "max_staleness", 0):
        return None
    agents = {"attacker": trainer.sampler.attacker, "target": trainer.sampler.target}
    section, has_actors = trainer.hyper_params.trainer, trainer.settings.num_actors > 0
    check_ahead(agents, trainer.behaviour, section, has_actors=has_actors)
    return PlayingAhead(trainer.rollouts, trainer._models, trainer.training.num_iterations)


def check_ahead(
    agents: Mapping[str, Speaker | TextAttacker],
    behaviour: Behaviour | None,
    section: str,
    *,
    has_actors: bool,
) -> None:
    """Refuse to play ahead where nothing could be played meanwhile, or nothing corrected.

    Raises
    ------
    ConfigurationError
        Where an agent cannot speak in another process, or a policy gradient would have to know the
        tempered or cut distribution of older weights.
    """
    asked = f"{section}.max_staleness 1 has actors play while the attacker learns"
    stays = [role for role, agent in agents.items() if not _can_be_copied(agent)]
    if stays:
        raise ConfigurationError(
            f"{asked}, but no copy of the {' or '.join(stays)} can speak in another process, so "
            "that nothing would be played meanwhile. Set it to 0, or use models of _type "
            "huggingface."
        )
    if behaviour is not None and behaviour.is_reshaped:
        raise ConfigurationError(
            f"{asked}, and gradients are corrected by the probabilities that it had when it "
            "spoke, but those are not known where sampling is tempered or cut. Set max_staleness "
            "to 0, or the attacker's temperature to 1, top_k to null and top_p to 1."
        )
    if not has_actors:
        logger.warning(
            "rollouts are played ahead, but there are no actors that could play while the attacker "
            "learns: it takes as long as in turn. Set num_actors in the settings"
        )


def _can_be_copied(agent: Speaker | TextAttacker) -> bool:
    return bool(getattr(agent.language_model, "can_be_copied", False))


@torch.no_grad()
def correct_for_staleness(
    tree: RolloutTree, logprobs_NT: Tensor, parameters: CorrectedAheadParameters
) -> dict[str, float]:
    """Have a tree that older weights have played learnt from by those of now; gives what to log.

    Sets `importance_weight` to the truncated `pi / mu` of tokens or probes, and `probe_logprobs`
    to log pi: ratios of the loss then say how far the update has gone, and weights how far it was
    from what was played when it began (decoupled PPO, arXiv:2110.00641).

    Parameters
    ----------
    logprobs_NT : Tensor
        log pi of the probes under the weights that learn, nats.
    """
    nodes, mask_NT = tree.nodes, tree.nodes["probe_mask"]
    played_NT = nodes["probe_logprobs"]
    most = parameters.max_staleness_weight
    weights_NT = importance_weights(
        logprobs_NT, played_NT, mask_NT, level=parameters.staleness_weights, max_ratio=most
    )
    nodes["importance_weight"] = weights_NT
    nodes["probe_logprobs"] = logprobs_NT
    kl_NT = kl_estimate(played_NT, logprobs_NT, "k3", mask_BT=mask_NT)
    return {
        "staleness/kl": float(masked_mean(kl_NT, mask_NT)),
        "staleness/effective_sample_size": float(effective_sample_size(weights_NT, mask_NT)),
        "staleness/truncated_share": float(masked_mean((weights_NT >= most).float(), mask_NT)),
    }
