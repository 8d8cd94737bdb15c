"""Trainers on trajectories learn, keep groups together, and refuse unsupported options."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.errors import (
    ConfigurationError,
    ModelLoadError,
    ParameterError,
    UnknownNameError,
)
from nip_astra.language_models.services.training import TRAINING_SERVICES, TrainingServiceRequest
from nip_astra.plugins import load_plugin
from nip_astra.rl_objectives.kl import kl_estimate
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.trainers.language_model_base import Experience
from tests.kit.experiments import iterations_of, task_trainer
from tests.kit.learning import Learning

LEARN = (
    "training.num_episodes_per_experience=16",
    "training.num_iterations=30",
    "training.minibatch_size=128",
    "training.lr=1e-3",
    "task.task.levels=[1]",
)


@pytest.mark.parametrize(
    ("name", "count", "metric", "best", "threshold"),
    [
        # A part of the way from the first five iterations to the best possible value.
        ("self_hosted_grpo", 30, "rollout/reward_mean", 1.0, 0.12),
        ("remote_api_grpo", 30, "rollout/reward_mean", 1.0, 0.12),
        ("self_hosted_opd", 20, "opd/reverse_kl", 0.0, 0.25),
        pytest.param(*("remote_api_opd", 20, "opd/reverse_kl", 0.0, 0.25), marks=pytest.mark.slow),
        ("remote_api_cross_entropy", 30, "loss", 0.0, 0.2),
    ],
)
def test_every_trainer_learns(
    learning: Learning, name: str, count: int, metric: str, best: float, threshold: float
) -> None:
    trainer = task_trainer(name, *LEARN, f"seed={learning.seed}")
    values = [row[metric] for row in iterations_of(trainer, count)]
    first, last = sum(values[:5]) / 5, sum(values[-5:]) / 5
    learning.check((last - first) / (best - first), threshold=threshold, best=1.0)


def test_dev_evaluations_report_pass_at_k_with_intervals() -> None:
    sizes = [f"task.evaluation.{one}" for one in ("num_dev_problems=6", "num_dev_runs=4")]
    trainer = task_trainer("self_hosted_grpo", *sizes)
    with torch.no_grad():
        figures = trainer.evaluate_dev()
    assert figures["pass_at_1"] <= figures["pass_at_2"] <= figures["pass_at_4"]
    assert figures["pass_at_4_low"] <= figures["pass_at_4"] <= figures["pass_at_4_high"]
    assert figures["pass_at_1"] == pytest.approx(figures["accuracy"])


def test_results_have_the_best_dev_evaluation_and_whether_training_stopped_early() -> None:
    # At this rate every dev evaluation after the first is a tie.
    values = ("num_iterations=9", "eval_period=1", "early_stopping_patience=1", "lr=1e-12")
    values += ("dev_metric=accuracy",)
    trainer = task_trainer("self_hosted_grpo", *(f"training.{value}" for value in values))
    trainer.train()
    found, best = trainer.results["training"], trainer.state.best_dev_value
    assert (found["num_iterations"], found["stopped_early"]) == (2, True)
    assert found["best_dev"] == {"metric": "accuracy", "value": best}
    assert any("run directory" in warning for warning in trainer.results["warnings"])


def test_solutions_of_a_task_of_environments_are_learnt_whole() -> None:
    trainer = task_trainer("remote_api_cross_entropy", scenario="pig_latin")
    with torch.no_grad():
        experience = trainer.collect(0)
    environment = trainer.task.environment("train", 0)
    sample = experience.samples[0]
    response = trainer.agent.language_model.tokenizer.decode(sample["response"])
    assert response.startswith(environment.solution)
    assert sample["is_trained"].all()


AHEAD = ("training.num_iterations=5", "task.task.levels=[1]", "training.lr=1e-3")


@pytest.mark.parametrize("name", ["self_hosted_grpo", "remote_api_grpo"])
@pytest.mark.parametrize("staleness", [1, 2])
def test_weights_that_sample_are_behind_by_the_set_number_of_iterations(
    name: str, staleness: int
) -> None:
    trainer = task_trainer(name, *AHEAD, f"{name}.max_staleness={staleness}")
    logged, samples, versions = [], [], [trainer.policy.weight_copy()]
    for iteration in range(5):
        trainer._collect(iteration)
        logged.append(trainer.state.iteration_metrics)
        samples.append(trainer.state.samples[0])
        trainer._update(iteration)
        trainer.state.end()
        versions.append(trainer.policy.weight_copy())
    expected = [float(min(i, staleness)) for i in range(5)]
    assert [metrics["rollout/staleness"] for metrics in logged] == expected
    gaps = [metrics["mismatch/kl"] for metrics in logged]
    assert gaps[0] < 1e-6 < min(gaps[1:])
    assert trainer.state.num_optimizer_steps > 0
    is_corrected = name == "self_hosted_grpo"
    assert [("correction_weights" in s) for s in samples] == [False] + 4 * [is_corrected]
    # The sampling weights of the last rollout are that many iterations old.
    trainer._sampler.take_weights(versions[4 - staleness])
    batch = trainer.collate_fn([samples[-1]])
    assert torch.equal(batch["old_logprobs"], batch["logprobs"]) is not is_corrected
    given = (batch[n] for n in ("context", "context_mask", "response", "response_mask"))
    scored = trainer._sampler.logprobs(*given)[batch["trained_mask"]]
    torch.testing.assert_close(
        scored.detach(), batch["logprobs"][batch["trained_mask"]], atol=1e-4, rtol=0
    )


def second_batch_of_older_samples(name: str, *more: str) -> tuple[Any, TensorDict, dict[str, Any]]:
    trainer = task_trainer(name, *AHEAD, f"{name}.max_staleness=1", *more)
    for iteration in range(2):
        trainer._collect(iteration)
        batch, metrics = trainer.collate_fn(trainer.state.samples), trainer.state.iteration_metrics
        if iteration == 0:
            trainer._update(iteration)
            trainer.state.end()
    return trainer, batch, metrics


def test_distillation_of_older_samples_moves_the_learning_student_to_the_teacher() -> None:
    kl = "self_hosted_opd.policy_loss.kl={weight: 0.1, target: 0.01}"
    _, batch, metrics = second_batch_of_older_samples("self_hosted_opd", kl)
    mask_BT = batch["trained_mask"]
    assert not torch.equal(batch["old_logprobs"], batch["logprobs"])
    gap_BT = batch["old_logprobs"] - batch["teacher_logprobs"]
    torch.testing.assert_close(batch["advantages"][mask_BT], -gap_BT[mask_BT])
    kl_BT = kl_estimate(batch["old_logprobs"], batch["reference_logprobs"], "k3", mask_BT=mask_BT)
    assert metrics["kl/reference"] == pytest.approx(float(kl_BT[mask_BT].mean()), rel=1e-4)


def test_remote_distillation_of_older_samples_moves_the_learning_student_too() -> None:
    trainer, batch, _ = second_batch_of_older_samples("remote_api_opd")
    # Ratios are to the weights that sampled.
    assert torch.equal(batch["old_logprobs"], batch["logprobs"])
    given = [batch[n] for n in ("context", "context_mask", "response", "response_mask")]
    mask_BT = batch["trained_mask"]
    gap_BT = trainer.policy.logprobs(*given) - trainer.teacher.logprobs(*given)
    torch.testing.assert_close(batch["advantages"][mask_BT], -gap_BT[mask_BT], atol=1e-4, rtol=0)


def prepared(name: str, *overrides: str) -> tuple[Any, Any]:
    trainer = task_trainer(name, *overrides)
    with torch.no_grad():
        return trainer, trainer.collect(0)


def test_the_policy_that_sampled_has_ratio_one_and_no_divergence() -> None:
    trainer, experience = prepared("self_hosted_grpo", "self_hosted_grpo.policy_loss.kl.weight=0.1")
    batch = trainer.collate_fn(experience.samples)
    trainer._write_step_totals([batch])
    metrics = trainer.loss(batch).metrics
    assert metrics["ratio_mean"].item() == pytest.approx(1.0, abs=1e-5)
    assert metrics["approx_kl"].item() < 1e-8
    assert metrics["kl"].item() == pytest.approx(0.0, abs=1e-6)


def test_uninformative_problems_are_replaced_within_the_stated_cost() -> None:
    pairs = ("self_hosted_grpo", "self_hosted_grpo.group_size=2")
    _, plain = prepared(*pairs)
    _, resampled = prepared(*pairs, "self_hosted_grpo.max_resampling_rounds=3")
    assert plain.metrics["rollout/zero_variance_fraction"] > 0
    assert plain.metrics["rollout/num_problems_sampled"] == 8
    assert 8 < resampled.metrics["rollout/num_problems_sampled"] <= 8 * 4
    assert resampled.metrics["grpo/zero_variance_fraction"] == 0
    assert len(resampled.samples) <= 8 * 2


def test_recomputed_scores_agree_with_the_sampler() -> None:
    _, experience = prepared("self_hosted_grpo", "self_hosted_grpo.policy_loss.correction=truncate")
    assert experience.metrics["mismatch/largest_gap"] < 1e-4
    assert experience.metrics["mismatch/effective_sample_size"] == pytest.approx(1.0, abs=1e-5)
    for sample in experience.samples:
        weights_T = sample["correction_weights"][sample["is_trained"]]
        torch.testing.assert_close(weights_T, torch.ones_like(weights_T), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["self_hosted_grpo", "remote_api_grpo"])
def test_truncated_completions_leave_the_loss_and_stay_in_their_group(name: str) -> None:
    trainer = task_trainer(name, f"{name}.mask_truncated_completions=true")
    rewards, cuts = (1.0, 0.0, 0.0), (0, 1, 0)
    trajectories = [
        Trajectory([1, 2], [0, 1], logprobs=[0, -1], reward=reward, group_id=0, is_cut=is_cut)
        for reward, is_cut in zip(rewards, cuts, strict=True)
    ]
    samples, _ = trainer.prepare(trajectories)
    # Mean and deviation of all three; the second is not learnt from.
    std = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    batch = trainer.collate_fn(samples)
    is_learnt = batch["trained_mask"].any(dim=1)
    result = batch["advantages"][is_learnt][:, -1].tolist()
    assert result == pytest.approx([2 / 3 / std, -1 / 3 / std], abs=1e-4)
    # A mean over trajectories counts all of them, as in TRL; a sum over tokens has no divisor.
    assert len(samples) == (3 if name == "self_hosted_grpo" else 2)


def test_only_truncated_completions_are_named_as_the_reason_for_learning_nothing() -> None:
    trainer = task_trainer("self_hosted_grpo", "self_hosted_grpo.mask_truncated_completions=true")
    trajectories = [
        Trajectory([1, 2], [0, 1], logprobs=[0, -1], reward=reward, group_id=0, is_cut=1)
        for reward in (1.0, 0.0)
    ]
    samples, _ = trainer.prepare(trajectories)
    reason = trainer.why_nothing_is_learnt(Experience(samples))
    assert "mask_truncated_completions" in reason
    trainer.state.begin(samples, {})
    before = [weight.clone() for weight in trainer.learned]
    trainer._update(0)
    # Their gradient is 0, and so is the step.
    assert all(map(torch.equal, before, trainer.learned))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("loss", ["gspo", "rloo", "luspo", "vespo"])
def test_ratios_of_samples_that_no_step_followed_are_exactly_one(loss: str, dtype: str) -> None:
    trainer = task_trainer(
        "self_hosted_grpo",
        f"task.policy.language_model.dtype={dtype}",
        f"self_hosted_grpo.policy_loss.loss={loss}",
        "training.minibatch_size=8",
        "training.gradient_accumulation_steps=64",
    )
    (metrics,) = iterations_of(trainer, 1)
    assert metrics["num_steps"] == 1
    assert metrics["ratio_mean"] == 1.0
    assert metrics["approx_kl"] == 0.0
    assert metrics.get("ratio_outside_clip", 0.0) == 0.0
    assert "mismatch/kl" not in metrics, "no second pass"


@pytest.mark.parametrize(
    ("dtype", "rescore", "is_rescored"),
    [
        ("bfloat16", "null", True),
        ("bfloat16", "false", False),
        # Sampling and scoring differ by rounding of float32 only.
        ("float32", "null", False),
        ("float32", "true", True),
    ],
)
def test_later_steps_compare_with_the_trainer_before_the_first(
    dtype: str, rescore: str, is_rescored: bool
) -> None:
    trainer = task_trainer(
        "self_hosted_grpo",
        f"task.policy.language_model.dtype={dtype}",
        f"self_hosted_grpo.policy_loss.rescore={rescore}",
        "training.minibatch_size=16",
        "training.lr=1e-3",
    )
    trainer._collect(0)
    assert ("mismatch/kl" in trainer.state.iteration_metrics) is is_rescored
    batch = trainer.collate_fn(trainer.state.samples)
    rows = (batch[name] for name in ("context", "context_mask", "response", "response_mask"))
    mask = batch["trained_mask"]
    scored = trainer.service.compute_logprobs(*rows)[mask]
    old, sampled = batch["old_logprobs"][mask], batch["logprobs"][mask]
    if is_rescored or dtype == "float32":
        # Rounding depends on the rows of a pass.
        tolerance = 1e-4 if dtype == "float32" else 0.1
        torch.testing.assert_close(old, scored, atol=tolerance, rtol=0)
    else:
        assert torch.equal(old, sampled)
    trainer._update(0)
    metrics = trainer.state.end()
    assert metrics["num_steps"] > 1
    assert metrics["ratio_mean"] != 1.0


def test_log_probabilities_given_by_a_hook_are_compared_with_in_every_step() -> None:
    trainer = task_trainer("self_hosted_grpo", "training.minibatch_size=256")
    prepare = trainer._prepare_batch

    def prepare_with_older(batch: Batch) -> Any:
        batch, metrics = prepare(batch)
        batch.values["old_logprobs"] = batch.values["logprobs"] - 0.1
        return batch, metrics

    trainer._prepare_batch = prepare_with_older
    (metrics,) = iterations_of(trainer, 1)
    assert metrics["ratio_mean"] == pytest.approx(math.exp(0.1), rel=1e-4)


def test_tempered_log_probabilities_are_those_of_logits_over_the_temperature() -> None:
    tempered = "self_hosted_grpo.policy_loss.logprobs=tempered"
    trainer = task_trainer("self_hosted_grpo", "task.policy.temperature=0.5", tempered)
    with torch.no_grad():
        batch = trainer.collate_fn(trainer.collect(0).samples)
        rows = [batch[name] for name in ("context", "context_mask", "response", "response_mask")]
        (logprobs,) = trainer.policy_logprobs(batch, "response", temperature=0.5)
        (plain,) = trainer.policy_logprobs(batch, "response")
        ids = torch.cat([rows[0], rows[2]], dim=1)
        attention = torch.cat([rows[1], rows[3]], dim=1)
        positions = (attention.cumsum(dim=1) - 1).clamp(min=0)
        module = trainer.policy.module
        logits = module(ids, attention_mask=attention, position_ids=positions).logits
    start = rows[0].shape[1]
    expected = (logits[:, start - 1 : -1] / 0.5).log_softmax(dim=-1)
    expected = expected.gather(2, rows[2].unsqueeze(2)).squeeze(2)
    mask = batch["trained_mask"]
    torch.testing.assert_close(logprobs[mask], expected[mask], atol=1e-4, rtol=0)
    assert not torch.allclose(logprobs[mask], plain[mask], atol=1e-2)


@pytest.mark.parametrize(
    "option",
    [
        "self_hosted_grpo.policy_loss.correction=truncate",
        "self_hosted_grpo.max_staleness=1",
        "task.policy.temperature=0",
    ],
)
def test_tempered_log_probabilities_are_refused_where_they_cannot_be(option: str) -> None:
    tempered = "self_hosted_grpo.policy_loss.logprobs=tempered"
    with pytest.raises(ConfigurationError):
        task_trainer("self_hosted_grpo", "task.policy.temperature=0.5", tempered, option)


@pytest.mark.parametrize("name", ["self_hosted_grpo", "remote_api_grpo"])
def test_the_penalty_on_overlong_answers_is_taken_off_rewards(name: str) -> None:
    trainer = task_trainer(name, f"{name}.overlong_margin=2")
    longest = trainer.agent.sampling.max_new_tokens
    lengths = [longest - 2, longest - 1, longest, 1]
    trajectories = [
        Trajectory([1] + [2] * length, [0] + [1] * length, reward=1.0, group_id=0)
        for length in lengths
    ]
    trajectories[3].reward = None
    trainer._penalise_length(trajectories, 2)
    assert [one.reward for one in trajectories] == [1.0, 0.5, 0.0, None]
    plain, penalised = (
        task_trainer(name, f"{name}.overlong_margin={margin}").collect(0).metrics
        for margin in (0, longest)
    )
    assert penalised["rollout/reward_mean"] < plain["rollout/reward_mean"]


def test_the_weight_of_the_divergence_follows_its_target() -> None:
    options = [f"self_hosted_grpo.policy_loss.kl.{o}" for o in ("weight=0.5", "target=0.1")]
    options.append("self_hosted_grpo.policy_loss.kl.horizon=1")
    trainer, other = (task_trainer("self_hosted_grpo", *options) for _ in range(2))
    # Initially policy and reference are equal: the weight falls by the maximum, a fifth.
    metrics = trainer.collect(0).metrics
    assert metrics["kl/reference"] == pytest.approx(0.0, abs=1e-5)
    assert (metrics["kl/weight"], trainer.kl.weight) == (0.5, pytest.approx(0.4))
    other.load_trainer_state(trainer.trainer_state())
    assert other.kl.weight == trainer.kl.weight


def test_a_batch_of_several_turns_learns_only_the_output_of_the_policy() -> None:
    trainer = task_trainer("self_hosted_grpo", scenario="guess_number")
    with torch.no_grad():
        samples = trainer.collect(0).samples
    assert any(not one["is_trained"].all() for one in samples)
    batch = trainer.collate_fn(samples)
    trainer._write_step_totals([batch])
    batch["advantages"] = torch.where(batch["trained_mask"], batch["advantages"], torch.nan)
    assert torch.isfinite(trainer.loss(batch).loss)


SEED, DEV = "seed=0", "training={eval_period: 1, dev_metric: failure_rate}"
HTTP = "self_hosted_grpo.train_service={backend: http, base_url: 'http://127.0.0.1:1'}"
GSPO, CORRECTION = "policy_loss.loss=gspo", "{correction: truncate}"
CORRECTED = f"self_hosted_grpo.policy_loss={CORRECTION}"
TOKEN_WEIGHTS = (ConfigurationError, "gspo.*correction_level=sequence")
OTHER_TEACHER = "distillation.teacher={_type: huggingface, model: MODEL}"


@pytest.mark.parametrize(
    ("name", "option", "more", "error", "fact"),
    [
        ("self_hosted_opd", OTHER_TEACHER, SEED, ModelLoadError, "tokenizer"),
        ("self_hosted_opd", "distillation.teacher=null", SEED, ConfigurationError, "teacher"),
        ("self_hosted_grpo", "max_staleness=1", HTTP, ParameterError, "max_staleness 1 .*http"),
        ("remote_api_grpo", "train_service.backend=htp", SEED, ParameterError, "htp.*'http'"),
        (*("self_hosted_grpo", GSPO, "self_hosted_grpo.max_staleness=1"), *TOKEN_WEIGHTS),
        (
            *("self_hosted_grpo", "group_size=2", DEV),
            UnknownNameError,
            "failure_rate.* mean_reward",
        ),
        (*("self_hosted_grpo", GSPO, CORRECTED), *TOKEN_WEIGHTS),
    ],
)
def test_what_a_trainer_cannot_use_is_refused(
    name: str, option: str, more: str, error: type[Exception], fact: str, tiny_model_dir: Path
) -> None:
    given = (f"{name}.{option}".replace("MODEL", str(tiny_model_dir)), more)
    with pytest.raises(error, match=fact):
        task_trainer(name, *given)


@pytest.mark.parametrize("name", ["self_hosted_grpo", "remote_api_opd", "remote_api_cross_entropy"])
def test_samples_of_another_distribution_than_the_learned_one_are_reported(name: str) -> None:
    options = ("temperature=0.5", "top_p=0.9", "min_new_tokens=2")
    trainer = task_trainer(name, *(f"task.policy.{option}" for option in options))
    if name == "remote_api_cross_entropy":
        assert "warnings" not in trainer.results, "nothing is sampled"
        return
    (warning,) = trainer.results["warnings"]
    assert "temperature 0.5, top_p 0.9, min_new_tokens 2" in warning
    assert "task.policy" in warning


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo", "reinforce"])
def test_given_solutions_count_as_sampled_by_the_policy_in_every_loss(loss: str) -> None:
    name = "remote_api_cross_entropy"
    trainer = task_trainer(name, f"{name}.policy_loss.loss={loss}", "training.num_iterations=1")
    (row,) = iterations_of(trainer, 1)
    expected = task_trainer(name, "training.num_iterations=1")
    iterations_of(expected, 1)
    assert math.isfinite(row["loss"])
    # At ratio 1 each has the gradient of the log-likelihood.
    for one, other in zip(trainer.learned, expected.learned, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_data_are_gone_through_before_any_problem_comes_again(tmp_path: Path) -> None:
    task = {"_type": "dataset"}
    for name, count in (("train", 5), ("test", 2)):
        task[name] = str(tmp_path / f"{name}.jsonl")
        rows = [{"prompt": f"{name} {i}", "answer": "1"} for i in range(count)]
        Path(task[name]).write_text("\n".join(map(json.dumps, rows)))
    trainer = task_trainer("self_hosted_grpo", f"task.task={json.dumps(task)}")
    drawn = [trainer.problem(number) for number in range(15)]
    assert [sorted(drawn[i : i + 5]) for i in (0, 5, 10)] == [list(range(5))] * 3
    assert drawn[:5] != drawn[5:10] or drawn[:5] != drawn[10:]
    assert trainer.num_measure_parts() == 1


def test_an_adapter_begins_with_the_weights_of_its_seed() -> None:
    lora = "task.policy.language_model.lora.rank=2"

    def first_weights(*overrides: str) -> torch.Tensor:
        module = task_trainer("remote_api_grpo", lora, *overrides).policy.module
        return torch.cat([one.flatten() for n, one in module.named_parameters() if "lora_A" in n])

    one, again, other = first_weights(), first_weights(), first_weights("seed=7")
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_figures_of_numpy_and_torch_are_saved_amid_an_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = task_trainer("self_hosted_grpo")
    prepare_batch = trainer._prepare_batch

    def with_figures(batch: Batch) -> tuple[Batch, dict[str, Any]]:
        prepared, metrics = prepare_batch(batch)
        trainer.log_metrics({"of_tensor": torch.tensor(0.5)})
        return prepared, metrics | {"single": np.float32(0.25), "whole": np.int64(3)}

    monkeypatch.setattr(trainer, "_prepare_batch", with_figures)
    trainer._collect(0)
    trainer.state.count_step({"loss": np.float32(2)})
    given = trainer.state.iteration_metrics
    assert [type(given[name]) for name in ("of_tensor", "single", "whole")] == [float, float, int]
    kept = unpack_state(pack_state([given, trainer.state.step_sums]))
    assert (kept[0]["single"], kept[1]) == (0.25, {"loss": 2.0})


@pytest.mark.parametrize("name", ["self_hosted_grpo", "remote_api_grpo"])
def test_a_trainer_that_learns_from_none_of_its_trajectories_warns_once_with_their_number(
    name: str,
) -> None:
    # A problem with a single trajectory has no comparison.
    trainer = task_trainer(name, f"{name}.group_size=1", f"{name}.use_run_ids=false")
    trainer._collect(0)
    trainer._collect(1)
    (warning,) = trainer.results["warnings"]
    assert "iteration 1" in warning
    assert " 8 trajectories" in warning
    learning = task_trainer(name)
    learning._collect(0)
    assert "warnings" not in learning.results


@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_rewards_that_are_all_zero_are_reported_with_a_divergence_too(
    monkeypatch: pytest.MonkeyPatch, kl_weight: float
) -> None:
    trainer = task_trainer(
        "self_hosted_grpo", f"self_hosted_grpo.policy_loss.kl={{weight: {kl_weight}}}"
    )
    play = trainer._play

    def play_without_success(*given: Any, **options: Any) -> Any:
        rollout = play(*given, **options)
        for trajectory in rollout.trajectories:
            trajectory.reward = 0.0
        return rollout

    monkeypatch.setattr(trainer, "_play", play_without_success)
    trainer._collect(0)
    (warning,) = trainer.results["warnings"]
    assert "advantages are 0" in warning
    assert ("KL" in warning) is (kl_weight > 0)


@pytest.mark.parametrize("name", ["self_hosted_grpo", "remote_api_grpo"])
def test_one_run_of_a_problem_is_refused_where_runs_are_compared(name: str) -> None:
    with pytest.raises(ParameterError):
        task_trainer(name, f"{name}.group_size=1")
    task_trainer(name, f"{name}.group_size=1", f"{name}.baseline=none", f"{name}.scale=none")


def test_rewards_of_a_rollout_are_those_of_all_groups_that_were_sampled() -> None:
    pairs = ("self_hosted_grpo", "self_hosted_grpo.group_size=2", "task.task.levels=[1]")
    trainer = task_trainer(*pairs, "self_hosted_grpo.max_resampling_rounds=3")
    rewards: list[float] = []
    play = trainer._play

    def record(*given: Any, **options: Any) -> Any:
        rollout = play(*given, **options)
        rewards.extend(trajectory.reward for trajectory in rollout.trajectories)
        return rollout

    trainer._play = record
    with torch.no_grad():
        experience = trainer.collect(0)
    metrics = experience.metrics
    assert metrics["rollout/num_trajectories"] == len(rewards) > len(experience.samples)
    assert metrics["rollout/reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
    # A group with unequal rewards has one of each.
    assert metrics["rollout/kept_reward_mean"] == pytest.approx(0.5)
    assert metrics["rollout/reward_mean"] != metrics["rollout/kept_reward_mean"]


# ---- a service of a plug-in, named by `train_service.backend`

PLUGIN = '''
import nip_astra as na

@na.register_training_service("counting")
class Counting(na.LocalTrainingService):
    """Trains in this process, and counts its steps."""

    @classmethod
    def open(cls, request):
        service = super().open(request)
        service.name, service.num_steps = request.parameters.options["name"], 0
        return service

    def optim_step(self, **options):
        self.num_steps += 1
        return super().optim_step(**options)
'''
SECTION = "remote_api_grpo.train_service"


@pytest.mark.usefixtures("no_plugins_left")
def test_a_registered_service_trains_the_policy_and_reads_its_options(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(PLUGIN)
    load_plugin(tmp_path / "counting.py")
    more = (f"{SECTION}.backend=counting", f"{SECTION}.options={{name: mine}}")
    trainer = task_trainer("remote_api_grpo", *more)
    iterations_of(trainer, 1)
    assert trainer.service.name == "mine"
    assert trainer.service.num_steps == 1


def test_models_that_learn_beside_the_policy_are_refused_by_a_remote_service() -> None:
    trainer = task_trainer("remote_api_grpo")
    options = {"backend": "http", "base_url": "http://127.0.0.1:1"}
    service = trainer.parameters.train_service.model_copy(update=options)
    learning = (trainer.training, trainer.optimizer, trainer.learned)
    beside = torch.nn.ModuleDict({"value_head": torch.nn.Linear(1, 1)})
    request = TrainingServiceRequest(service, trainer.policy, "policy", *learning, beside, 0, None)
    with pytest.raises(ConfigurationError, match="value_head"):
        TRAINING_SERVICES.get("http").open(request)
