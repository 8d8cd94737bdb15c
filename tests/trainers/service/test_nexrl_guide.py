"""The code and parameter files of NexRL's guide to custom trainers run here.

`tests/nexrl_guide/custom_trainers.nexrl.txt` holds its blocks as they are. The changes are the
import root (see `doc/guides/coming-from-nexrl.md`) and values that the guide leaves open.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra import (
    Batch,
    RemoteApiTrainer,
    SelfHostedGrpoTrainer,
    SelfHostedTrainer,
    Trajectory,
    load_plugin,
    module_of,
)
from nip_astra.errors import ConfigurationError, ParameterError
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.samples import samples_of
from nip_astra.run import prepare_experiment
from nip_astra.trainers.service.contract import check_batch
from tests.kit.command_line import plugins_forgotten_after
from tests.kit.documents import ROOT
from tests.kit.experiments import iterations_of

BLOCKS = [
    block.partition("\n")[2]
    for block in (ROOT / "tests" / "nexrl_guide" / "custom_trainers.nexrl.txt")
    .read_text(encoding="utf-8")
    .split("```")[1::2]
]
TRAINER, TASK, _, REMOTE, REMOTE_TASK, ALGORITHM, USES_ALGORITHM = BLOCKS[:7]
KL, VALUES, NSTEP, FIELDS, METRICS, EDGES, UTILITIES, UNIT_TEST = BLOCKS[7:15]
INTEGRATION, OF_GRPO, OF_REMOTE_GRPO = BLOCKS[16:]
SMALL = (
    "training.num_episodes_per_experience=4",
    "training.minibatch_size=32",
    "training.num_iterations=1",
    "task.evaluation.num_problems=2",
)


IMPORTS = {
    "nip_astra": "from nip_astra import",
    "nip_astra.nexrl": r"from nip_astra.nexrl\1 import",
}
"""Replacements of NexRL's imports, by import root: the package itself, and its part for NexRL."""
chosen = {"root": "nip_astra"}
each_root = pytest.mark.parametrize("import_root", [*IMPORTS], indirect=True)


@pytest.fixture
def import_root(request: pytest.FixtureRequest) -> Iterator[None]:
    """The root from which the blocks of the test import."""
    chosen["root"] = request.param
    yield
    chosen["root"] = "nip_astra"


def ours(text: str) -> str:
    """The text with one of the import roots that the guide names."""
    return re.sub(r"from nexrl((?:\.\w+)*) import", IMPORTS[chosen["root"]], text)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder `recipe/my_task` of a workspace, which is the working directory."""
    folder = tmp_path / "recipe" / "my_task"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with plugins_forgotten_after():
        yield folder


def written(recipe: Path, task: str, **modules: str) -> Path:
    """Write a parameter file and the modules beside it."""
    for name, text in modules.items():
        (recipe / f"{name}.py").write_text(ours(text))
    path = recipe / "my_task.yaml"
    path.write_text(task)
    return path


def one_iteration(trainer: Any) -> dict[str, float]:
    (metrics,) = iterations_of(trainer, 1)
    return metrics


def trainer_of(path: Path, *overrides: str) -> Any:
    resolved = resolve_experiment(parameter_file=path, overrides=[*SMALL, *overrides])
    return prepare_experiment(resolved, progress=False).trainer


def batch_of_two() -> Batch:
    return Batch.from_trajectories(
        [
            Trajectory([5, 6, 7], [0, 1, 1], logprobs=[0, -1, -1], reward=1.0, group_id="a"),
            Trajectory([5, 8], [0, 1], logprobs=[0, -2], reward=0.0, group_id="a"),
        ]
    )


def with_methods(*blocks: str, base: type = SelfHostedTrainer) -> Any:
    """A trainer with only values, with the functions of some blocks as methods."""
    names: dict[str, Any] = {"torch": torch, "Batch": Batch}
    for block in blocks:
        exec(ours(block), names)
    methods = {name: value for name, value in names.items() if callable(value)}
    methods = {name: value for name, value in methods.items() if name.startswith("_")}
    methods.setdefault("_prepare_batch", lambda self, batch: (batch, {}))
    return type("Mine", (base,), methods)({})


def test_all_blocks_are_there() -> None:
    assert len(BLOCKS) == 19
    assert sum("import" in block or "def " in block or "self." in block for block in BLOCKS) >= 10


@each_root
@pytest.mark.usefixtures("import_root")
@pytest.mark.parametrize("folder", ["recipe/my_task/", ""], ids=["workspace", "beside the file"])
def test_a_self_hosted_trainer_and_its_file_run(
    folder: str, recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = TASK.replace("recipe/my_task/", folder)
    trainer = trainer_of(written(recipe, task, my_trainer=TRAINER))
    assert type(trainer).__name__ == "MyCustomTrainer"
    assert trainer.hyper_params.trainer == "my_custom_trainer"
    assert trainer._my_param == 0.5
    assert trainer.config.total_train_steps == 1  # of --set; the file's 100 are below it
    assert "world_size left out" in caplog.text
    metrics = one_iteration(trainer)
    assert metrics["advantage_mean"] == pytest.approx(metrics["rollout/reward_mean"] / 2)


def test_the_file_sets_the_number_of_steps(recipe: Path) -> None:
    path = written(recipe, INTEGRATION, my_trainer=TRAINER)
    assert resolve_experiment(parameter_file=path).hyper_params.training.num_iterations == 2
    assert one_iteration(trainer_of(path))["num_samples"] > 0


@each_root
@pytest.mark.usefixtures("import_root")
def test_a_remote_trainer_and_its_file_run(recipe: Path) -> None:
    task = REMOTE_TASK.replace('"tinker"', '"self-hosted"')
    trainer = trainer_of(written(recipe, task, my_remote_trainer=REMOTE))
    assert isinstance(trainer, RemoteApiTrainer)
    assert trainer.training.lr == 2e-6
    assert trainer.parameters.policy_loss.loss == "importance_sampling"
    metrics = one_iteration(trainer)
    # The guide compares the runs of a single number: each with those of the other problems.
    assert metrics["custom/advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["rollout/dropped_fraction"] < 1.0
    assert metrics["num_samples"] > 0


def test_a_remote_trainer_learns_through_tinker_by_its_file(
    recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("tinker")
    from tests.serve.running import training_server

    with training_server(["tinker"]) as server:
        file = REMOTE_TASK.replace("http://tinker-service:8000", server.url)
        assert 'backend: "tinker"' in file
        trainer = trainer_of(written(recipe, file, my_remote_trainer=REMOTE))
        metrics = one_iteration(trainer)
        trainer.service.close()
    assert "the policy has task.policy.language_model.lora={'rank': 32" in caplog.text
    assert metrics["num_samples"] > 0
    assert metrics["rollout/dropped_fraction"] < 1.0


def test_a_trainer_that_is_in_neither_place_is_reported_with_both(recipe: Path) -> None:
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(parameter_file=written(recipe, TASK))
    name = "recipe/my_task/my_trainer.py"
    assert str(recipe / name) in str(caught.value)
    assert str(Path.cwd() / name) in str(caught.value)


def trainer_with_algorithm(recipe: Path, algorithm: str) -> Any:
    file = TASK.replace("MyCustomTrainer", "MyTrainer").replace("my_param", "gae_lambda")
    file = file.replace("use_custom_advantage: true", "discount_factor: 0.9")
    trainer = f"import torch\n{USES_ALGORITHM}"
    return trainer_of(written(recipe, file, my_algorithm=algorithm, my_trainer=trainer))


@each_root
@pytest.mark.usefixtures("import_root")
def test_an_algorithm_module_is_imported_from_beside_the_trainer(recipe: Path) -> None:
    left_open = "advantages = []  # Computed advantages"
    done = ALGORITHM.replace(left_open, "advantages = [r * discount_factor for r in rewards]")
    assert done != ALGORITHM
    metrics = one_iteration(trainer_with_algorithm(recipe, done))
    assert metrics["advantage_mean"] == pytest.approx(0.9 * metrics["rollout/reward_mean"])


@each_root
@pytest.mark.usefixtures("import_root")
def test_advantages_that_an_algorithm_leaves_open_are_reported(recipe: Path) -> None:
    trainer = trainer_with_algorithm(recipe, ALGORITHM)
    with pytest.raises(ConfigurationError, match=r"\['advantages'\] has the shape \[0\]"):
        one_iteration(trainer)


@each_root
@pytest.mark.usefixtures("import_root")
def test_the_penalty_in_the_reward_is_subtracted_token_by_token() -> None:
    batch = batch_of_two()
    batch.values["ref_log_probs"] = batch.values["logprobs"] - 0.5
    batch.values["token_level_scores"] = torch.zeros(2, 3)
    result = with_methods(KL)._apply_kl_penalty(batch, beta=0.1)
    torch.testing.assert_close(result.values["token_level_scores"], torch.full((2, 3), -0.05))


class Shaped(SelfHostedGrpoTrainer):
    """Rewards of tokens by a custom function, as wide as NexRL's responses."""

    def _reward_fn(self, batch: Batch) -> torch.Tensor:
        responses = batch.values["responses"]
        scores = torch.zeros_like(responses, dtype=torch.float32)
        scores[:, 0] = -batch.values["reward"]
        return scores


class Scored(SelfHostedGrpoTrainer):
    """Scores of tokens that are set before the advantages are computed."""

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        batch.values["token_level_scores"] = -self._reward_fn(batch)
        return super()._prepare_batch(batch)


class Penalised(SelfHostedGrpoTrainer):
    """The guide's penalty on the scores of tokens; the prompt's part never counts."""

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        batch.values["token_level_scores"] = self._reward_fn(batch)
        batch.values["ref_log_probs"] = torch.tensor([[9.0, 3.0, 3.0], [9.0, -2.0, 0.0]])
        batch = with_methods(KL)._apply_kl_penalty(batch, beta=-0.2)
        return self._compute_advantage(batch), {}


class Rewarded(SelfHostedGrpoTrainer):
    """Rewards of tokens beside their scores; the rewards count."""

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        batch.values["token_level_rewards"] = -self._reward_fn(batch)
        return super()._prepare_batch(batch)


@pytest.mark.parametrize("trainer", [Shaped, Scored, Penalised, Rewarded])
def test_advantages_are_of_rewards_as_a_subclass_shapes_them(
    trainer: type[SelfHostedGrpoTrainer],
) -> None:
    plain, _ = SelfHostedGrpoTrainer({})._prepare_batch(batch_of_two())
    assert plain.values["advantages"].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)
    shaped, _ = trainer({})._prepare_batch(batch_of_two())
    assert shaped.values["advantages"].tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-3)


@pytest.mark.parametrize("scores", [[1.0, 2.0], [[1.0], [2.0]], [[0.0, 0.0, float("nan")]] * 2])
def test_rewards_of_tokens_that_are_no_numbers_a_token_are_refused(scores: Any) -> None:
    batch = batch_of_two()
    batch.values["token_level_scores"] = torch.tensor(scores)
    with pytest.raises(ConfigurationError, match="'token_level_scores'"):
        SelfHostedGrpoTrainer({})._prepare_batch(batch)


def test_fields_as_wide_as_responses_are_learnt_at_their_tokens() -> None:
    batch = batch_of_two()
    batch.values["advantages"] = torch.tensor([[0.5, 1.0], [2.0, 0.0]])
    batch.values["old_log_probs"] = torch.tensor([[-0.5, -1.5], [-2.5, 0.0]])
    prepared, _ = check_batch((batch, {}), trainer="Mine", num_rows=2)
    first, second = samples_of(prepared)
    assert first["response"].tolist() == [6, 7]
    assert first["advantages"].tolist() == [0.5, 1.0]
    assert first["old_logprobs"].tolist() == [-0.5, -1.5]
    assert second["advantages"].tolist() == [2.0]


def test_groups_are_those_of_uid_where_a_subclass_sets_them() -> None:
    batch = batch_of_two()
    batch.values["uid"] = [0, 1]
    result, _ = SelfHostedGrpoTrainer({})._prepare_batch(batch)
    assert result.values["advantages"].tolist() == [0.0, 0.0]


def test_a_penalty_that_nothing_would_apply_is_refused() -> None:
    trainer = SelfHostedGrpoTrainer({"algorithm": {"use_kl_in_reward": True}})
    with pytest.raises(ConfigurationError, match="use_kl_in_reward"):
        trainer._prepare_batch(batch_of_two())


def test_a_value_network_computes_values() -> None:
    trainer = with_methods(VALUES)

    class Network:
        def predict(self, ids: torch.Tensor) -> torch.Tensor:
            return ids.float() / 10

    trainer._value_network = Network()
    assert trainer._compute_values(batch_of_two()).shape == (2, 3)


def test_returns_over_several_steps() -> None:
    assert with_methods(NSTEP)._compute_nstep_returns([1.0, 0.0, 2.0], 2, 0.5) == [1.0, 1.0, 2.0]


def test_every_field_that_the_guide_requires_is_kept() -> None:
    names = [line.split()[1] for line in FIELDS.splitlines() if line.startswith("- ")]
    batch, _ = SelfHostedGrpoTrainer({})._prepare_batch(batch_of_two())
    assert len(names) == 6
    assert [name for name in names if name not in batch.values] == []


def test_figures_and_edge_cases() -> None:
    trainer = with_methods(METRICS, EDGES)
    batch = batch_of_two()
    _, metrics = trainer._prepare_batch(batch)
    assert metrics["algorithm/advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["algorithm/advantage_max"] == pytest.approx(0.7071, abs=1e-3)
    assert trainer._compute_advantages(batch.select([0])).tolist() == [0.0]
    assert len(trainer._compute_advantages(batch.select([]))) == 0


@each_root
@pytest.mark.usefixtures("import_root")
def test_utilities_are_imported_and_called_as_written() -> None:
    batch = batch_of_two()
    names: dict[str, Any] = {"batch": batch, "metrics": {}}
    names["trajectories"] = batch.to_trajectories()
    names["self"] = with_methods(VALUES)
    exec(ours(UTILITIES), names)
    assert names["metrics"]["rollout/reward_mean"] == 0.5
    assert len(names["batch"]) == 2


@each_root
@pytest.mark.usefixtures("import_root")
def test_the_unit_test_of_the_guide_passes(recipe: Path) -> None:
    pytest.importorskip("omegaconf")
    (recipe / "my_trainer.py").write_text(ours(TRAINER))
    (recipe / "test_my_trainer.py").write_text(ours(UNIT_TEST))
    module = module_of(load_plugin(recipe / "test_my_trainer.py"))
    module.create_dummy_batch = batch_of_two  # type: ignore[attr-defined]  # left to the reader
    module.test_custom_trainer_prepare_batch()


@each_root
@pytest.mark.usefixtures("import_root")
def test_patterns_of_the_built_in_trainers_work_as_written(
    recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(written(recipe, "trainer: {type: self_hosted_grpo}\n"))
    trainer._collect(0)
    batch = batch_of_two()
    names: dict[str, Any] = {"self": trainer, "Batch": Batch, "batch": batch}
    exec(OF_GRPO.replace(", ...", ""), names)
    assert names["reward_tensor"][0].tolist() == [0.0, 0.0, 1.0]
    assert names["old_log_probs"].shape == (2, 3)
    assert names["batch"].values["advantages"].tolist() == pytest.approx([0.7071, -0.7071], 1e-3)
    names = {"trajectories": batch.to_trajectories(), "metrics": {}}
    names["logger"] = logging.getLogger("nexrl_guide")
    with caplog.at_level(logging.INFO):
        exec(ours(OF_REMOTE_GRPO), names)
    assert names["metrics"]["grpo/num_groups"] == 1.0
    assert "0 of 1 groups" in caplog.text


def test_values_of_the_built_in_trainers_have_their_places(recipe: Path) -> None:
    text = (
        "trainer:\n  type: self_hosted_grpo\n  total_train_steps: 7\n  save_freq: 3\n"
        "  algorithm: {do_old_log_prob_compute: true}\n  train_service: {backend: mock}\n"
        # Empty sections are as if left out.
        "training:\nself_hosted_grpo:\n"
    )
    resolved = resolve_experiment(parameter_file=written(recipe, text))
    assert resolved.hyper_params.training.num_iterations == 7
    assert resolved.settings.checkpoint_period == 3
    assert resolved.hyper_params.get("self_hosted_grpo.policy_loss.rescore") is True
    assert resolved.hyper_params.get("self_hosted_grpo.train_service.backend") == "local"


@pytest.mark.parametrize(
    ("trainer", "more", "paths"),
    [
        (
            "sync_weight_path: x, algorithm: {use_kl_in_reward: true, advantage_start_pct: 0.1}, "
            "train_service: {config: {beta1: 0.9, delta: 0.5}}",
            "",
            "algorithm.use_kl_in_reward algorithm.advantage_start_pct train_service.config.delta",
        ),
        (
            "algorithm: 3, train_service: tinker, save_freqs: 1",
            "",
            "algorithm save_freqs train_service",
        ),
        ("train_service: {config: 3}", "", "train_service.config"),
        (
            "total_train_steps: 7, train_service: {backend: [tinker], "
            "config: {learning_rate: 1.0, grad_clip_norm: 1.0}}",
            "training: 3\n",
            "total_train_steps train_service.config.learning_rate "
            "train_service.config.grad_clip_norm",
        ),
    ],
)
def test_values_without_counterpart_and_invalid_groups_are_reported_all_at_once(
    recipe: Path, trainer: str, more: str, paths: str
) -> None:
    path = written(recipe, f"trainer: {{type: self_hosted_grpo, {trainer}}}\n{more}")
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(parameter_file=path)
    assert {fault.path for fault in caught.value.faults} == {f"trainer.{p}" for p in paths.split()}


def test_a_backend_that_is_no_name_is_a_fault_of_our_field(recipe: Path) -> None:
    text = "trainer: {type: self_hosted_grpo, train_service: {backend: [tinker]}}\n"
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(parameter_file=written(recipe, text))
    paths = [fault.path for fault in caught.value.faults]
    assert "self_hosted_grpo.train_service.backend" in paths
