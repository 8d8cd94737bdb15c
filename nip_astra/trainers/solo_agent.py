"""Supervised training of provers and verifiers alone."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nip_astra.checkpoints.run_state import Part, RunState
from nip_astra.errors import CheckpointError, ConfigurationError, NonFiniteLossError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.conditions import where
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import MAX_LR, SubParameters
from nip_astra.parameters.trainers import CommonProtocolParameters
from nip_astra.parameters.types import TrainerType
from nip_astra.parameters.update_schedule import ConstantUpdateSchedule, UpdateSchedule
from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment
from nip_astra.scenario_base.protocol.tensordict_agents import Agent
from nip_astra.scenario_instance import ProtocolInstance
from nip_astra.tracking.environment import processor_name
from nip_astra.trainers.dry_run import measure_smallest_step
from nip_astra.trainers.protocol.agent_files import AgentTrainer, save_agents
from nip_astra.trainers.protocol.optimizers import ADAM_EPS, LearningPart, parts_of
from nip_astra.trainers.protocol.statistics import read
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.trainer_base import IterationContext, attach_progress_bar
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
"""Dataset key by whose values the accuracy is also reported, if it exists."""


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
    is_correct_N: Tensor

    @property
    def accuracy(self) -> Tensor:
        """Share of datapoints with the correct label, a scalar."""
        return self.is_correct_N.mean()


class SoloTraining:
    """Trains body and solo head of one agent with one Adam.

    Parameters
    ----------
    environment : ProtocolEnvironment
        Holds the dataset; agents see a datapoint before any message.
    key : SeedPart
        Path of names that the split and the orders derive from.
    uses_agent_lr_factors : bool
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
        uses_agent_lr_factors: bool = False,
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
        parts.append(
            LearningPart("solo_head", head, agent.parameters_of_agent.agent_lr_factor.actor)
        )
        self._schedule: UpdateSchedule = (
            agent.parameters_of_agent.update_schedule
            if uses_agent_lr_factors
            else ConstantUpdateSchedule()
        )
        self._lr_factors = [part.lr_factor if uses_agent_lr_factors else 1.0 for part in parts]
        self.optimizer = torch.optim.Adam(
            [{"params": part.parameters} for part in parts],
            lr=parameters.lr,
            eps=ADAM_EPS,
            fused=True,
        )

    def run_epoch(self, epoch: int) -> SoloScore:
        """Train one epoch; the score is that of minibatches before their steps."""
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
        """Score datapoints without training on them."""
        parts = [
            self._judge(environment, rows_B)
            for rows_B in torch.split(rows_N, self.parameters.minibatch_size)
        ]
        losses, right = zip(*parts, strict=True)
        return SoloScore(torch.cat(losses).mean(), torch.cat(right))

    def test(self, environment: ProtocolEnvironment) -> dict[str, Tensor]:
        """Return `test_loss` and `test_accuracy` on a whole dataset.

        Where its datapoints have a `wl_score`, also `test_accuracy_wl_<score>` for each.
        """
        dataset = environment.dataset
        score = self.score(environment, torch.arange(len(dataset)))
        found = {"test_loss": score.loss, "test_accuracy": score.accuracy}
        groups_N = dataset.get(GROUP_KEY, None)
        if groups_N is not None:
            for group in groups_N.unique().tolist():
                right = score.is_correct_N[groups_N.flatten() == group]
                found[f"test_accuracy_wl_{group}"] = right.mean()
        return found

    def _judge(self, environment: ProtocolEnvironment, rows_B: Tensor) -> tuple[Tensor, Tensor]:
        frames = environment.first_frames(rows_B.to(environment.device))
        logits_B2 = self.agent.solo(frames)
        labels_B = frames["y"].squeeze(-1)
        losses_B = cross_entropy(logits_B2, labels_B, reduction="none")
        return losses_B, (logits_B2.argmax(dim=-1) == labels_B).float()

    def state(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
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


def pretrain_agents(
    hyper_params: HyperParameters, settings: ExperimentSettings, instance: ProtocolInstance
) -> None:
    """Train each agent's body alone, and copy it to its policy and its value function.

    The parameters are those of `solo_agent`. A value function that sees more than the policy has a
    body of another shape, which stays as it was. An agent that was loaded from a run stays as it
    was trained there. A body is read from the cache where one was trained by the same code, on such
    a processor, from the same first weights, data, seed, parameters and shape of the agent. A
    damaged file of the cache is replaced. With `rl.pretrain_decisions` an agent's decisions start
    as its labels alone, where its policy head supports that.
    """
    parameters = getattr(hyper_params, "solo_agent", None) or SoloParameters()
    if settings.test_run:
        parameters = parameters.model_copy(update={"num_epochs": 1})
    environment, seed = instance.train_environment, hyper_params.seed
    data = digest_of_tensors(environment.dataset)
    device = str(environment.device)
    computed_by = [instance.layers, device, processor_name(), torch.__version__]
    for name in instance.combined_agents.names:
        agent = instance.combined_agents[name]
        if agent.is_random or agent.parameters_of_agent.load_from_run is not None:
            continue
        assert agent.policy_body is not None
        assert agent.solo_head is not None
        trained = nn.ModuleDict({"body": agent.policy_body, "solo_head": agent.solo_head})
        key = _key(agent, data, parameters, seed, computed_by)
        path = Path(settings.runs_dir) / CACHE_DIR / f"{key}.safetensors"
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
        if hyper_params.rl.pretrain_decisions and agent.policy_head is not None:
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
    """Return a digest of everything that a trained body depends on, including plug-ins' classes."""
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


OF_PLAY = set(CommonProtocolParameters.model_fields) - {"zero_knowledge"}
"""Protocol parameters without effect on supervised training."""


@dataclass
class SoloState(RunState):
    """Progress of a run; an iteration is an epoch of every agent, `last` its figures."""

    last: dict[str, float] = field(default_factory=dict)


@register_trainer(TrainerType.SOLO_AGENT)
class SoloAgentTrainer(AgentTrainer):
    """Supervised training of each agent alone to predict the label, before any message.

    `L = mean cross_entropy(logits(body(x)), y)` over the datapoints, for body and head, with an
    Adam for each agent, the agent's learning-rate factors of the actor, and in the epochs of its
    update schedule. It measures agents without a conversation. Random agents are left out.
    """

    State: ClassVar[type[RunState]] = SoloState
    trainer_type: ClassVar[str] = "solo_agent"
    figures: ClassVar[tuple[str, ...] | None] = ("*/test_*",)
    parameter_groups: ClassVar[tuple[str, ...] | None] = ()
    never_reads: ClassVar[tuple[str, ...]] = (
        "rl",
        "zk_protocol",
        *(f"protocol_common.{name}" for name in OF_PLAY),
        "*.agents.*.*_lr_factor.critic",
    )

    class Parameters(SoloParameters):
        """Supervised training of agents alone."""

        body_lr_factor_override: Annotated[bool, where("trainer", "solo_agent")] = False
        """Whether bodies have the learning rate of their agent, ignoring `body_lr_factor`.
        Pretraining has no such factors anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agents = self.saved_agents
        if not self.agents:
            raise ConfigurationError(
                "all agents are random, so solo_agent trains none. Set is_random=false for one."
            )
        key = (self.hyper_params.seed, "solo_agent")
        self.trainings = {
            agent.name: SoloTraining(
                agent,
                self.scenario_instance.train_environment,
                self.parameters,
                *key,
                agent.name,
                uses_agent_lr_factors=True,
                has_body_factor=not self.parameters.body_lr_factor_override,
            )
            for agent in self.agents
        }

    @property
    def saved_agents(self) -> list[Agent]:
        return [agent for agent in super().saved_agents if not agent.is_random]

    def train(self) -> None:
        """Train all agents, test them, save them."""
        self._set_seed()
        self._rewind_records()
        with self._open_progress_bar():
            with self.train_context():
                self._run_train_loop()
            with self.test_context():
                self._run_test_loop()
        self._publish_models(partial(save_agents, self.agents), role="agents")
        self._write_results()

    def components_to_time(self) -> dict[str, Callable[[], object]]:
        """Return `epoch`, of all agents, and `forward`: predictions for the test datapoints."""

        def epoch() -> None:
            for training in self.trainings.values():
                training.run_epoch(0)

        def forward() -> None:
            for training in self.trainings.values():
                training.test(self.test_environment)

        return {"epoch": epoch, "forward": forward}

    def dry_run(self) -> dict[str, Any]:
        """Train all agents for one epoch, and estimate a whole run."""
        size = sum(len(one.learned_N) for one in self.trainings.values())
        num_steps = sum(
            math.ceil(len(one.learned_N) / self.parameters.minibatch_size)
            for one in self.trainings.values()
        )

        def learn(_: Sequence[Any]) -> tuple[float, int]:
            losses = [float(one.run_epoch(0).loss) for one in self.trainings.values()]
            return sum(losses) / len(losses), size

        with self.train_context():
            step = measure_smallest_step(lambda: ((), 0.0), learn)
        return {
            "num_iterations": self.parameters.num_epochs,
            "num_parameters": sum(w.numel() for one in self.agents for w in one.parameters()),
            "loss": step.loss,
            "seconds_per_minibatch": step.step_seconds / max(num_steps, 1),
            "predicted_peak_gib": (step.peak_bytes + step.step_bytes) / 2**30,
            "estimated_training_hours": self.parameters.num_epochs * step.step_seconds / 3600,
        }

    @attach_progress_bar(lambda self: self.parameters.num_epochs)
    def _run_train_loop(self, iteration_context: IterationContext) -> None:
        iteration_context.set_description("Training")
        for epoch in iteration_context.iterate(self.state.iteration):
            metrics: dict[str, Tensor] = {}
            for name, training in self.trainings.items():
                score = training.run_epoch(epoch)
                metrics[f"{name}/train_loss"] = score.loss
                metrics[f"{name}/train_accuracy"] = score.accuracy
                if len(training.held_out_N):
                    held_out = training.score(training.environment, training.held_out_N)
                    metrics[f"{name}/held_out_loss"] = held_out.loss
                    metrics[f"{name}/held_out_accuracy"] = held_out.accuracy
            self.state.iteration = epoch + 1
            self.state.last = read(metrics)
            self.tracker.log_metrics(self.state.last, step=self.state.iteration)
            is_last = self.state.iteration == iteration_context.num_iterations
            self._checkpoint_or_stop(is_last=is_last)

    @attach_progress_bar(lambda self: 1)
    def _run_test_loop(self, iteration_context: IterationContext) -> None:
        iteration_context.set_description("Testing")
        for _ in iteration_context.iterate():
            metrics = {
                f"{name}/{figure}": value
                for name, training in self.trainings.items()
                for figure, value in training.test(self.test_environment).items()
            }
            self.results["after"] = read(metrics)
            self.tracker.log_metrics(self.results["after"], step=self.state.iteration)

    # ---- saving

    def kept_parts(self) -> dict[str, Part]:
        """Return the optimizer of each agent."""
        return {
            f"optimizer_of_{name}": Part(training.state, training.load_state)
            for name, training in self.trainings.items()
        } | super().kept_parts()

    def _write_results(self) -> None:
        self.store_results(
            {
                "kind": "interaction_proof",
                "protocol": self.hyper_params.interaction_protocol,
                "agents": [agent.name for agent in self.agents],
                "before": None,
                "training": {"num_epochs": self.state.iteration, "last": self.state.last},
            }
        )
