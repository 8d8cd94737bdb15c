"""Recipes of NexRL become parameters of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nip_astra.nexrl.rollout_worker import BaseEvaluationTarget, EvaluationRunResult, Evaluator

from nip_astra.errors import ConfigurationError, DataError, ParameterError
from nip_astra.nexrl.evaluators import boxed_answer, tagged_answer
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from tests.kit.command_line import plugins_forgotten_after
from tests.kit.documents import ROOT

POLICY = ROOT / "scenarios" / "arithmetic" / "models" / "policy"

COMMON = """
project_name: sums
experiment_name: first
launch_mode: local
multi_model: "false"
logger: {backend: [console, wandb], enable_feishu_logging: false}
environment: {setup_script: "", require_setup_script: false}
resume: {mode: disable, resume_path: ""}
data:
  type: torch
  seed: 7
  data_files: ["${oc.env:SUMS}/first.jsonl", "${oc.env:SUMS}/second.jsonl"]
  batch_size: 4
  keep_batch_order: true
  rollout_repeat_n: 3
  prompt_key: question
  max_response_length: ${rollout_worker.max_response_length}
  tokenizer_path: ""
rollout_worker:
  type: agent
  agent_cls: single_turn_math
  agent: {math: {judge_mode: rule}}
  num_workers: 256
  temperature: 0.5
  max_response_length: 5
trajectory_pool: {type: default, batch_size: 12}
trainer: {total_train_steps: 100, save_freq: 0, algorithm: null}
service: null
weight: {sync_mode: sync, staleness_threshold: 0, validate_freq: "${validate.eval.validate_freq}"}
validate:
  validate_before_train: false
  data: {type: mock, seed: "${data.seed}", data_files: ["${oc.env:UNSET}/test.jsonl"]}
  eval: {type: default, validate_freq: 2}
runtime_monitor: {health_check: {enabled: true}}
"""
SELF_HOSTED = """
defaults: [common, _self_]
experiment_name: second
trainer:
  type: self_hosted_grpo
  total_train_steps: 2
  checkpoint_path: "${oc.env:UNSET}/ckpt"
  sync_weight_path: "${oc.env:UNSET}/sync"
  remove_previous_ckpt: true
  algorithm:
    type: grpo
    do_old_log_prob_compute: true
    use_kl_in_reward: false
    kl_penalty: kl
    kl_ctrl: {type: fixed, kl_coef: 0.001}
service:
  inference_service:
    base_url: "${oc.env:UNSET}"
    model: a-name-of-the-service
    model_path: "${oc.env:MODELS}"
    max_tokens: ${data.max_response_length}
  train_service:
    main_actor:
      identifier: default
      role: actor
      backend: direct-zmq
      url: "http://${oc.env:UNSET}:8000"
      resource: {world_size: 1, gpus_per_pod: 8}
      actor:
        model: {path: "${service.inference_service.model_path}", use_remove_padding: true}
        ppo_mini_batch_size: 6
        ppo_micro_batch_size: 2
        grad_clip: 0.5
        clip_ratio: 0.2
        clip_ratio_low: 0.1
        clip_ratio_high: 0.3
        clip_ratio_c: 3.0
        loss_agg_mode: seq-mean-token-mean
        loss_func_type: NX_20250515
        entropy_coeff: 1.0e-4
        use_kl_loss: true
        kl_loss_type: low_var_kl
        kl_loss_coef: 0.01
        ppo_epochs: 2
        optim: {lr: 2.0e-6, lr_warmup_steps_ratio: 0.0, warmup_style: cosine}
        fsdp_config: {fsdp_size: -1}
"""
TINKER = """
defaults: [common]
trainer: {type: remote_api_grpo}
service:
  inference_service: {model: "${oc.env:MODELS}", backend: tinker}
  tinker_service: {base_url: "http://127.0.0.1:1", lora_rank: 4, api_key: "${oc.env:UNSET}"}
  train_service:
    main_actor:
      backend: tinker
      config: {loss_fn: ppo, learning_rate: 1.0e-4, beta1: 0.9, beta2: 0.95, eps: 1.0e-8}
"""
DISTILLATION = """
defaults: [common]
trainer:
  type: self_hosted_opd
  use_distillation_clipping: false
  train_token_end_pct: 1.0
  algorithm:
    distillation_coeff: 0.5
    distillation_epochs: 2
    train_token_start_pct: 0.0
    train_token_end_pct: ${trainer.train_token_end_pct}
service:
  inference_service: {model: "${oc.env:MODELS}"}
  train_service:
    student: {role: actor, backend: http, url: "http://x", actor: {clip_ratio_low: 0.2}}
    teacher: {role: teacher, backend: http, actor: {model: {path: "${oc.env:MODELS}"}}}
"""


def sums(count: int, start: int) -> str:
    rows: list[dict[str, Any]] = [
        {"question": f"{number}+1=", "reward_model": {"ground_truth": str(number + 1)}}
        for number in range(start, start + count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with recipes and data, and the environment that they refer to."""
    monkeypatch.setenv("SUMS", str(tmp_path))
    monkeypatch.setenv("MODELS", str(POLICY))
    monkeypatch.delenv("UNSET", raising=False)
    (tmp_path / "first.jsonl").write_text(sums(20, 0))
    (tmp_path / "second.jsonl").write_text(sums(20, 20))
    for name, text in {
        "common": COMMON,
        "self_hosted": SELF_HOSTED,
        "tinker": TINKER,
        "distillation": DISTILLATION,
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def values_of(file: Path, *overrides: str) -> Any:
    return resolve_experiment(parameter_file=file, overrides=list(overrides))


def test_values_of_a_recipe_have_their_places(
    recipes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolved = values_of(recipes / "self_hosted.yaml")
    get = resolved.hyper_params.get
    training = resolved.hyper_params.training
    assert (resolved.hyper_params.trainer, resolved.hyper_params.seed) == ("self_hosted_grpo", 7)
    assert (training.num_iterations, training.eval_period, training.num_epochs) == (2, 2, 2)
    assert (training.lr, training.max_grad_norm, training.lr_schedule) == (2e-6, 0.5, "cosine")
    assert (training.num_episodes_per_experience, training.minibatch_size) == (4, 6)
    assert get("self_hosted_grpo.group_size") == 3
    loss = get("self_hosted_grpo.policy_loss")
    assert (loss.loss, loss.clip_low, loss.clip_high) == ("ppo", 0.1, 0.3)
    assert (loss.reduction, loss.rescore) == ("sequence", True)
    assert (loss.kl.weight, loss.kl.value) == (0.01, "k3")
    assert get("self_hosted_grpo.train_service.backend") == "local"
    assert get("task.policy.temperature") == 0.5
    assert get("task.policy.max_new_tokens") == 5
    assert get("task.policy.language_model.model") == str(POLICY)
    assert get("task.task.train") == [str(recipes / "first.jsonl"), str(recipes / "second.jsonl")]
    assert get("task.task.column") == "question"
    settings = resolved.settings
    assert (settings.wandb, settings.wandb_project, settings.run_id) == ("online", "sums", "second")
    assert (settings.checkpoint_period, settings.num_checkpoints_kept) == (0, 1)
    assert settings.runs_dir == "runs"
    warnings = caplog.text
    assert "service.train_service.main_actor.actor.entropy_coeff left out" in warnings
    assert "UNSET" not in warnings


def test_a_recipe_runs_dry(recipes: Path) -> None:
    resolved = values_of(recipes / "self_hosted.yaml", "task.evaluation.num_problems=2")
    trainer = prepare_experiment(resolved, progress=False).trainer
    assert trainer.task.num_problems("train") + trainer.task.num_problems("test") == 40
    assert trainer.dry_run()["num_parameters"] > 0


def test_adapters_are_those_of_the_service(recipes: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolved = values_of(recipes / "tinker.yaml")
    get = resolved.hyper_params.get
    assert get("remote_api_grpo.train_service.backend") == "tinker"
    assert get("remote_api_grpo.train_service.base_url") == "http://127.0.0.1:1"
    assert get("remote_api_grpo.policy_loss.loss") == "ppo"
    assert get("task.policy.language_model.lora.rank") == 4
    assert get("task.policy.min_new_tokens") == 0
    assert "beta1" in caplog.text
    local = values_of(recipes / "tinker.yaml", "remote_api_grpo.train_service.backend=local")
    assert local.hyper_params.get("remote_api_grpo.train_service.backend") == "local"


def test_a_teacher_is_the_service_of_its_role(recipes: Path) -> None:
    get = values_of(recipes / "distillation.yaml", "self_hosted_opd.group_size=1").hyper_params.get
    assert get("self_hosted_opd.distillation.teacher.model") == str(POLICY)
    assert get("self_hosted_opd.distillation.weight") == 0.5
    assert get("self_hosted_opd.policy_loss.loss") == "importance_sampling"
    assert get("training.num_epochs") == 2


def test_the_teachers_of_a_trainer_are_one(recipes: Path) -> None:
    text = TINKER.replace(
        "{type: remote_api_grpo}", "{type: remote_api_opd, teachers: [{base_model: big}]}"
    ).replace("loss_fn: ppo", "kl_penalty_coef: 0.5, kl_discount_factor: 0.9")
    (recipes / "one.yaml").write_text(text)
    get = values_of(recipes / "one.yaml").hyper_params.get
    assert get("remote_api_opd.distillation.teacher.model") == "big"
    assert get("remote_api_opd.distillation.weight") == 0.5
    assert get("remote_api_opd.distillation.discount") == 0.9
    two = text.replace("[{base_model: big}]", "[{base_model: big}, {base_model: small}]")
    (recipes / "two.yaml").write_text(two)
    with pytest.raises(ParameterError) as caught:
        values_of(recipes / "two.yaml")
    assert any("distillation.teacher" in fault.path for fault in caught.value.faults)


def test_a_variable_that_a_used_value_refers_to_is_named(
    recipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODELS")
    with pytest.raises(ParameterError) as caught:
        values_of(recipes / "self_hosted.yaml")
    assert "MODELS" in str(caught.value)
    paths = {fault.path for fault in caught.value.faults}
    assert "service.train_service.main_actor.actor.model.path" in paths


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("weight: {sync_mode: fully-async}", "weight.sync_mode"),
        ("multi_model: true", "multi_model"),
        ("trainer: {advantage_end_pct: 0.9}", "trainer.advantage_end_pct"),
        ("trainer: {algorithm: {use_kl_in_reward: true}}", "trainer.algorithm.use_kl_in_reward"),
        ("trainer: {ngroups: 2}", "trainer.ngroups"),
        ("service: {train_services: {x: 2}}", "service.train_services.x"),
    ],
)
def test_a_value_that_changes_training_is_refused(recipes: Path, text: str, path: str) -> None:
    (recipes / "changed.yaml").write_text(f"defaults: [self_hosted]\n{text}\n")
    with pytest.raises(ParameterError) as caught:
        values_of(recipes / "changed.yaml")
    assert [fault.path for fault in caught.value.faults] == [path]


def test_a_task_of_the_file_comes_first(recipes: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "defaults: [self_hosted]\nscenario: arithmetic\n"
    (recipes / "own.yaml").write_text(text)
    resolved = values_of(recipes / "own.yaml")
    assert resolved.hyper_params.scenario == "arithmetic"
    assert resolved.hyper_params.get("task.task.levels") == [1, 2, 3]
    assert "data.data_files" in caplog.text


def test_supervised_data_are_learned_without_sampling(recipes: Path) -> None:
    text = TINKER.replace("remote_api_grpo", "remote_api_cross_entropy").replace(
        "loss_fn: ppo", "loss_fn: cross_entropy"
    )
    (recipes / "fine.yaml").write_text(f"{text}rollout_worker: {{type: pig_latin}}\n")
    get = values_of(recipes / "fine.yaml").hyper_params.get
    assert (get("task.task.reward"), get("task.task.answer_column")) == ("exact", "output")


# ---- Hydra's defaults


@pytest.mark.parametrize(
    ("defaults", "lr"),
    [("[base, _self_]", 0.1), ("[base]", 0.1), ("[_self_, base]", 0.2), ("[_self_]", 0.1)],
)
def test_defaults_are_merged_in_order(tmp_path: Path, defaults: str, lr: float) -> None:
    (tmp_path / "base.yaml").write_text("trainer: ast_dpo\ntraining: {lr: 0.2, num_epochs: 3}\n")
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: {defaults}\ntrainer: ast_dpo\ntraining: {{lr: 0.1}}\n")
    training = values_of(file).hyper_params.training
    assert training.lr == lr
    assert training.num_epochs == (3 if "base" in defaults else 1)


@pytest.mark.parametrize("defaults", ["base", "[{db: mysql}]", "[mine]", "[missing]"])
def test_other_defaults_are_refused_with_the_file(tmp_path: Path, defaults: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: {defaults}\ntrainer: ast_dpo\n")
    with pytest.raises(ConfigurationError, match=r"mine\.yaml"):
        values_of(file)


# ---- rewards


class Parity(Evaluator):
    """Rewards even answers to questions of the data."""

    def evaluate(self, data: Any, evaluation_target: BaseEvaluationTarget) -> EvaluationRunResult:
        assert str(data["prompt"]).endswith("+1=")
        assert data["reward_model"]["ground_truth"]
        is_even = evaluation_target.final_answer.strip()[-1:] in set("02468")
        return EvaluationRunResult(float(is_even), metrics={"even": float(is_even)})


def test_an_evaluator_of_the_recipe_gives_the_reward(recipes: Path) -> None:
    (recipes / "mine.py").write_text(f"from {__name__} import Parity\n")
    worker = "rollout_worker: {evaluator_module_path: 'mine.py:Parity'}\n"
    (recipes / "own.yaml").write_text(f"defaults: [self_hosted]\n{worker}")
    with plugins_forgotten_after():
        resolved = values_of(recipes / "own.yaml", "task.evaluation.num_problems=2")
        trainer = prepare_experiment(resolved, progress=False).trainer
        trainer._collect(0)
    metrics = trainer.state.iteration_metrics
    assert 0 <= metrics["rollout/reward_mean"] <= 1
    assert any("even" in name for name in metrics)


def test_an_answer_in_tags_is_compared_as_text() -> None:
    completions = ["so <answer> 4 </answer>", "4", [{"role": "assistant", "content": "<answer>4"}]]
    assert tagged_answer(completions, ground_truth=["4", "4", "4"]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "right", "reward"),
    [
        (r"first \boxed{1}, then \boxed{4}", "4", 1.0),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{\left( 1, 2 \right)}", r"\boxed{(1,2)}", 1.0),
        (r"\boxed{x^{2}}", "x^{2}", 1.0),
        (r"\boxed{4\text{ cm}}", "4 cm", 1.0),
        (r"\boxed{5}", "4", 0.0),
        (r"\boxed{4", "4", 0.0),
        ("4", "4", 0.0),
    ],
)
def test_a_boxed_answer_is_compared_as_text_and_number(
    completion: str, right: str, reward: float
) -> None:
    assert boxed_answer([completion], reward_model=[{"ground_truth": right}]) == [reward]


def test_data_without_an_answer_are_refused() -> None:
    with pytest.raises(DataError, match="ground_truth"):
        boxed_answer(["4"])
