"""Supervised training of agents to predict the label without a conversation.

Shapes: B datapoints of a minibatch, N datapoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nip_astra.errors import CheckpointError, NonFiniteLossError
from nip_astra.parameters.parameters_base import MAX_LR, SubParameters
from nip_astra.parameters.update_schedule import ConstantUpdateSchedule, UpdateSchedule
from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment
from nip_astra.scenario_base.protocol.tensordict_agents import Agent
from nip_astra.tracking.environment import processor_name
from nip_astra.trainers.protocol.optimizers import ADAM_EPS, Part, parts_of
from nip_astra.utils.seeding import SeedPart, derived_generator
from nip_astra.utils.tensor_cache import (
    digest_of_code,
    digest_of_tensors,
    keep_tensors,
    take_tensors,
)
from nip_astra.version import __version__

logger = logging.getLogger(__name__)

CACHE_DIR = "pretrained_bodies"
"""Folder in the runs folder."""
CODE = (
    *("nip_astra.scenarios", "nip_astra.scenario_base", "nip_astra.utils"),
    *("nip_astra.trainers.protocol.optimizers", __name__),
)
"""Modules on which a trained body depends, besides those of its own classes."""
GROUP_KEY = "wl_score"
"""Key of a dataset by whose values the accuracy is reported, if it exists."""


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
    """Share of the training datapoints that are held out; their accuracy is measured after every
    epoch. The test datapoints are measured once, at the end."""


class SoloScore(NamedTuple):
    """Mean cross entropy in nats, scalar, and whether each predicted label is right, as float."""

    loss: Tensor
    is_right_N: Tensor

    @property
    def accuracy(self) -> Tensor:
        """Share of datapoints with the right label, a scalar."""
        return self.is_right_N.mean()


class SoloTraining:
    """Trains body and solo head of one agent with one Adam.

    Parameters
    ----------
    environment : ProtocolEnvironment
        Holds the dataset; agents see a datapoint before any message.
    key : SeedPart
        Path of names that the split and the orders derive from.
    is_as_agent_says : bool
        Whether the agent's learning-rate factors and its update schedule hold, epochs counting as
        iterations. Without, all weights learn in every epoch.
    has_body_factor : bool
        Whether the factor of its body is among these.
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
        """Go once over the training datapoints; the score is that of minibatches before steps."""
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
                f"the loss of the agent {self.agent.name!r} in epoch {epoch + 1} is not finite. "
                "Lower solo_agent.lr."
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
        """The state of the optimizer."""
        return dict(self.optimizer.state_dict())

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state of `state`."""
        try:
            self.optimizer.load_state_dict(state)
        except ValueError as error:
            raise CheckpointError(
                f"the optimizer of the agent {self.agent.name!r} in the checkpoint is of other "
                f"weights: {error}. Resume with the version of nip_astra that wrote it."
            ) from error


# ---- pretraining


def pretrain_bodies(
    agents: Mapping[str, Agent],
    environment: ProtocolEnvironment,
    parameters: SoloParameters,
    *,
    with_decisions: bool,
    seed: int,
    runs_dir: str,
    layers: str,
) -> None:
    """Train each agent's body alone, and copy it to its policy and its value function.

    A value function that sees more than the policy has a body of another shape, which stays as it
    was. An agent that was loaded from a run stays as it was trained there. A body is read from the
    cache where one was trained by the same code, on such a processor, from the same first weights,
    data, seed, parameters and shape of the agent. A damaged file of the cache is replaced.

    Parameters
    ----------
    with_decisions : bool
        Whether an agent's decisions start as its labels alone, where its policy head supports that.
    layers : str
        `ScenarioInstance.layers`.
    """
    data = digest_of_tensors(environment.dataset)
    computed_by = [layers, str(environment.device), processor_name(), torch.__version__]
    for name, agent in agents.items():
        if agent.is_random or agent.parameters_of_agent.load_from_run is not None:
            continue
        assert agent.policy_body is not None
        assert agent.solo_head is not None
        trained = nn.ModuleDict({"body": agent.policy_body, "solo_head": agent.solo_head})
        key = _key(agent, data, parameters, seed, computed_by)
        path = Path(runs_dir) / CACHE_DIR / f"{key}.safetensors"
        weights = take_tensors(path)
        if weights is not None:
            trained.load_state_dict(weights)
            logger.info("the body of %s was trained before: %s", name, path)
        else:
            training = SoloTraining(agent, environment, parameters, seed, "pretraining", agent.name)
            # Draws of the body, for instance dropout, do not depend on earlier ones.
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                for epoch in range(parameters.num_epochs):
                    score = training.run_epoch(epoch)
            logger.info("the body of %s alone is right in %.1f %%", name, 100 * score.accuracy)
            keep_tensors(path, trained.state_dict())
        _copy_to_value_body(agent)
        if with_decisions and agent.policy_head is not None:
            agent.policy_head.decide_as(agent.solo_head)


def _copy_to_value_body(agent: Agent) -> None:
    if agent.value_body is None or agent.shares_body:
        return
    assert agent.policy_body is not None
    trained, own = agent.policy_body.state_dict(), agent.value_body.state_dict()
    if any(trained[name].shape != own[name].shape for name in trained.keys() & own.keys()):
        logger.info(
            "the value function of %s sees more than its policy, so its body starts untrained",
            agent.name,
        )
        return
    agent.value_body.load_state_dict(trained)


def _key(
    agent: Agent, data: str, parameters: SoloParameters, seed: int, computed_by: list[str]
) -> str:
    """The digest of everything that a trained body depends on, plug-ins' classes included."""
    assert agent.policy_body is not None
    assert agent.solo_head is not None
    names = {one.__module__ for part in agent.modules() for one in type(part).__mro__}
    names = {name for name in names if name.split(".")[0] not in ("torch", "builtins", "abc")}
    contents = {
        "version": __version__,
        "code": digest_of_code({*CODE, *names}),
        "computed_by": computed_by,
        "parts": ["body", "solo_head"],
        "agent": agent.name,
        "shape": asdict(agent.shape),
        "parameters": agent.parameters_of_agent.to_dict(),
        "solo": parameters.to_dict(),
        "seed": seed,
        "data": data,
        "weights": [
            digest_of_tensors(part.state_dict()) for part in (agent.policy_body, agent.solo_head)
        ],
    }
    return hashlib.sha256(json.dumps(contents, sort_keys=True, default=str).encode()).hexdigest()
