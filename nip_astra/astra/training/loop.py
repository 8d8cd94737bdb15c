"""The loop of the registered trainers with a user's sampler and algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import Field

from nip_astra.astra.core.algorithm import Algorithm
from nip_astra.astra.core.aliases import is_overridden
from nip_astra.astra.training.adapters import AlgorithmAdapter, CountedBatch, HasSampler, Player
from nip_astra.astra.training.configuration import TrainingConfiguration
from nip_astra.astra.training.harness import Harness
from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.errors import CheckpointError, ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import LanguageModel, as_learner
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.training import TrainingConfiguration as SharedConfiguration
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.scenario_instance import ConversationInstance
from nip_astra.scenarios.ast_chat import EvaluationParameters
from nip_astra.tracking.tracker import Tracker
from nip_astra.trainers.ast.base import AstTrainer
from nip_astra.trainers.language_model_base import Experience
from nip_astra.trainers.optimization import build_optimizer

NUM_BATCHES = "num_batches"
"""Entry of a checkpoint's state, beside those of the algorithm."""
KIND = "own_objects"
"""Name of the section that replaces the scenario's."""


class OwnObjectsParameters(SubParameters):
    """Scenario parameters of a user's sampler."""

    tree_width: int = Field(default=1, ge=1)
    """Probes sampled at every node of a tree."""
    tree_depth: int = Field(default=1, ge=1)
    """Probes on a path from opening to leaf."""
    failure_threshold: float = Field(default=0.5, gt=0, le=1)
    """Minimum score of a failed response."""
    evaluation: EvaluationParameters = EvaluationParameters()
    """Dev evaluations."""


class OwnObjectsLoop(AstTrainer):
    """Trains with a user's algorithm; see `nip_astra.astra.Trainer`.

    Parameters
    ----------
    harness : Harness
        Sampler and algorithm.
    dev_prompts : Sequence[str]
        Prompts of dev evaluations.
    state_dir : Path, optional
        Folder of resumable checkpoints; None for none.
    on_save : Callable, optional
        Called with `is_best` whenever the loop saves.

    Attributes
    ----------
    harness : Harness
        The trainer's. Its sampler, algorithm and number of episodes are read at each iteration. If
        `experience` or `step` is replaced after the loop was created, the replacement is called,
        and its batches and losses are used unchanged.
    num_batches : int
        Batches with a computed loss so far, including the current step.
    """

    scenario_kinds = ()
    # The configuration is passed again; more steps continue a finished training.
    may_change_on_resume = ("training.num_iterations",)

    def __init__(
        self,
        config: TrainingConfiguration,
        harness: Harness[Any, Any, Any, Any],
        *,
        dev_prompts: Sequence[str] = (),
        state_dir: Path | None = None,
        on_save: Callable[[bool], None] | None = None,
        tracker: Tracker | None = None,
        show_progress: bool = False,
    ) -> None:
        check_dev_prompts(config, dev_prompts)
        self.num_batches = 0
        self.harness: Any = harness
        self._first_harness = harness
        self.state_dir = state_dir
        self.on_save = on_save
        rollouts = harness.rollouts
        num_dev = max(len(dev_prompts), 1)
        section = OwnObjectsParameters(
            **rollouts.size,
            evaluation=EvaluationParameters(num_episodes=num_dev, num_dev_episodes=num_dev),
        )
        values = {"seed": config.seed, "training": config, KIND: section}
        hyper_params = HyperParameters.with_sections({KIND: OwnObjectsParameters})(
            trainer="own_algorithm",
            scenario=KIND,
            **values,  # type: ignore[arg-type]  # a section is not a field of the class known here
        )
        instance = ConversationInstance(
            kind=KIND,
            agents={
                role: getattr(harness.player, role) for role in ("attacker", "target", "reference")
            },
            datasets={"train": rollouts.prompts, "dev": list(dev_prompts)},
            sampler=harness.player,  # type: ignore[arg-type]  # offers what the loop asks
        )
        settings = ExperimentSettings(
            progress=show_progress,
            # Saved with every evaluation, if there are any.
            checkpoint_period=config.eval_period,
        )
        super().__init__(hyper_params, instance, settings)
        self.tracker = tracker or Tracker()
        self._train_problem_parameters()
        self.rollouts = rollouts
        self.evaluate_with(harness)

    def evaluate_with(self, owner: HasSampler) -> None:
        """Evaluate with the sampler that `owner` has at each evaluation."""
        self.evaluation.sampler = Player(owner, evaluates=True)  # type: ignore[assignment]

    @property
    def algorithm(self) -> Algorithm[Any, Any, Any, Any]:
        """The harness's current algorithm; a harness of another class need not have one."""
        algorithm: Any = getattr(self.harness, "algorithm", None)
        return algorithm or self._first_harness.algorithm

    def _train_problem_parameters(self) -> None:
        """Train the problem's `parameters` if they are not all trainable weights of its model."""
        named = list(self.algorithm.system.parameters())
        if {id(p) for p in named} == {id(p) for p in self.learned}:
            return
        beside = {id(p) for p in self.modules.parameters()}
        own = [p for p in named if id(p) not in beside and p.requires_grad]
        others = [p for p in named if id(p) in beside]
        self.learned = [*own, *others]
        self.optimizer = build_optimizer(
            self.training, own, more=[(others, self.modules_lr_factor)]
        )
        self.service = self.build_service()

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer of the same weights."""
        self.optimizer = optimizer
        self.service = self.build_service()

    def _calls(self, method: str) -> bool:
        """Return whether a method of the harness was replaced, so that the loop must call it."""
        harness = self.harness
        return harness is not self._first_harness or is_overridden(harness, method, Harness)

    def _check_parts(self) -> None:
        """Raise for replaced parts of a problem that the optimizer does not train."""
        self._first_harness.check_parts()
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        system = self.algorithm.system
        if not any(id(parameter) in trained for parameter in system.parameters()):
            raise ConfigurationError(
                f"sampler and algorithm were replaced by those of another {type(system).__name__}, "
                "which the optimizer does not train. Create a new Trainer for it."
            )

    # ---- hooks, implemented by the harness and the algorithm

    def collect(self, iteration: int) -> Experience:
        if not self._calls("experience"):
            self._check_parts()
            self.rollouts = self._first_harness.rollouts
            return super().collect(iteration)
        return Experience([CountedBatch(batch, 1) for batch in self.harness.experience()])  # type: ignore[misc]  # ready batches stand for samples

    def batches(self, samples: Sequence[Any], *, iteration: int, epoch: int) -> Iterator[Any]:
        if samples and isinstance(samples[0], CountedBatch):
            return iter(samples)
        key = (self.hyper_params.seed, iteration, epoch)
        return self._first_harness.batches(samples, self.collate_fn, key=key)

    def flatten(self, tree: RolloutTree) -> list[Any]:
        samples = AlgorithmAdapter(self.algorithm).flatten(tree)
        self.log_metrics(getattr(self.algorithm, "flatten_metrics", {}))
        return samples

    def collate_fn(self, samples: Sequence[Any]) -> Any:
        return AlgorithmAdapter(self.algorithm).collate_fn(samples)

    def loss(self, batch: Any) -> LossOutput:
        self.num_batches += 1
        step = self.harness.step if self._calls("step") else self.algorithm.step
        return AlgorithmAdapter(self.algorithm).step(batch, step)

    def _mark_first_step(self, batches: Sequence[Any]) -> None:
        """Do nothing: a user's algorithm reads its own samples."""

    def _write_step_totals(self, batches: Sequence[Any]) -> None:
        parts: Sequence[CountedBatch] = batches
        # A step without a token has loss 0, whatever it is divided by.
        num_tokens = max(sum(part.num_tokens or 0 for part in parts), 1)
        num_samples = sum(len(part) for part in parts)
        for part in parts:
            if part.num_tokens is not None:
                part.content.normaliser = num_tokens * len(part) / num_samples

    def build_policy(self) -> LanguageModel:
        self.attacker = self.scenario_instance.agents["attacker"]
        # The algorithm asks the problem for tokens and log-probabilities, the loop for weights.
        learner = as_learner(self.attacker.language_model, role="attacker", to="learn")
        return cast("LanguageModel", learner)

    def build_modules(self) -> dict[str, torch.nn.Module]:
        modules = getattr(self.algorithm.system, "modules", None)
        found: dict[str, torch.nn.Module] = modules() if callable(modules) else {}
        return found

    @property
    def modules_lr_factor(self) -> float:
        return float(self.algorithm.modules_lr_factor)

    def progress_figures(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        # Of experience that a harness has collected nothing but the loss is known.
        return super().progress_figures(metrics) if "mean_reward" in metrics else {}

    def trainer_state(self) -> dict[str, Any]:
        return {**self.algorithm.state(), NUM_BATCHES: self.num_batches}

    def load_trainer_state(self, state: Mapping[str, Any]) -> None:
        self.num_batches = int(state.get(NUM_BATCHES, 0))
        self.algorithm.load_state({k: v for k, v in state.items() if k != NUM_BATCHES})

    # ---- the job

    def train(self) -> None:
        """Train up to `num_iterations` iterations, without evaluations before or after.

        Raises
        ------
        ConfigurationError
            If dev evaluations are requested, or needed to stop early, and there are no prompts.
        """
        check_dev_prompts(self.training, self.scenario_instance.datasets["dev"])
        with self._open_progress_bar(), ExitStack() as stack:
            self._build_train_context(stack)
            self._run_train_loop()

    def get_total_num_iterations(self) -> int:
        return self.training.num_iterations

    def resume_latest(self) -> None:
        """Restore the latest checkpoint."""
        store = self._checkpoint_store()
        if store is None or store.latest() is None:
            raise CheckpointError(
                f"{self.state_dir or 'a trainer without ckpt_dir'} has no checkpoint to resume. "
                "Call train()."
            )
        self.resume_from(store.open_latest()[0])

    def _checkpoint_store(self) -> CheckpointStore | None:
        return None if self.state_dir is None else self._store_in(self.state_dir)

    def _save_checkpoint(self, *, is_best: bool = False) -> None:
        # In the middle of an iteration the state holds samples of the user's own classes.
        if self.state.samples is None:
            super()._save_checkpoint(is_best=is_best)
        if self.on_save is not None:
            self.on_save(is_best)


def check_dev_prompts(config: SharedConfiguration, dev_prompts: Sequence[str]) -> None:
    """Raise for a configuration that needs dev evaluations if there are no prompts."""
    needs = {name: getattr(config, name) for name in ("eval_period", "early_stopping_patience")}
    given = ", ".join(f"{name}={value}" for name, value in needs.items() if value)
    if given and not dev_prompts:
        raise ConfigurationError(
            f"the configuration has dev evaluations ({given}), but the trainer has no prompts to "
            "evaluate on. Give them: HFASTTrainer(..., dev_prompts=[...]); or leave eval_period "
            "0 and early_stopping_patience None."
        )
