"""The RL loop of agents that are networks and follow an interaction protocol.

Shapes: E environments, T rounds, A agents, B frames of a minibatch.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.objectives import LossModule, ValueEstimators

from nip_astra.checkpoints.run_state import Part, RunState, global_generators, set_global_generators
from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.distributed.placement import Work
from nip_astra.distributed.team import Handler
from nip_astra.errors import ConfigurationError, LostProcessError
from nip_astra.parameters.conditions import ReadWhere, where
from nip_astra.rl_objectives.objective import EPISODE_KEY, Objective, reward_to_go_of
from nip_astra.samplers.episodes import EpisodeSampler
from nip_astra.scenario_base.protocol.combined import CombinedAgents
from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment
from nip_astra.scenario_base.protocol.tensordict_agents import Agent, RandomPolicyHead
from nip_astra.tracking.run_directory import OUTCOMES
from nip_astra.trainers.dry_run import estimate_run, measure_smallest_step, memory_of, model_memory
from nip_astra.trainers.protocol.agent_files import AgentTrainer, save_agents
from nip_astra.trainers.protocol.learning import (
    Learner,
    MinibatchBuffer,
    ReplayBuffer,
    episode_numbers,
)
from nip_astra.trainers.protocol.message_regression import MessageRegression
from nip_astra.trainers.protocol.optimizers import AgentOptimizers
from nip_astra.trainers.protocol.sharded_agents import ShardedAgents
from nip_astra.trainers.protocol.statistics import (
    EpisodeLedger,
    PlayStatistics,
    as_of_test,
    episode_rows,
    iteration_statistics,
    num_samples,
    outcome_rows,
    read,
    timings_of,
)
from nip_astra.trainers.solo_agent import pretrain_agents
from nip_astra.trainers.trainer_base import IterationContext, attach_progress_bar
from nip_astra.utils.seeding import SeedPart

Gae = nn.Module
"""Called with a batch [E, T]; writes value, advantage and value target under `agents`."""


@dataclass
class RlState(RunState):
    """Counters and metrics of a run; an optimizer step is one minibatch.

    `is_prepared` once observations were measured and bodies pretrained, if so
    configured; `last` are the statistics of the last iteration.
    """

    is_prepared: bool = False
    last: dict[str, float] = field(default_factory=dict)


class TensorDictRlTrainer(AgentTrainer):
    """Base of trainers that differ in their loss. Subclasses implement `_get_loss_module_and_gae`.

    Hooks: `_get_loss_module_and_gae`, `_get_replay_buffer`, `_run_train_loop`, `_run_test_loop`,
    `_extra_metrics`, and for further state `trainer_state` and `load_trainer_state`.

    Attributes
    ----------
    agents : CombinedAgents
        All agents.
    loss_module : LossModule
        An `Objective`, or any loss module of TorchRL.
    gae : Module or None
        Estimates advantages.
    sampler : EpisodeSampler
        Plays the training batches.
    buffer : ReplayBuffer
        Gives minibatches.
    optimizers : AgentOptimizers
        Of each agent.
    reward_to_go_gamma : float
        Discount of rewards to go, where there is no `gae`.
    state : RlState
        Progress of the run.
    """

    State: ClassVar[type[RunState]] = RlState
    evaluation_family: ClassVar[str | None] = "protocol"
    parameter_groups: ClassVar[tuple[str, ...] | None] = ("rl", "message_regression")
    figures: ClassVar[tuple[str, ...] | None] = (
        *("mean_accuracy", "std_accuracy", "worst_datapoint_accuracy", "share_undecided"),
        *("mean_episode_length", "num_*"),
        *("*/mean_*", "*/std_*", "*/worst_*", "*/residual_critic_variance"),
    )
    learns_in_processes: ClassVar[bool] = True
    divides_weights: ClassVar[bool] = True
    sections_of_others: ClassVar[tuple[str, ...]] = ("solo_agent",)
    reads_where: ClassVar[Mapping[str, ReadWhere]] = {
        "solo_agent": where("rl.pretrain_agents", True)
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        instance, self.rl = self.scenario_instance, self.hyper_params.rl
        self.agents = instance.combined_agents
        self.train_environment = instance.train_environment
        self.reward_to_go_gamma = self.rl.gamma
        result: object = self._get_loss_module_and_gae()
        if not isinstance(result, tuple) or len(result) != 2:
            raise ConfigurationError(
                f"_get_loss_module_and_gae of the trainer {type(self).__name__} returned "
                f"{type(result).__name__}. Return the pair (loss_module, gae); gae may be None."
            )
        self.loss_module, self.gae = result
        self.optimizers = AgentOptimizers(instance.agents, self.rl, self.loss_module.parameters())
        self.buffer = self._get_replay_buffer()
        self.learner = Learner(
            self.loss_module,
            self.optimizers,
            self.buffer,
            num_epochs=self.rl.num_epochs,
            device=torch.device(self.train_environment.device),
            team=self.team,
        )
        self.sampler = EpisodeSampler(
            self.train_environment, self.agents, key=(self.hyper_params.seed, "train")
        )
        self.ledger = EpisodeLedger()
        self.message_regression = MessageRegression(self.hyper_params, self.agents.names)

    # ---- hooks

    @abstractmethod
    def _get_loss_module_and_gae(self) -> tuple[LossModule, Gae | None]:
        """Return the loss and, if it reads advantages, their estimator.

        An `Objective` over `self.agents`, or a loss module of TorchRL: the sum of its entries
        `loss_*` is minimised. Usually

            loss_module.make_value_estimator(ValueEstimators.GAE, gamma=..., lmbda=...)
            gae = loss_module.value_estimator
        """

    def estimator_of(self, objective: Objective) -> Gae:
        """Return generalised advantage estimation for an objective, with the parameters `rl`."""
        objective.make_value_estimator(
            ValueEstimators.GAE, gamma=self.rl.gamma, lmbda=self.rl.lmbda
        )
        estimator: Gae = objective.value_estimator
        return estimator

    def _get_replay_buffer(self) -> ReplayBuffer:
        """Return the buffer of minibatches, of whole episodes if the loss requires them."""
        return MinibatchBuffer(
            *(self.rl.minibatch_size, self.hyper_params.seed, "minibatches"),
            episode_key=EPISODE_KEY if self._reads_episodes else None,
        )

    def _extra_metrics(self, batch: TensorDict, iteration: int) -> dict[str, float]:
        """Return further metrics of an iteration, from its batch [E, T]; empty here."""
        return {}

    # ---- several processes

    def handlers(self) -> dict[str, Handler]:
        sharded = self.learner.sharded
        return super().handlers() | ({} if sharded is None else sharded.optimizers.handlers())

    def _shard_agents(self) -> None:
        """Shard agents and optimizers over the processes, if configured."""
        if self.team.size > 1 and self.settings.sharding != "none":
            sharded = ShardedAgents(self.agents, self.optimizers, self.team)
            self.learner.sharded = sharded
            self.learner.optimizers = self.optimizers = sharded.optimizers

    def _collect_in_all(self) -> TensorDict:
        """Return the leader's batch [E, T]; in the others, the entries that the loss reads."""
        batch = self.run_on_leader(self.collect)
        if self.team.size == 1:
            assert batch is not None
            return batch
        plain: dict[str, Any] | None = None
        if batch is not None:
            read = batch.exclude(*getattr(self.loss_module, "unread_keys", ()))
            plain = {
                "batch_size": list(read.batch_size),
                "entries": dict(read.items(include_nested=True, leaves_only=True)),
            }
        plain = self.team.broadcast(plain)
        if batch is None:
            assert plain is not None
            batch = TensorDict({}, batch_size=plain["batch_size"])
            for key, value in plain["entries"].items():
                batch[key] = value.to(self.train_environment.device)
        return batch

    @contextmanager
    def _rolled_back_if_lost(self) -> Iterator[None]:
        """If another process ends within the block, restore the state before it and save.

        An iteration counts as a whole or not at all, so that the run can be resumed exactly. If
        weights were sharded, a part is lost and the last checkpoint remains valid.
        """
        if self.team.size == 1 or not self.team.is_leader or self.learner.sharded is not None:
            yield
            return
        weights = [*self.agents.parameters(), *self.agents.buffers()]
        copies = [weight.detach().clone() for weight in weights]
        parts = pack_state({name: part.save() for name, part in self.kept_parts().items()})
        generators, state = global_generators(), self.state.to_dict()
        try:
            yield
        except LostProcessError:
            if self.state.iteration == state["iteration"]:
                with torch.no_grad():
                    for weight, copy in zip(weights, copies, strict=True):
                        weight.copy_(copy)
                kept = unpack_state(parts)
                for name, part in self.kept_parts().items():
                    part.load(kept[name])
                self.state = self.State.from_dict(state)
                set_global_generators(generators)
            self._save_checkpoint()
            raise

    # ---- the job

    def train(self) -> None:
        """Prepare and test the agents, train them, test them again, save them."""
        self._set_seed()
        self._rewind_records()
        with self._open_progress_bar():
            with self.train_context():
                self.run_on_leader(self._prepare)
                self.team.broadcast_tensors([*self.agents.parameters(), *self.agents.buffers()])
            with self.test_context():
                self.run_on_leader(self._run_before_loop)
            with self.train_context():
                self._shard_agents()
                self._run_train_loop()
            with self.test_context():
                self.run_on_leader(self._run_test_loop)
        if self.team.is_leader:
            self._publish_models(partial(save_agents, self.saved_agents), role="agents")
            self._write_results()

    def _build_train_context(self, stack: ExitStack) -> None:
        """Enter the configuration for training, with processes for the agents' losses."""
        super()._build_train_context(stack)
        stack.enter_context(self.learner.processes(self.settings.num_threads))

    def _prepare(self) -> None:
        """Normalise observations and pretrain bodies as configured, unless restored."""
        if self.state.is_prepared:
            return
        if self.rl.normalize_observations:
            normalize_observations(
                self.agents,
                self.train_environment,
                num_frames=self.rl.num_normalization_steps,
                key=(self.hyper_params.seed, "normalization"),
            )
        if self.rl.pretrain_agents:
            pretrain_agents(self.hyper_params, self.settings, self.scenario_instance)
        self.state.is_prepared = True

    @attach_progress_bar(lambda self: self.rl.num_test_iterations)
    def _run_before_loop(self, iteration_context: IterationContext) -> None:
        iteration_context.set_description("Before training")
        is_done = self.state.before is not None
        start = iteration_context.num_iterations if is_done else 0
        found = self._test(iteration_context, "before", start)
        if not is_done:
            self.state.before = found
        self._raise_if_stopped()

    @attach_progress_bar(lambda self: self.rl.num_iterations)
    def _run_train_loop(self, iteration_context: IterationContext) -> None:
        iteration_context.set_description("Training")
        for iteration in iteration_context.iterate(self.state.iteration):
            with self._rolled_back_if_lost():
                self._iterate(iteration_context, iteration)

    def _iterate(self, iteration_context: IterationContext, iteration: int) -> None:
        """Collect, learn, and record the results."""
        started = time.perf_counter()
        batch = self._collect_in_all()
        collected = time.perf_counter()
        self.agents.train()
        metrics, num_steps = self.learner.learn(batch, iteration)
        self.agents.eval()
        self.state.num_optimizer_steps += num_steps
        timings = timings_of(batch.numel(), started, collected)

        def finish() -> None:
            names, ended = self.agents.names, self.ledger.ended(batch)
            statistics = read(metrics | iteration_statistics(batch, ended, metrics, names))
            statistics |= self.message_regression.regress(batch, self.agents, iteration)
            statistics |= self._extra_metrics(batch, iteration)
            if iteration % self.settings.rollout_sample_period == 0:
                self._log_episodes(batch, "train", iteration + 1)
            self._finish_iteration(iteration_context, statistics, timings)

        self.run_on_leader(finish)

    @attach_progress_bar(lambda self: self.rl.num_test_iterations)
    def _run_test_loop(self, iteration_context: IterationContext) -> None:
        iteration_context.set_description("Testing")
        found = self._test(iteration_context, "evaluation")
        self.tracker.log_metrics(as_of_test(found), step=self.state.iteration)
        self.results["after"] = found

    def _test(
        self, iteration_context: IterationContext, table: str, start: int = 0
    ) -> dict[str, Any]:
        """Sample on the test data, from its beginning, and return statistics."""
        play = PlayStatistics(self.agents.names)
        key = (self.hyper_params.seed, "test")
        numbers = iteration_context.iterate(start)
        outcomes: list[dict[str, Any]] = []
        hashes: dict[int, str] = {}
        for number, batch in self.test_batches(self.test_environment, key, numbers):
            play.add(batch)
            if number == 0:
                self._log_episodes(batch, table, self.state.iteration)
            if self.settings.num_rollout_samples:
                dataset = self.test_environment.dataset
                outcomes += outcome_rows(batch, self.agents.names, dataset, hashes)
        if outcomes:
            rows = [list(row.values()) for row in outcomes]
            self.tracker.log_table(
                f"{table}{OUTCOMES}", list(outcomes[0]), rows, step=self.state.iteration
            )
        return play.report()

    def test_batches(
        self, environment: ProtocolEnvironment, key: tuple[SeedPart, ...], numbers: Iterable[int]
    ) -> Iterator[tuple[int, TensorDict]]:
        """Yield batches [E, T] of an episode per environment with advantages.

        The datapoints begin with the first, and are the same whatever the agents do.
        """
        environment.restart()
        sampler = EpisodeSampler(environment, self.agents, key=key)
        for number in numbers:
            self._raise_if_stopped()
            batch = sampler.collect(environment.protocol.max_message_rounds, renews=False)
            if self.gae is not None:
                self.gae(batch)
            yield number, batch

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Enter the configuration of tests, for evaluations apart from training."""
        self._set_seed()
        with self.test_context():
            yield

    # ---- one iteration

    @property
    def _num_steps(self) -> int:
        """T, the rounds of each environment per iteration."""
        protocol = self.train_environment.protocol
        return self.rl.steps_per_env_per_iteration or protocol.max_message_rounds

    @property
    def frames_per_iteration(self) -> int:
        """Frames of all environments per iteration."""
        return self.train_environment.num_environments * self._num_steps

    @property
    def _reads_episodes(self) -> bool:
        """Whether minibatches must consist of whole episodes."""
        return isinstance(self.loss_module, Objective) and self.loss_module.reads_episodes

    @torch.no_grad()
    def collect(self) -> TensorDict:
        """Collect a training batch [E, T], with advantages, or without `gae` with rewards to go.

        Rewards to go reach to the ends of episodes: those that continue after the batch are
        completed, and sampled again in the next iteration.
        """
        batch = self.sampler.collect(self._num_steps)
        if self.gae is not None:
            self.gae(batch)
        else:
            parts, num_left = [batch], self.train_environment.protocol.max_message_rounds - 1
            if num_left and not batch["next", "done"][:, -1].all():
                parts.append(self.sampler.look_ahead(num_left, renews=False))
            batch["agents", "reward_to_go"] = reward_to_go_of(parts, gamma=self.reward_to_go_gamma)
        if self._reads_episodes:
            batch[EPISODE_KEY] = episode_numbers(batch["next", "done"].squeeze(-1))
        return batch

    def _finish_iteration(
        self, context: IterationContext, statistics: dict[str, float], timings: dict[str, float]
    ) -> None:
        self.state.iteration += 1
        self.state.last = statistics
        learning = self.optimizers.learning(self.state.iteration - 1)
        lrs = {f"{name}/lr": self.optimizers.lr(name) for name in learning}
        self.tracker.log_metrics(statistics | lrs | timings, step=self.state.iteration)
        context.set_postfix(
            accuracy=statistics.get("mean_accuracy", float("nan")),
            frames_per_second=timings["time/frames_per_second"],
        )
        self._checkpoint_or_stop(is_last=self.state.iteration == context.num_iterations)

    def _log_episodes(self, batch: TensorDict, table: str, step: int) -> None:
        """Record a sample of the whole episodes of a batch [E, T]."""
        columns, rows = episode_rows(
            batch,
            self.scenario_instance,
            num_episodes=num_samples(table, self.settings.num_rollout_samples),
            step=step,
            seed=self.hyper_params.seed,
        )
        self.tracker.log_table(table, columns, rows, step=step)

    # ---- saving

    def kept_parts(self) -> dict[str, Part]:
        """Return optimizers, loss, minibatches, sampler, unfinished episodes and regression.

        A custom buffer is refilled in every iteration, and draws from the global generators.
        """
        loss = self.loss_module
        device = torch.device(self.sampler.environment.device)
        is_own = isinstance(loss, Objective)
        parts = {
            "optimizers": Part(self.optimizers.state_dict, self.optimizers.load_state_dict),
            "loss_module": Part(
                lambda: dict(loss.own_state() if is_own else loss.state_dict()),
                loss.load_own_state if is_own else loss.load_state_dict,
            ),
            "sampler": Part(self.sampler.state, self.sampler.load_state),
            "ledger": Part(self.ledger.state, partial(self.ledger.load_state, device=device)),
            "message_regression": Part(
                self.message_regression.state, self.message_regression.load_state
            ),
        }
        if isinstance(self.buffer, MinibatchBuffer):
            parts["buffer"] = Part(self.buffer.state_dict, self.buffer.load_state_dict)
        return parts | super().kept_parts()

    def _write_results(self) -> None:
        self.store_results(
            {
                "kind": "interaction_proof",
                "protocol": self.hyper_params.interaction_protocol,
                "agents": list(self.agents.names),
                "before": self.state.before,
                "training": {
                    "num_iterations": self.state.iteration,
                    "num_frames": self.state.iteration * self.frames_per_iteration,
                    "num_optimizer_steps": self.state.num_optimizer_steps,
                    "last": self.state.last,
                },
            }
        )

    def components_to_time(self) -> dict[str, Callable[[], object]]:
        """Return `rollout`, `update`, and `forward`: policies and values of its frames."""
        batch = self.collect()
        frames = batch.flatten()

        def update() -> None:
            self.agents.train()
            self.learner.learn(batch, 0)
            self.agents.eval()

        @torch.no_grad()
        def forward() -> None:
            for name in self.agents.names:
                self.agents.policy(name, frames)
                self.agents.values(name, frames)

        return {"rollout": self.collect, "update": update, "forward": forward}

    def dry_run(self) -> dict[str, Any]:
        """Collect and train on one batch, and estimate a whole run."""
        num_steps = 1

        def play() -> tuple[list[TensorDict], float]:
            return [self.collect()], 0.0

        def learn(batches: Sequence[TensorDict]) -> tuple[None, int]:
            nonlocal num_steps
            _, num_steps = self.learner.learn(batches[0], 0)
            return None, self.frames_per_iteration

        with self.train_context():
            step = measure_smallest_step(play, learn)
        rl, num_environments = self.rl, self.train_environment.num_environments
        state_bytes = sum(model_memory({"state": self.optimizers.state_dict()}).values())
        memory = memory_of(self.scenario_instance.agents, self.optimizers.weights, state_bytes)
        work = Work(
            num_iterations=rl.num_iterations,
            num_episodes=num_environments,
            rows_per_step=min(rl.minibatch_size, self.frames_per_iteration),
            steps_per_iteration=num_steps,
            rollout_seconds=step.play_seconds,
            update_seconds=step.step_seconds,
            tokens_per_iteration=0.0,
            gradient_bytes=memory["gradients"],
            memory={**memory, "step": float(step.step_bytes)},
            divided_memory={},
        )
        if self.settings.sharding != "none":
            work = work.with_sharded_weights(memory["gradients"])
        single = replace(
            step,
            play_seconds=step.play_seconds / num_environments,
            step_seconds=step.step_seconds / max(num_steps, 1),
        )
        num_parameters = sum(weight.numel() for weight in self.agents.parameters())
        estimate = estimate_run(work, single, num_parameters)
        del estimate["loss"], estimate["generated_tokens"]
        test_seconds = 2 * rl.num_test_iterations * step.play_seconds
        return {
            **estimate,
            "num_frames": rl.num_iterations * self.frames_per_iteration,
            "estimated_test_hours": test_seconds / 3600,
        }


def normalize_observations(
    agents: CombinedAgents,
    environment: ProtocolEnvironment,
    *,
    num_frames: int,
    key: tuple[SeedPart, ...],
) -> None:
    """Let all bodies normalise message histories by the statistics of random play.

    At least `num_frames` are played, at least one conversation per environment, with random numbers
    derived from `key`; `environment` itself is unchanged. An agent that was loaded from a run keeps
    its statistics.
    """
    random_agents = {}
    for name in agents.names:
        agent = agents[name]
        assert agent.policy_head is not None
        head = RandomPolicyHead(agent.shape, agent.policy_head.impossible)
        random_agents[name] = Agent(name, agent.parameters_of_agent, agent.shape, policy_head=head)
    sampler = EpisodeSampler(
        environment.with_key(*key, "environment"),
        CombinedAgents(random_agents, agents.protocol, agents.space),
        key=(*key, "agents"),
    )
    num_steps = math.ceil(num_frames / environment.num_environments)
    num_steps = max(num_steps, agents.protocol.max_message_rounds)
    frames = sampler.collect(num_steps).flatten()
    linear = frames.get("linear_message_history", None)
    for name in agents.names:
        parameters = agents[name].parameters_of_agent
        if parameters.load_from_run is not None or not parameters.normalize_message_history:
            continue
        for body in agents[name].bodies:
            body.set_statistics(frames["message_history"], linear)
