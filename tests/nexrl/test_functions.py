"""NexRL's functions give our formulas' results under NexRL's signatures."""

from __future__ import annotations

import logging

import pytest
import torch
from nip_astra.nexrl.algorithm.core_algos import (
    AdaptiveKLController,
    FixedKLController,
    compute_grpo_advantage_for_trajectories,
    compute_grpo_outcome_advantage,
    kl_penalty,
    masked_mean,
    masked_whiten,
)
from nip_astra.nexrl.executor import execute
from nip_astra.nexrl.rollout_worker import (
    BaseEvaluationTarget,
    EvaluationRunResult,
    Evaluator,
    NexAUEvaluationTarget,
)
from nip_astra.nexrl.utils.config_utils import (
    get_actor_train_service_config,
    get_train_service_config_by_role,
    insert_config,
    use_tinker,
    use_weaver,
)
from nip_astra.nexrl.utils.finetune_service_utils import convert_trajectories_to_datums
from nip_astra.nexrl.utils.logging_utils import (
    log_grpo_metrics,
    log_rollout_metrics,
    set_logging_basic_config,
)
from nip_astra.nexrl.utils.torch_functional import (
    compute_position_id_with_mask,
    pad_sequence_to_length,
    padding_data,
)
from omegaconf import OmegaConf

import nip_astra
from nip_astra.errors import ConfigurationError, DataError, UnknownNameError
from nip_astra.nexrl.nexrl_types import Batch, Trajectory

# ---- masks, divergences and advantages


def test_a_masked_mean_along_an_axis() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    torch.testing.assert_close(masked_mean(values, mask, axis=1), torch.tensor([2.0, 5.5]))
    torch.testing.assert_close(masked_mean(values, mask), torch.tensor(3.4))


def test_whitened_values_have_mean_0_and_deviation_1() -> None:
    values, mask = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    whitened = masked_whiten(values, mask)
    torch.testing.assert_close(masked_mean(whitened, mask), torch.tensor(0.0))
    torch.testing.assert_close(whitened.std(), torch.tensor(1.0))


def test_an_adaptive_weight_follows_its_target() -> None:
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=6.0, horizon=10000)
    assert (controller.value, controller.target, controller.horizon) == (0.1, 6.0, 10000)
    controller.update(current_kl=8.0, n_steps=100)
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 100 / 10000))


def test_a_fixed_weight_stays() -> None:
    controller = FixedKLController(kl_reward_coef=0.5)
    controller.update(current_kl=10.0, n_steps=100)
    assert controller.value == 0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl", [-0.5, 0.5]),
        ("abs", [0.5, 0.5]),
        ("mse", [0.125, 0.125]),
        ("low_var_kl", [0.14872, 0.10653]),
    ],
)
def test_penalties_by_both_names_of_their_argument(name: str, expected: list[float]) -> None:
    logprobs, reference = torch.tensor([[-1.5, -0.5]]), torch.tensor([[-1.0, -1.0]])
    for penalty in (
        kl_penalty(logprobs, reference, kl_penalty=name),
        kl_penalty(logprobs, reference, name),
    ):
        torch.testing.assert_close(penalty, torch.tensor([expected]), atol=1e-4, rtol=0)


def test_an_unknown_penalty_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError) as caught:
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "kll")
    assert caught.value.known == ["abs", "kl", "low_var_kl", "mse"]


def test_rewards_of_tokens_are_compared_within_groups() -> None:
    rewards = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.5, 0.0], [0.0, 2.5]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    advantages, returns, std = compute_grpo_outcome_advantage(rewards, mask, [7, 7, "b", "b"])
    high = 2**-0.5
    expected = [[-high, -high], [high, high], [-high, -high], [high, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-4, rtol=0)
    assert torch.equal(returns, advantages)
    assert std == pytest.approx({7: high, "b": high})


def test_a_run_of_several_rows_counts_once() -> None:
    rewards = torch.tensor([[1.0], [1.0], [0.0]])
    advantages, _, std = compute_grpo_outcome_advantage(
        rewards, torch.ones(3, 1), torch.tensor([0, 0, 0]), run_ids=[0, 0, 1]
    )
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1, 1, -1]) * 2**-0.5)
    assert std[0] == pytest.approx(2**-0.5)


def rewarded(reward: float, group: str, run: int) -> Trajectory:
    fields = {"group_id": group, "run_id": run, "logprobs": [0.0, -1.0]}
    return Trajectory([5, 6], [0, 1], reward, extra_fields=fields)


def test_advantages_are_set_on_trajectories(caplog: pytest.LogCaptureFixture) -> None:
    trajectories = [rewarded(1.0, "a", 0), rewarded(0.0, "a", 1), rewarded(1.0, "b", 0)]
    with caplog.at_level(logging.INFO):
        compared = compute_grpo_advantage_for_trajectories(
            trajectories, logger=logging.getLogger("nexrl"), use_run_ids=True
        )
    assert compared == trajectories
    assert [one["advantage"] for one in compared] == pytest.approx([0.7071, -0.7071, 0.0], abs=1e-3)
    assert "1 of 2 groups" in caplog.text


def test_metrics_of_trajectories_and_of_their_scores() -> None:
    trajectories = [rewarded(1.0, "a", 0), rewarded(0.0, "a", 1)]
    trajectories[0]["score"] = {"right": True, "text": "yes"}
    trajectories[1]["score"] = {"right": False}
    compute_grpo_advantage_for_trajectories(trajectories)
    metrics: dict[str, float] = {}
    log_rollout_metrics(trajectories, metrics)
    log_grpo_metrics(trajectories, metrics)
    assert metrics["rollout/reward_mean"] == metrics["rollout/right"] == 0.5
    assert "rollout/text" not in metrics
    assert metrics["grpo/num_groups"] == 1.0


def test_data_of_a_service_are_shifted_to_the_predicted_tokens() -> None:
    first, second = rewarded(1.0, "a", 0), rewarded(0.0, "a", 1)
    first["advantage"], second["advantage"] = 2.0, 0.0
    assert convert_trajectories_to_datums([first, second]) == [
        {
            "input_tokens": [5],
            "loss_fn_inputs": {
                "target_tokens": [6],
                "logprobs": [-1.0],
                "advantages": [2.0],
                "loss_mask": [1.0],
            },
        }
    ]
    with pytest.raises(DataError, match="advantage"):
        convert_trajectories_to_datums([rewarded(1.0, "a", 0)])


# ---- padding


def test_ids_are_padded_and_truncated() -> None:
    assert padding_data([5, 6], max_length=4, pad_token_id=9).tolist() == [[5, 6, 9, 9]]
    left = padding_data(torch.tensor([[5, 6]]), 3, 9, left_pad=True)
    assert left.tolist() == [[9, 5, 6]]
    assert padding_data([5, 6, 7], 2, 9, truncation="left").tolist() == [[6, 7]]
    assert padding_data([5, 6, 7], 2, 9, truncation="right").tolist() == [[5, 6]]
    assert padding_data([5, 6, 7], 2, 9, truncation="ignore").tolist() == [[5, 6, 7]]
    with pytest.raises(DataError, match="3 tokens"):
        padding_data([5, 6, 7], 2, 9)
    with pytest.raises(DataError, match="max_length"):
        padding_data([5, 6, 7], pad_token_id=9)
    with pytest.raises(UnknownNameError):
        padding_data([5, 6, 7], 2, 9, truncation="middle")
    assert pad_sequence_to_length(torch.ones(1, 2), 3, 0.5).tolist() == [[1.0, 1.0, 0.5]]


def test_positions_count_tokens_of_rows_of_any_rank() -> None:
    assert compute_position_id_with_mask(torch.tensor([[0, 1, 1]])).tolist() == [[0, 0, 1]]
    assert compute_position_id_with_mask(torch.tensor([1, 1, 0])).tolist() == [0, 1, 1]


def test_redundant_padding_of_either_batch_is_removed() -> None:
    batch = Batch.from_trajectories([rewarded(1.0, "a", 0)])
    wide = Batch.concatenate([batch, batch])
    assert padding_data(wide, pad_token_id=9, multiple=3).values["input_ids"].shape == (3, 2)
    ours = nip_astra.Batch.from_trajectories([rewarded(1.0, "a", 0).to_core()])
    assert isinstance(padding_data(ours, pad_token_id=9), nip_astra.Batch)


# ---- configuration


def test_a_value_is_inserted_into_a_closed_configuration() -> None:
    target = OmegaConf.create({"a": 1})
    OmegaConf.set_struct(target, True)
    insert_config(target, "new", OmegaConf.create({"x": 10}), restore_struct=True)
    assert target["new"]["x"] == 10
    assert OmegaConf.is_struct(target) is True
    insert_config(target, "more", {"y": 2}, restore_struct=False)
    assert OmegaConf.is_struct(target) is False


def test_a_service_is_found_by_its_role() -> None:
    flat = OmegaConf.create({"backend": "local", "url": "http://x"})
    assert get_train_service_config_by_role(flat, "actor") is flat
    named = OmegaConf.create(
        {"a": {"role": "actor", "backend": "local"}, "b": {"role": "teacher", "backend": "mock"}}
    )
    assert get_train_service_config_by_role(named, "teacher").backend == "mock"
    unnamed = OmegaConf.create({"a": {"backend": "local"}})
    assert get_train_service_config_by_role(unnamed, "actor").backend == "local"
    with pytest.raises(ConfigurationError, match="critic"):
        get_train_service_config_by_role(named, "critic")
    whole = OmegaConf.create(
        {"service": {"train_service": named, "inference_service": {"backend": "tinker"}}}
    )
    assert get_actor_train_service_config(whole).role == "actor"
    assert use_tinker(whole)
    assert not use_weaver(whole)


def test_the_level_of_the_log_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(logging, "basicConfig", lambda **options: given.update(options))
    monkeypatch.setenv("LOG_LEVEL", "debug")
    set_logging_basic_config()
    assert given["level"] == logging.DEBUG


def test_a_call_returns_its_result() -> None:
    assert execute(max, 3, 4, key=lambda number: -number) == 3


# ---- evaluators


class FirstLetter(Evaluator):
    """Rewards answers that begin with the letter of the row."""

    def evaluate(
        self, data: dict[str, str], evaluation_target: BaseEvaluationTarget
    ) -> EvaluationRunResult:
        assert isinstance(evaluation_target, NexAUEvaluationTarget)
        assert evaluation_target.observation[0]["content"] in str(data["prompt"])
        is_correct = evaluation_target.final_answer.startswith(data["letter"])
        return EvaluationRunResult(float(is_correct), data["letter"], {"right": float(is_correct)})


def test_an_evaluator_is_a_reward_function() -> None:
    logged: dict[str, float] = {}
    rewards = FirstLetter()(
        prompts=["Say a", [{"role": "user", "content": "Say b"}]],
        completions=["apple", [{"role": "assistant", "content": "cherry"}]],
        letter=["a", "b"],
        trainer_state=None,
        log_metric=logged.__setitem__,
    )
    assert rewards == [1.0, 0.0]
    assert logged == {"right": 0.5}
