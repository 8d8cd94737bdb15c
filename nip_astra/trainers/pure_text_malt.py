"""Multi-agent training of chat models with trees of responses."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import TrainerType
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer
from nip_astra.trainers.text.tree_values import preference_pairs
from nip_astra.utils.nested_array_dict import NestedArrayDict


@register_trainer(TrainerType.PURE_TEXT_MALT)
class PureTextMaltTrainer(PureTextRlTrainer):
    """Each model learns to prefer those of its agents' answers that led to more (MALT).

    In each round of a rollout all agents answer several times, which makes a tree. The value of a
    round for an agent is `V(n) = r(n) + mean of V(c) over its children c` (arXiv:2412.01928,
    section 4). Where an answer of an agent has a value of at least the mid-point of its rewards,
    and a sibling one below, the two make a pair; a group's model is trained by DPO on the pairs
    of its agents.
    """

    never_reads: ClassVar[tuple[str, ...]] = ("text_rl.verifier_guess_replacement_*",)

    class Parameters(SubParameters):
        """Trees of responses, and learning from their pairs."""

        num_responses_per_timestep: int = Field(default=2, ge=2, le=10_000)
        """Ways in which each conversation goes on from each round. A conversation of R rounds has
        up to this to the power of R ends."""
        dpo_beta: float | None = Field(default=None, gt=0)
        """Inverse temperature of DPO; null leaves it to the service. Larger stays closer to the
        model that a job starts from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_branches = self.parameters.num_responses_per_timestep

    def _stage_create_fine_tune_jobs(self, rollouts: NestedArrayDict) -> None:
        protocol = self.game.protocol
        mid_points = {name: protocol.reward_mid_point_estimate(name) for name in self.agent_names}
        pairs = preference_pairs(
            rollouts, self.agent_names, mid_points, seed=self.hyper_params.seed
        )
        for group in self.shared_model_groups.values():
            names = {agent.name for agent in group.agents}
            examples = [pair.example for pair in pairs if pair.agent in names]
            group.create_dpo_fine_tune_job(examples, beta=self.parameters.dpo_beta)
