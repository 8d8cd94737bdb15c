"""Supervised training of provers and verifiers alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

from torch import Tensor

from nip_astra.checkpoints.run_state import Part, RunState
from nip_astra.parameters.conditions import where
from nip_astra.parameters.trainers import CommonProtocolParameters
from nip_astra.parameters.types import TrainerType
from nip_astra.scenario_base.protocol.tensordict_agents import Agent
from nip_astra.trainers.protocol.agent_files import AgentTrainer, save_agents
from nip_astra.trainers.protocol.statistics import read
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.solo.training import SoloParameters, SoloTraining
from nip_astra.trainers.trainer_base import IterationContext, attach_progress_bar

OF_PLAY = set(CommonProtocolParameters.model_fields) - {"zero_knowledge"}
"""Parameters of a protocol that do not matter before agents play."""


@dataclass
class SoloState(RunState):
    """Progress of a run; an iteration is an epoch of every agent, `last` its figures."""

    last: dict[str, float] = field(default_factory=dict)


@register_trainer(TrainerType.SOLO_AGENT)
class SoloAgentTrainer(AgentTrainer):
    """Each agent learns to predict the label by itself, before any message.

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
        """Whether bodies learn as fast as the rest of their agent, regardless of `body_lr_factor`.
        Pretraining has no such factors anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agents = self.saved_agents
        key = (self.hyper_params.seed, "solo_agent")
        self.trainings = {
            agent.name: SoloTraining(
                agent,
                self.scenario_instance.train_environment,
                self.parameters,
                *key,
                agent.name,
                is_as_agent_says=True,
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
            with ExitStack() as stack:
                self._build_train_context(stack)
                self._run_train_loop()
            with ExitStack() as stack:
                self._build_test_context(stack)
                self._run_test_loop()
        self._publish_models(partial(save_agents, self.agents), role="agents")
        self._write_results()

    def components_to_time(self) -> dict[str, Callable[[], object]]:
        """`epoch`, of all agents, and `forward`: predictions for the test datapoints."""

        def epoch() -> None:
            for training in self.trainings.values():
                training.run_epoch(0)

        def forward() -> None:
            for training in self.trainings.values():
                training.test(self.test_environment)

        return {"epoch": epoch, "forward": forward}

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
        """The optimizer of each agent."""
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
