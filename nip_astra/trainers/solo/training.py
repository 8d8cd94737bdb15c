"""Supervised training of one agent, to tell the label without a conversation.

Shapes: B datapoints of a minibatch, N datapoints.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from nip_astra.errors import CheckpointError, NonFiniteLossError
from nip_astra.parameters.parameters_base import MAX_LR, SubParameters
from nip_astra.parameters.update_schedule import ConstantUpdateSchedule, UpdateSchedule
from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment
from nip_astra.scenario_base.protocol.tensordict_agents import Agent
from nip_astra.trainers.protocol.optimizers import ADAM_EPS, Part, parts_of
from nip_astra.utils.seeding import SeedPart, derived_generator

GROUP_KEY = "wl_score"
"""Key of a dataset by whose values the accuracy is told apart, where it is there."""


class SoloParameters(SubParameters):
    """Supervised training of agents alone."""

    num_epochs: int = Field(default=100, ge=1)
    """Passes over the training datapoints. Larger fits them more closely."""
    minibatch_size: int = Field(default=256, ge=1)
    """Datapoints of one optimizer step. The last of an epoch may be smaller."""
    lr: float = Field(default=1e-3, gt=0, le=MAX_LR)
    """Learning rate (Adam), before the factors of agents. Larger learns faster and may diverge."""
    anneal_lr: bool = True
    """Whether the learning rate falls linearly, epoch by epoch, towards 0."""
    test_share: float = Field(default=0.2, ge=0, lt=1)
    """Share of the training datapoints that nothing is learned from and on which the accuracy is
    measured after every epoch. The test datapoints are measured once, at the end."""


class SoloScore(NamedTuple):
    """How well an agent tells labels.

    Attributes
    ----------
    loss : Tensor
        Mean cross entropy in nats; scalar.
    is_right_N : Tensor
        Whether the likelier label is the true one, as float.
    """

    loss: Tensor
    is_right_N: Tensor

    @property
    def accuracy(self) -> Tensor:
        """Share of datapoints whose label is told right, a scalar."""
        return self.is_right_N.mean()


class SoloTraining:
    """Trains body and solo head of one agent with one Adam.

    Parameters
    ----------
    environment : ProtocolEnvironment
        Its dataset is learned from; agents see a datapoint before anything is said.
    key : SeedPart
        Path of names that the split and the orders derive from.
    is_as_agent_says : bool
        Whether the agent's learning-rate factors and its update schedule hold, epochs counting as
        iterations. Without, all weights learn in every epoch.
    has_body_factor : bool
        Whether that of its body is among these factors.

    Attributes
    ----------
    learned_N, held_out_N : Tensor
        Rows of the dataset.
    """

    def __init__(
        self,
        agent: Agent,
        environment: ProtocolEnvironment,
        parameters: SoloParameters,
        *key: SeedPart,
        is_as_agent_says: bool = False,
        has_body_factor: bool = True,
    ) -> None:
        self.agent = agent
        self.environment = environment
        self.parameters = parameters
        self._key = key
        num_datapoints = len(environment.dataset)
        num_held_out = min(round(parameters.test_share * num_datapoints), num_datapoints - 1)
        order_N = torch.randperm(num_datapoints, generator=derived_generator(*key, "split"))
        self.held_out_N, self.learned_N = order_N[:num_held_out], order_N[num_held_out:]
        assert agent.policy_body is not None
        assert agent.solo_head is not None
        parts = [
            part
            for part in parts_of(agent, has_body_factor=has_body_factor)
            if part.name in ("actor_gnn", "actor_body")
        ]
        head = list(agent.solo_head.parameters())
        parts.append(Part("solo_head", head, agent.parameters_of_agent.agent_lr_factor.actor))
        self._schedule: UpdateSchedule = (
            agent.parameters_of_agent.update_schedule
            if is_as_agent_says
            else ConstantUpdateSchedule()
        )
        self._lr_factors = [part.lr_factor if is_as_agent_says else 1.0 for part in parts]
        self.optimizer = torch.optim.Adam(
            [{"params": part.parameters} for part in parts],
            lr=parameters.lr,
            eps=ADAM_EPS,
            fused=True,
        )

    def run_epoch(self, epoch: int) -> SoloScore:
        """Go once over what is learned from; the score is that of the minibatches as they came.

        Raises
        ------
        NonFiniteLossError
            When the loss is not finite.
        """
        generator = derived_generator(*self._key, "epoch", epoch)
        order_N = self.learned_N[torch.randperm(len(self.learned_N), generator=generator)]
        left = 1 - epoch / self.parameters.num_epochs if self.parameters.anneal_lr else 1.0
        for group, factor in zip(self.optimizer.param_groups, self._lr_factors, strict=True):
            group["lr"] = self.parameters.lr * factor * left
        learns = self._schedule.is_active(epoch)
        losses, right = [], []
        self.agent.train(learns)
        for rows_B in torch.split(order_N, self.parameters.minibatch_size):
            with torch.set_grad_enabled(learns):
                losses_B, right_B = self._judge(self.environment, rows_B)
            if learns:
                self.optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(losses_B.mean())
                self.optimizer.step()
            losses.append(losses_B.detach())
            right.append(right_B)
        self.agent.eval()
        score = SoloScore(torch.cat(losses).mean(), torch.cat(right))
        if not bool(score.loss.isfinite()):
            raise NonFiniteLossError(
                f"the agent {self.agent.name!r} was trained alone, but its loss in epoch "
                f"{epoch + 1} is not finite. Lower solo_agent.lr."
            )
        return score

    @torch.no_grad()
    def score(self, environment: ProtocolEnvironment, rows_N: Tensor) -> SoloScore:
        """Judge datapoints without learning from them."""
        parts = [
            self._judge(environment, rows_B)
            for rows_B in torch.split(rows_N, self.parameters.minibatch_size)
        ]
        losses, right = zip(*parts, strict=True)
        return SoloScore(torch.cat(losses).mean(), torch.cat(right))

    def test(self, environment: ProtocolEnvironment) -> dict[str, Tensor]:
        """`test_loss` and `test_accuracy` on a whole dataset.

        Where its datapoints have a `wl_score`, also `test_accuracy_wl_<score>` for each.
        """
        dataset = environment.dataset
        score = self.score(environment, torch.arange(len(dataset)))
        found = {"test_loss": score.loss, "test_accuracy": score.accuracy}
        groups_N = dataset.get(GROUP_KEY, None)
        if groups_N is not None:
            for group in groups_N.unique().tolist():
                right = score.is_right_N[groups_N.flatten() == group]
                found[f"test_accuracy_wl_{group}"] = right.mean()
        return found

    def _judge(self, environment: ProtocolEnvironment, rows_B: Tensor) -> tuple[Tensor, Tensor]:
        frames = environment.first_frames(rows_B.to(environment.device))
        logits_B2 = self.agent.solo(frames)
        labels_B = frames["y"].squeeze(-1)
        losses_B = cross_entropy(logits_B2, labels_B, reduction="none")
        return losses_B, (logits_B2.argmax(dim=-1) == labels_B).float()

    def state(self) -> dict[str, Any]:
        """What the optimizer remembers."""
        return dict(self.optimizer.state_dict())

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave.

        Raises
        ------
        CheckpointError
            When it is of an optimizer of other weights.
        """
        try:
            self.optimizer.load_state_dict(state)
        except ValueError as error:
            raise CheckpointError(
                f"the optimizer of the agent {self.agent.name!r} was to be resumed, but the "
                f"checkpoint's is of other weights: {error}. Resume with the version of nip_astra "
                "that wrote the checkpoint, or start a new run."
            ) from error
