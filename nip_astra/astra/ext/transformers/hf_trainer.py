"""Training with dev evaluations and checkpoints in the layout of transformers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from nip_astra.astra.core.algorithm import Algorithm
from nip_astra.astra.core.common import Batch, Step
from nip_astra.astra.core.sampler import Sampler
from nip_astra.astra.logging import logger
from nip_astra.astra.training.adapters import check_can_be_saved, save_problem
from nip_astra.astra.training.configuration import TrainingConfiguration
from nip_astra.astra.training.loop import OwnObjectsLoop
from nip_astra.astra.training.trainer import Trainer
from nip_astra.errors import CheckpointError, ConfigurationError
from nip_astra.parameters.conversion import ASTRA_NAMES, rename
from nip_astra.tracking.tracker import Tracker

EVAL_EVERY = 100
BATCH_SIZE = 4
NUM_EPISODES = 2


class HFASTConfiguration(TrainingConfiguration):
    """A configuration for fine-tuning: small batches of few episodes.

    Any field of `TrainingConfiguration` may be given.
    """

    def __init__(self, **values: Any) -> None:
        small = {"minibatch_size": BATCH_SIZE, "num_episodes_per_experience": NUM_EPISODES}
        super().__init__(**{**small, **rename(values, ASTRA_NAMES)[0]})


class HFASTTrainer(Trainer[str, str, Step, Batch]):
    """The base trainer with evaluations on dev prompts and checkpoints.

    After every `eval_every` iterations, conversations from the dev prompts are sampled and
    rated. `ckpt_dir` holds the attacker with its tokenizer in `last`, written with every
    evaluation and at the end, and in `best` at the largest `config.dev_metric` (by default the
    mean reward of a turn); `evaluations.jsonl` has a line for each evaluation, and
    `state` is read by `resume`. With `config.early_stopping_patience` training ends after this
    number of evaluations without improvement.

    Parameters
    ----------
    config, environment, algorithm, use_wandb, sampler
        See `Trainer`.
    dev_prompts : Iterable[str], optional
        Prompts of evaluations; without them there are none, and a configuration that requires
        evaluations (`eval_period`, `early_stopping_patience`) is refused.
    eval_every : int, optional
        Iterations between evaluations; `config.eval_period`, or 100, by default.
    ckpt_dir : str or Path
        Folder of checkpoints.
    show_progress : bool
        Whether a progress bar is shown.
    """

    def __init__(
        self,
        config: TrainingConfiguration,
        environment: Sampler[str, str] | None = None,
        algorithm: Algorithm[str, str, Step, Batch] | None = None,
        *,
        sampler: Sampler[str, str] | None = None,
        dev_prompts: Iterable[str] | None = None,
        eval_every: int | None = None,
        ckpt_dir: str | Path = "checkpoints",
        use_wandb: bool = False,
        show_progress: bool = False,
    ) -> None:
        if eval_every is not None and (not isinstance(eval_every, int) or eval_every < 1):
            raise ConfigurationError(
                f"eval_every={eval_every!r} must be an integer of at least 1. Omit dev_prompts for "
                "no evaluation."
            )
        self.dev_prompts = list(dev_prompts or [])
        self.ckpt_dir = Path(ckpt_dir)
        period = eval_every or getattr(config, "eval_period", 0) or EVAL_EVERY
        if isinstance(config, TrainingConfiguration):
            config = config.model_copy()
            if self.dev_prompts:
                config.eval_period = period
        self.show_progress = show_progress
        super().__init__(config, environment, algorithm, use_wandb, sampler=sampler)
        self.eval_every = period
        self.sampler = self.environment = self.harness.sampler
        self._loop.evaluate_with(self)
        self.system = self.problem = self.harness.sampler.system
        check_can_be_saved(self.problem)

    def _make_loop(self) -> OwnObjectsLoop:
        return OwnObjectsLoop(
            self.config,
            self.harness,
            dev_prompts=self.dev_prompts,
            state_dir=self.ckpt_dir / "state",
            on_save=self._save,
            tracker=_Log(self),
            show_progress=self.show_progress,
        )

    @property
    def best_score(self) -> float:
        """Largest dev metric so far; minus infinity before the first evaluation."""
        best = self._loop.state.best_dev_value
        return -math.inf if best is None else best

    def resume(self) -> None:
        """Restore the latest checkpoint of `ckpt_dir`; `train` then continues from there."""
        self._loop.resume_latest()

    def eval_epoch(self, step: int, tag: str = "dev") -> float:
        """Evaluate the current attacker and return `config.dev_metric`; NaN without dev prompts."""
        if not self.dev_prompts:
            return math.nan
        with torch.no_grad():
            report = self._loop.evaluation.dev_report()
        value = float(report[self.config.dev_metric])
        logger.info("%s %s=%.4g after iteration %d", tag, self.config.dev_metric, value, step)
        return value

    def save(self, step: int | None, tag: str = "step") -> Path:
        """Write attacker and tokenizer to `<ckpt_dir>/<tag>`, and return that folder.

        The tags `best` and `last` have one folder, which is replaced; another has one per step.
        """
        name = tag if tag in ("best", "last") else f"{tag}-{step}"
        folder, temporary = self.ckpt_dir / name, self.ckpt_dir / f".tmp-{name}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            save_problem(self.problem, temporary)
            replaced = self.ckpt_dir / f".old-{name}"
            shutil.rmtree(replaced, ignore_errors=True)
            # A process that is killed between these leaves at least one whole copy.
            if folder.exists():
                folder.rename(replaced)
            temporary.rename(folder)
            shutil.rmtree(replaced, ignore_errors=True)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"cannot save the attacker in {folder}: {error}. Free space, or give another "
                "ckpt_dir."
            ) from error
        logger.info("saved %s", folder)
        return folder

    def _save(self, is_best: bool) -> None:
        step = self._loop.state.iteration
        self.save(step, tag="last")
        if is_best:
            self.save(step, tag="best")


class _Log(Tracker):
    """Passes the loop's metrics to the trainer's log, and evaluations to a file."""

    def __init__(self, trainer: HFASTTrainer[Any, Any]) -> None:
        self.trainer = trainer

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        shown = {name: value for name, value in values.items() if not name.startswith("memory/")}
        self.trainer.harness.log_current_step({"step": step, **shown})
        found = {name: value for name, value in values.items() if name.startswith("dev/")}
        if not found:
            return
        metric = f"dev/{self.trainer.config.dev_metric}"
        is_best = self.trainer._loop.state.num_evals_since_best == 0
        plain = {n: None if v is None or math.isnan(v) else v for n, v in found.items()}
        line = {"step": step, **plain, "metric": metric, "is_best": is_best}
        self.trainer.ckpt_dir.mkdir(parents=True, exist_ok=True)
        with (self.trainer.ckpt_dir / "evaluations.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
