"""Trainers on trajectories learn, keep groups together, and refuse unsupported options."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.errors import ConfigurationError, ModelLoadError, ParameterError
from nip_astra.language_models.services.training import TRAINING_SERVICES, TrainingServiceRequest
from nip_astra.plugins import load_plugin
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.trainers.service.self_hosted import SelfHostedGrpoTrainer
from tests.kit.experiments import iterations_of, task_trainer
from tests.kit.tiny import make_language_model

LEARN = (
    "training.num_episodes_per_experience=16",
    "training.num_iterations=30",
    "training.minibatch_size=128",
    "training.lr=1e-3",
    "task.task.levels=[1]",
)


@pytest.mark.parametrize("name", ["self_hosted_grpo", "remote_api_grpo"])
def test_rewards_rise(name: str) -> None:
    rows = iterations_of(task_trainer(name, *LEARN), 30)
    rewards = [row["rollout/reward_mean"] for row in rows]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


@pytest.mark.parametrize(
    "name", ["self_hosted_opd", pytest.param("remote_api_opd", marks=pytest.mark.slow)]
)
def test_a_student_comes_nearer_to_its_teacher(name: str) -> None:
    gaps = [row["opd/reverse_kl"] for row in iterations_of(task_trainer(name, *LEARN), 20)]
    assert sum(gaps[-3:]) < sum(gaps[:3]) / 2


def test_solutions_are_learnt_by_heart() -> None:
    trainer = task_trainer("remote_api_cross_entropy", *LEARN)
    losses = [row["loss"] for row in iterations_of(trainer, 30)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_dev_evaluations_report_pass_at_k_with_intervals() -> None:
    trainer = task_trainer(
        "self_hosted_grpo", "task.evaluation.num_dev_problems=6", "task.evaluation.num_dev_runs=4"
    )
    with torch.no_grad():
        figures = trainer.evaluate_dev()
    assert figures["pass_at_1"] <= figures["pass_at_2"] <= figures["pass_at_4"]
    assert figures["pass_at_4_low"] <= figures["pass_at_4"] <= figures["pass_at_4_high"]
    assert figures["pass_at_1"] == pytest.approx(figures["accuracy"])


def test_a_task_with_solutions_is_learnt_by_heart() -> None:
    trainer = task_trainer("remote_api_cross_entropy", scenario="pig_latin")
    with torch.no_grad():
        experience = trainer.collect(0)
    environment = trainer.task.environment("train", 0)
    sample = experience.samples[0]
    said = trainer.agent.language_model.tokenizer.decode(sample["response"])
    assert said.startswith(environment.solution)
    assert sample["is_trained"].all()


AHEAD = ("training.num_iterations=5", "task.task.levels=[1]", "training.lr=1e-3")


@pytest.mark.parametrize("name", ["self_hosted_grpo", "remote_api_grpo"])
@pytest.mark.parametrize("staleness", [1, 2])
def test_weights_that_sample_are_behind_by_the_set_number_of_iterations(
    name: str, staleness: int
) -> None:
    trainer = task_trainer(name, *AHEAD, f"{name}.max_staleness={staleness}")
    told, gaps, behind = [], [], []
    versions = [trainer.policy.weight_copy()]
    for iteration in range(5):
        trainer._collect(iteration)
        metrics = trainer.state.iteration_metrics
        told.append(metrics["rollout/staleness"])
        gaps.append(metrics["mismatch/kl"])
        (one, *_), version = trainer.state.samples, versions[max(iteration - staleness, 0)]
        trainer._sampler.take_weights(version) if iteration == 4 else None
        behind.append(one)
        trainer._update(iteration)
        trainer.state.end()
        versions.append(trainer.policy.weight_copy())
    assert told == [float(min(i, staleness)) for i in range(5)]
    assert gaps[0] < 1e-6 < min(gaps[1:])
    assert trainer.state.num_optimizer_steps > 0
    # The sampling weights of the last rollout are that many iterations old.
    batch = trainer.collate_fn([behind[-1]])
    is_corrected = name == "self_hosted_grpo"
    assert [("correction_weights" in one) for one in behind] == [False] + 4 * [is_corrected]
    assert torch.equal(batch["old_logprobs"], batch["logprobs"]) is not is_corrected
    given = (batch[n] for n in ("context", "context_mask", "response", "response_mask"))
    scored = trainer._sampler.logprobs(*given)[batch["trained_mask"]]
    torch.testing.assert_close(
        scored.detach(), batch["logprobs"][batch["trained_mask"]], atol=1e-4, rtol=0
    )


def test_without_staleness_rollouts_ahead_change_nothing() -> None:
    plain, ahead = (
        task_trainer("self_hosted_grpo", *AHEAD, f"self_hosted_grpo.max_staleness={count}")
        for count in (0, 1)
    )
    with torch.no_grad():
        first = [trainer.collect(0).samples for trainer in (plain, ahead)]
    for one, other in zip(*first, strict=True):
        assert torch.equal(one["response"], other["response"])
        assert torch.equal(one["logprobs"], other["logprobs"])


def prepared(name: str, *overrides: str) -> tuple[Any, Any]:
    trainer = task_trainer(name, *overrides)
    with torch.no_grad():
        return trainer, trainer.collect(0)


def gradients(trainer: Any, batches: list[TensorDict]) -> list[torch.Tensor]:
    trainer._write_step_totals(batches)
    trainer.service.forward_backward(batches, trainer.loss)
    found = [p.grad.clone() for p in trainer.policy.parameters() if p.grad is not None]
    trainer.optimizer.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *(
            ("self_hosted_grpo", (f"self_hosted_grpo.policy_loss.reduction={reduction}",))
            for reduction in ("token", "sequence", "sequence_sum", "sum_over_length")
        ),
        ("remote_api_grpo", ()),
    ],
)
def test_gradients_do_not_depend_on_how_a_step_is_split(
    name: str, overrides: tuple[str, ...]
) -> None:
    trainer, experience = prepared(name, *overrides)
    samples = experience.samples
    whole = gradients(trainer, [trainer.collate_fn(samples)])
    parts = [trainer.collate_fn(part) for part in (samples[:5], samples[5:6], samples[6:])]
    for one, other in zip(whole, gradients(trainer, parts), strict=True):
        assert torch.allclose(one, other, atol=1e-4 if name == "remote_api_grpo" else 1e-5)
    assert max(float(one.abs().max()) for one in whole) > 1e-3


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
    assert plain.metrics["rollout/dead_share"] > 0
    assert plain.metrics["rollout/played_problems"] == 8
    assert 8 < resampled.metrics["rollout/played_problems"] <= 8 * 4
    assert resampled.metrics["grpo/zero_variance_share"] == 0
    assert len(resampled.samples) <= 8 * 2


def test_recomputed_scores_agree_with_the_sampler() -> None:
    options = ("rescore=true", "correction=truncate")
    _, experience = prepared(
        "self_hosted_grpo", *(f"self_hosted_grpo.policy_loss.{one}" for one in options)
    )
    assert experience.metrics["mismatch/largest_gap"] < 1e-4
    assert experience.metrics["mismatch/effective_sample_size"] == pytest.approx(1.0, abs=1e-5)
    weights = torch.cat(
        [one["correction_weights"][one["is_trained"]] for one in experience.samples]
    )
    assert torch.allclose(weights, torch.ones_like(weights), atol=1e-4)


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
    found = [float(one["advantages"][-1]) for one in samples]
    assert found == pytest.approx([2 / 3 / std, -1 / 3 / std], abs=1e-4)


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
    options = ("kl.weight=0.5", "kl.target=0.1", "kl.horizon=1")
    trainer = task_trainer(
        "self_hosted_grpo", *(f"self_hosted_grpo.policy_loss.{one}" for one in options)
    )
    # Initially policy and reference are equal: the weight falls by the maximum, a fifth.
    metrics = trainer.collect(0).metrics
    assert metrics["kl/reference"] == pytest.approx(0.0, abs=1e-5)
    assert (metrics["kl/weight"], trainer.kl.weight) == (0.5, pytest.approx(0.4))
    other = task_trainer(
        "self_hosted_grpo",
        "self_hosted_grpo.policy_loss.kl.target=0.1",
        "self_hosted_grpo.policy_loss.kl.weight=0.5",
    )
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


def test_a_hook_that_forgets_advantages_is_reported() -> None:
    class Forgetful(SelfHostedGrpoTrainer):
        def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
            return batch, {}

    trainer = task_trainer("self_hosted_grpo")
    trainer.__class__ = Forgetful
    with (
        torch.no_grad(),
        pytest.raises(
            ConfigurationError, match=r"(?s)Forgetful .*values\['advantages'\] is missing"
        ),
    ):
        trainer.collect(0)


def test_what_a_trainer_cannot_use_is_refused(tmp_path: Path) -> None:
    teacher = {"_type": "huggingface", "model": str(make_language_model(tmp_path / "teacher"))}
    http = "{backend: http, base_url: 'http://127.0.0.1:1'}"
    for name, overrides, error, fact in (
        (
            *("self_hosted_opd", [f"distillation.teacher={json.dumps(teacher)}"]),
            *(ModelLoadError, "teacher with the student's tokenizer"),
        ),
        (
            *("self_hosted_opd", ["distillation.teacher=null"]),
            *(ConfigurationError, r"Set self_hosted_opd\.distillation\.teacher"),
        ),
        (
            *("self_hosted_grpo", ["max_staleness=1", f"train_service={http}"]),
            *(ParameterError, r"max_staleness 1 .*backend http"),
        ),
    ):
        with pytest.raises(error, match=fact):
            task_trainer(name, *(f"{name}.{one}" for one in overrides))


def test_data_are_gone_through_before_any_problem_comes_again(tmp_path: Path) -> None:
    for name, count in (("train", 5), ("test", 2)):
        rows = [{"prompt": f"{name} {i}", "answer": "1"} for i in range(count)]
        (tmp_path / name).with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "_type": "dataset",
        "train": str(tmp_path / "train.jsonl"),
        "test": str(tmp_path / "test.jsonl"),
    }
    trainer = task_trainer("self_hosted_grpo", f"task.task={json.dumps(task)}")
    drawn = [trainer.problem(number) for number in range(15)]
    assert [sorted(drawn[i : i + 5]) for i in (0, 5, 10)] == [list(range(5))] * 3
    assert drawn[:5] != drawn[5:10] or drawn[:5] != drawn[10:]
    assert trainer.num_measure_parts() == 1


def test_runs_of_a_problem_may_stand_together_in_batches() -> None:
    options = ("training.minibatch_size=8", "training.batch_order=by_episode")
    trainer = task_trainer("self_hosted_grpo", *options)
    with torch.no_grad():
        samples = trainer.collect(0).samples
    batches = list(trainer.batches(samples, iteration=0, epoch=0))
    problems = [{tuple(row.tolist()) for row in batch["context"]} for batch in batches]
    assert [len(one) for one in problems] == [1] * (len(samples) // 8)


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
        found, metrics = prepare_batch(batch)
        trainer.log_metrics({"of_tensor": torch.tensor(0.5)})
        return found, metrics | {"single": np.float32(0.25), "whole": np.int64(3)}

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
    # A problem with a single run has no comparison.
    trainer = task_trainer(name, f"{name}.group_size=1")
    trainer._collect(0)
    trainer._collect(1)
    (warning,) = trainer.results["warnings"]
    assert "iteration 1" in warning
    assert " 8 trajectories" in warning
    learning = task_trainer(name)
    learning._collect(0)
    assert "warnings" not in learning.results


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


@pytest.fixture
def _plugin(tmp_path: Path) -> Iterator[None]:
    before = TRAINING_SERVICES.snapshot()
    path = tmp_path / "counting.py"
    path.write_text(PLUGIN)
    load_plugin(path)
    yield
    TRAINING_SERVICES.restore(before)


@pytest.mark.usefixtures("_plugin")
def test_a_registered_service_trains_the_policy_and_reads_its_options() -> None:
    more = (f"{SECTION}.backend=counting", f"{SECTION}.options={{name: mine}}")
    trainer = task_trainer("remote_api_grpo", *more)
    iterations_of(trainer, 1)
    assert trainer.service.name == "mine"
    assert trainer.service.num_steps == 1


def test_an_unknown_service_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ParameterError, match=r"backend.*htp.*'http'"):
        task_trainer("remote_api_grpo", f"{SECTION}.backend=htp")


def test_models_that_learn_beside_the_policy_are_refused_by_a_remote_service() -> None:
    trainer = task_trainer("remote_api_grpo")
    options = {"backend": "http", "base_url": "http://127.0.0.1:1"}
    request = TrainingServiceRequest(
        trainer.parameters.train_service.model_copy(update=options),
        trainer.policy,
        "policy",
        trainer.training,
        trainer.optimizer,
        trainer.learned,
        torch.nn.ModuleDict({"value_head": torch.nn.Linear(1, 1)}),
        0,
        None,
    )
    with pytest.raises(ConfigurationError, match="value_head"):
        TRAINING_SERVICES.get("http").open(request)
