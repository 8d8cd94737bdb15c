"""A short run of every built-in trainer, and runs as a killed process leaves them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from nip_astra.parameters.types import TrainerType
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.tracking.run_directory import REPORT, RESULTS
from tests.kit.tiny import write_scenario
from tests.kit.toy_protocol_scenario import SMALL, toy_scenario_folder


class Killed(BaseException):
    """The process ends."""


AST_OVERRIDES = (
    "training.num_episodes_per_experience=2",
    "training.eval_period=2",
    "training.num_epochs=2",
    "ast_chat.evaluation.use_random_search=false",
    "ast_chat.evaluation.num_episodes=2",
    "ast_chat.evaluation.num_dev_episodes=2",
)
SERVICE_OVERRIDES = (
    "training.num_episodes_per_experience=4",
    "training.minibatch_size=8",
    "training.eval_period=2",
    "task.evaluation.num_problems=4",
    "task.evaluation.num_dev_problems=4",
)
SHORT_TRAINERS = tuple(str(one) for one in TrainerType if not one.startswith("pure_text_"))
"""Trainers of short runs; those of chat models are killed at every stage by tests of their own."""
TEXT_OVERRIDES = (
    "text_rl.rollouts_per_iteration=4",
    "text_rl.min_fine_tune_examples=1",
    "text_rl.num_fine_tune_epochs=1",
    "secret_word.num_test=4",
)
MORE = {"ast_sft": ("ast_sft.min_score=0.0",), "ast_ppo": ("ast_ppo.kl.target=0.01",)}


def short_experiment(
    trainer: str, folder: Path, *more: str, num_iterations: int = 4
) -> ResolvedExperiment:
    """A run that takes about a second, over models written into a new folder."""
    if trainer.startswith("ast_"):
        folder.mkdir(parents=True)
        length = f"training.num_iterations={num_iterations}"
        overrides = [*AST_OVERRIDES, length, *MORE.get(trainer, ()), *more]
        scenario = write_scenario(folder)
        return resolve_experiment(trainer=trainer, scenario=str(scenario), overrides=overrides)
    if trainer.startswith(("self_", "remote_")):
        length = f"training.num_iterations={num_iterations}"
        return resolve_experiment(trainer=trainer, overrides=[*SERVICE_OVERRIDES, length, *more])
    if trainer.startswith("pure_text_"):
        length = f"text_rl.num_iterations={num_iterations}"
        return resolve_experiment(trainer=trainer, overrides=[*TEXT_OVERRIDES, length, *more])
    scenario = toy_scenario_folder(folder)
    values = SMALL | {"trainer": trainer, "scenario": str(scenario)}
    if trainer == TrainerType.SOLO_AGENT:
        del values["rl"], values["nip"], values["protocol_common"]
        values["solo_agent"] = {"num_epochs": num_iterations, "minibatch_size": 16}
    else:
        values["rl"] = values["rl"] | {"num_iterations": num_iterations}
    (folder / "parameters.yaml").write_text(json.dumps(values))
    return resolve_experiment(parameter_file=folder / "parameters.yaml", overrides=more)


def copy_as_killed_after(run: Path, checkpoint: Path, copy: Path) -> None:
    """Copy a run as left by a process killed some time after a checkpoint."""
    shutil.copytree(run, copy)
    for name in (RESULTS, REPORT):
        (copy / name).unlink()
    for later in (copy / "checkpoints").glob("step_*"):
        if later.name > checkpoint.name:
            shutil.rmtree(later)
    (copy / "checkpoints" / "latest").write_text(f"{checkpoint.name}\n")
