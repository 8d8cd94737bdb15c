"""A run with models trained in this process is copied and damaged between processes."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nip_astra.errors import CheckpointError
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.chat_models.local import LocalChatModel
from nip_astra.language_models.services.retrying import RetryingChatModel
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment, resume_experiment, run_experiment
from nip_astra.scenario_base.text.models import models_of_run
from nip_astra.scenarios.pure_text_base import PureTextScenarioInstance
from nip_astra.tracking import wandb_runs
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer, Stage
from tests.kit.resuming import Killed

SMALL = (
    "text_rl.num_iterations=2",
    "text_rl.rollouts_per_iteration=1",
    "text_rl.num_fine_tune_epochs=1",
    "text_rl.min_fine_tune_examples=1",
    "text_rl.test_scheme=none",
    "pure_text_ei.reward_threshold=-5",
)


def _remaining_run(run: Path) -> dict[str, str]:
    results = json.loads((run / "results.json").read_text())
    assert results.pop("model_dir") == str(run / "model")
    assert str(run) not in json.dumps(results)
    texts = {"results": json.dumps(results | {"services": None})}
    for path in [run / "metrics.jsonl", *run.glob("rollouts/*/rollouts.json")]:
        texts[str(path.relative_to(run))] = path.read_text()
    return texts


def _live_models() -> int:
    gc.collect()
    return sum(isinstance(one, HuggingFaceLanguageModel) for one in gc.get_objects())


def test_a_copied_run_continues_with_its_own_models_and_refuses_changed_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_stage, before = PureTextRlTrainer._run_stage, _live_models()

    def until_killed(trainer: Any, stage: Stage, iteration: int, **more: Any) -> None:
        if iteration == 1 and stage == Stage.LOG_STATS:
            assert _live_models() <= before + 1, "only the current model is held"
            raise Killed
        run_stage(trainer, stage, iteration, **more)

    with monkeypatch.context() as patch:
        patch.setattr(PureTextRlTrainer, "_run_stage", until_killed)
        resolved = resolve_experiment(trainer="pure_text_ei", overrides=list(SMALL))
        with pytest.raises(Killed):
            run_experiment(resolved, runs_dir=str(tmp_path), run_id="run", progress=False)
    run, copy, damaged = tmp_path / "run", tmp_path / "elsewhere" / "copy", tmp_path / "damaged"
    latest = (run / "checkpoints" / "latest").read_text().strip()
    (group,) = json.loads((run / "checkpoints" / latest / "state.json").read_text())["run"][
        "groups"
    ].values()
    weights = Path(group["model"]) / "model.safetensors"
    assert not weights.is_absolute()
    trained = models_of_run(run)["players"]["model"]
    assert trained == models_of_run(run, latest)["players"]["model"] == str(run / group["model"])
    with pytest.raises(CheckpointError, match="step_00000077"):
        models_of_run(run, "step_00000077")
    # Models generate again, beyond reading stored rollouts.
    for path in run.glob("rollouts/train_0001/*"):
        path.unlink()
    shutil.copytree(run, copy)
    shutil.copytree(run, damaged)
    resume_experiment(run, progress=False)
    (run / weights).unlink()
    resume_experiment(copy, progress=False)
    assert _remaining_run(copy) == _remaining_run(run)
    _check_others_begin_with_its_model(run, copy / weights, monkeypatch)
    content = bytearray((damaged / weights).read_bytes())
    content[-100] ^= 1
    (damaged / weights).write_bytes(content)
    with pytest.raises(CheckpointError, match=weights.name):
        resume_experiment(damaged, progress=False)


def _check_others_begin_with_its_model(
    run: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder `model` is all that remains of it, here or at W&B."""
    shutil.rmtree(run / "jobs")

    def download(reference: str, folder: Path, version: str = "latest") -> None:
        shutil.copytree(run / "model", folder)

    monkeypatch.setattr(wandb_runs, "download_model", download)
    for place in (str(run), "wandb://us/words/run"):
        named = f"secret_word.agents.default.load_from_run={place}"
        resolved = resolve_experiment(trainer="pure_text_ei", overrides=[*SMALL, named])
        instance = prepare_experiment(resolved, progress=False).scenario_instance
        assert isinstance(instance, PureTextScenarioInstance)
        model = instance.shared_model_groups["players"].model
        assert isinstance(model, RetryingChatModel)
        assert isinstance(model.model, LocalChatModel)
        assert isinstance(model.model.language_model, HuggingFaceLanguageModel)
        held = model.model.language_model.module.state_dict()
        trained = load_file(weights)
        assert trained
        assert all(torch.equal(held[name], one) for name, one in trained.items())
