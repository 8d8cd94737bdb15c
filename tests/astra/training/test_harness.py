"""Experience: batch sizes, prompts, order, and logging."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from nip_astra.astra import (
    DPO,
    IPO,
    PPO,
    ASTEvaluator,
    ASTSampler,
    Harness,
    Trainer,
    TrainingConfiguration,
)
from nip_astra.errors import ConfigurationError, ParameterError, TrackingError
from tests.astra.toys import PROMPTS, ValuedWordProblem, WordProblem, says


def harness_of(**options: Any) -> Harness:
    problem = WordProblem()
    config = TrainingConfiguration(batch_size=4)
    return Harness(ASTSampler(problem, PROMPTS), DPO(problem), 6, config=config, **options)


def sizes(harness: Harness, **options: Any) -> list[int]:
    return [len(batch.prefixes) for batch in harness.experience(**options)]


def test_batches_have_the_requested_size() -> None:
    found = sizes(harness_of(), seed=0)
    assert found[:-1] == [4] * (len(found) - 1)
    assert len(found) > 2
    assert sizes(harness_of(dataloader_kwargs={"batch_size": 7}), seed=0)[0] == 7


def test_the_trainer_takes_one_step_a_batch_of_the_configured_size() -> None:
    problem = WordProblem()
    trainer = Trainer(
        TrainingConfiguration(batch_size=1000, training_steps=3),
        ASTSampler(problem, PROMPTS),
        DPO(problem),
    )
    trainer.train()
    assert trainer._loop.state.num_optimizer_steps == 3


def test_one_experience_has_several_prompts_also_with_a_seed() -> None:
    for options in ({"seed": 0}, {"seed": 3}, {}):
        batches = list(harness_of().experience(**options))
        openings = {
            prefix.split(" cat")[0].split(" you")[0] for b in batches for prefix in b.prefixes
        }
        prompts = {
            p for p in PROMPTS for b in batches for prefix in b.prefixes if prefix.startswith(p)
        }
        assert len(prompts) > 2, (options, openings)


def test_equal_seeds_give_equal_experience_in_equal_order_and_calls_go_on() -> None:
    harness, again = harness_of(), harness_of()
    first = [
        list(harness.experience(seed=0)),
        list(harness.experience()),
        list(harness.experience()),
    ]
    torch.manual_seed(5)
    second = [list(again.experience(seed=0)), list(again.experience()), list(again.experience())]
    assert first == second
    assert first[1] != first[2]
    assert list(harness.experience(seed=0)) == first[0]


@pytest.mark.parametrize("options", [{}, {"dataloader_kwargs": {"shuffle": False}}])
def test_experience_can_be_gone_through_several_times_and_has_a_length(
    options: dict[str, Any],
) -> None:
    harness = harness_of(**options)
    buffer = harness.experience(seed=0)
    num_played = len(harness.sampler.system.asked)
    passes = [[pair for batch in buffer for pair in batch.suffix_pos] for _ in range(3)]
    assert len(harness.sampler.system.asked) == num_played, "it was played again"
    assert len(buffer) == len(list(buffer)) == -(-len(passes[0]) // 4) > 2
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
    assert (passes[0] == passes[1]) == bool(options), "a pass has an order of its own"
    assert buffer.num_samples == len(passes[0])


def test_a_problem_that_is_played_and_another_that_is_trained_are_refused() -> None:
    played, trained = WordProblem(), WordProblem()
    for build in (
        lambda: Trainer(TrainingConfiguration(), ASTSampler(played, PROMPTS), DPO(trained)),
        lambda: Harness(ASTSampler(played, PROMPTS), DPO(trained)),
    ):
        with pytest.raises(ConfigurationError, match=r"plays one problem.*trains another"):
            build()


def test_an_algorithm_or_a_sampler_without_its_problem_is_reported() -> None:
    class Forgets(DPO):
        def __init__(self, problem: Any) -> None:
            self.own = problem

    class Forgotten(ASTSampler):
        def __init__(self, problem: Any) -> None:
            self.prompts = PROMPTS

    problem = WordProblem()
    for sampler, algorithm in (
        (ASTSampler(problem, PROMPTS), Forgets(problem)),
        (Forgotten(problem), DPO(problem)),
    ):
        with pytest.raises(ConfigurationError, match=r"Forg.* super\(\)\.__init__\(problem\)"):
            Trainer(TrainingConfiguration(), sampler, algorithm)


def test_samples_are_shuffled_unless_disabled() -> None:
    plain = harness_of(dataloader_kwargs={"shuffle": False})
    ordered = [
        pair
        for batch in plain.experience(seed=0)
        for pair in zip(batch.prefixes, batch.suffix_pos, strict=True)
    ]
    mixed = [
        pair
        for batch in harness_of().experience(seed=0)
        for pair in zip(batch.prefixes, batch.suffix_pos, strict=True)
    ]
    assert ordered != mixed
    assert sorted(ordered) == sorted(mixed)


def test_options_that_would_not_be_used_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'num_workers'"):
        harness_of(dataloader_kwargs={"num_workers": 2})
    problem = WordProblem()
    env = ASTSampler(problem, PROMPTS)
    with pytest.raises(ConfigurationError, match="two"):
        Trainer(TrainingConfiguration(), env, DPO(problem), sampler=env)
    with pytest.raises(ConfigurationError, match="none"):
        Trainer(TrainingConfiguration(), algorithm=DPO(problem))
    with pytest.raises(ConfigurationError, match="algorithm"):
        Trainer(TrainingConfiguration(), env)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("num_episodes_per_experience", {"num_episodes_per_experience": 0}),
        ("batch_size", {"dataloader_kwargs": {"batch_size": 0}}),
        ("batch_size", {"dataloader_kwargs": {"batch_size": "many"}}),
    ],
)
def test_a_number_of_nothing_is_refused(name: str, options: dict[str, Any]) -> None:
    problem = WordProblem()
    with pytest.raises(ConfigurationError, match=rf"{name}=.* at least 1"):
        Harness(ASTSampler(problem, PROMPTS), DPO(problem), **options)


@pytest.mark.parametrize("asked", [{"eval_period": 1}, {"early_stopping_patience": 2}])
def test_a_trainer_that_evaluates_nothing_warns_before_it_trains(asked: dict[str, int]) -> None:
    problem = WordProblem()
    config = TrainingConfiguration(training_steps=1, **asked)
    with pytest.raises(
        ConfigurationError, match=r"no prompts to evaluate on.*dev_prompts="
    ) as told:
        Trainer(config, ASTSampler(problem, PROMPTS), DPO(problem))
    assert "=".join(map(str, *asked.items())) in str(told.value)


def test_a_period_of_evaluations_that_is_set_later_is_reported_too() -> None:
    problem = WordProblem()
    config = TrainingConfiguration(training_steps=1)
    trainer = Trainer(config, ASTSampler(problem, PROMPTS), DPO(problem))
    trainer.config.eval_period = 1
    with pytest.raises(ConfigurationError, match="no prompts to evaluate on"):
        trainer.train()


def test_losses_carry_gradients_and_logs_are_plain_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = harness_of()
    loss, logs = harness.step(next(harness.experience()))
    loss.backward()
    assert harness.sampler.system.attacker.logits.grad.abs().sum() > 0
    assert all(isinstance(value, float) for value in logs.values())
    with caplog.at_level(logging.INFO, logger="nip_astra.astra"):
        harness.log_current_step({"loss": float(loss.detach()), "step": 3, "note": "text"})
    assert "step=3, note=text" in caplog.text


def test_w_and_b_takes_its_arguments_without_a_key_and_leaves_them_as_they_are(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []

    class Run:
        def log(self, values: dict[str, Any]) -> None:
            started.append(values)

    import wandb

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(wandb, "init", lambda **options: started.append(options) or Run())
    options = {"project": "mine", "mode": "offline", "config": {"lr": 1}}
    harness = harness_of(use_wandb=True, wandb_kwargs=options)
    harness.log_current_step({"loss": 1.0})
    assert started == [{"project": "mine", "mode": "offline", "config": {"lr": 1}}, {"loss": 1.0}]
    assert options["project"] == "mine"


def test_w_and_b_online_without_a_key_is_reported_without_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nip_astra.astra.logging.has_credentials", lambda: False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(TrackingError, match="WANDB_MODE=offline"):
        harness_of(use_wandb=True)


@pytest.mark.parametrize("name", ["system", "problem"])
def test_a_problem_goes_by_two_names(name: str) -> None:
    problem = ValuedWordProblem()
    sampler = ASTSampler(prompts=PROMPTS, **{name: problem})
    for kind in (DPO, IPO, PPO):
        assert Harness(sampler, kind(**{name: problem}), 1).algorithm.problem is problem
    for given in ("sampler", "env", "environment"):
        evaluator = ASTEvaluator(seeds=PROMPTS, **{given: sampler})
        assert evaluator.env is evaluator.sampler is evaluator.environment is sampler
    for build in (DPO, PPO, ASTSampler):
        with pytest.raises(ConfigurationError, match="problem"):
            build()
    with pytest.raises(ConfigurationError, match="given as system and problem"):
        DPO(problem, problem=problem)
    with pytest.raises(ConfigurationError, match="needs a sampler, got none"):
        ASTEvaluator(seeds=PROMPTS)


# ---- configuration and trainer


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop", "adagrad"])
def test_every_optimizer_is_real_and_learns(name: str) -> None:
    problem = WordProblem(ppl_weight=0.0)
    config = TrainingConfiguration(optimizer=name, lr=0.3, training_steps=15, batch_size=16)
    trainer = Trainer(config, ASTSampler(problem, PROMPTS), DPO(problem, beta=1.0))
    assert type(trainer.optimizer).__name__.lower() == name
    trainer.train()
    assert says(problem, "silly") > 0.25


def test_an_unknown_optimizer_is_a_typed_error_and_a_value_error() -> None:
    with pytest.raises(ParameterError, match=r"optimizer.*'adam'") as caught:
        TrainingConfiguration(optimizer="adamm")
    assert isinstance(caught.value, ValueError)
    with pytest.raises(ValueError, match="Did you mean 'minibatch_size'"):
        TrainingConfiguration(batchsize=4)


def test_fields_stay_checked_when_they_are_changed_and_others_may_be_set() -> None:
    config = TrainingConfiguration(seed=0)
    config.training_steps = 7
    config.eval_every = 3
    assert (config.training_steps, config.num_iterations, config.eval_every) == (7, 7, 3)
    config.minibatch_size = 5
    assert config.batch_size == 5
    with pytest.raises(ParameterError, match="minibatch_size"):
        config.batch_size = 0
    with pytest.raises(ParameterError, match="batch_size"):
        TrainingConfiguration(batch_size=3, minibatch_size=4)
    with pytest.raises(ParameterError, match="lr"):
        config.lr = -1.0
    assert config.eval_every == 3
    assert TrainingConfiguration().lr == 1e-5


def test_seed_zero_is_a_seed_of_training_and_another_gives_other_weights() -> None:
    def weights(seed: int) -> list[float]:
        torch.manual_seed(torch.seed())
        problem = WordProblem()
        config = TrainingConfiguration(training_steps=2, lr=0.1, seed=seed)
        Trainer(config, ASTSampler(problem, PROMPTS), DPO(problem)).train()
        found: list[float] = problem.attacker.logits.tolist()
        return found

    assert weights(0) == weights(0) != weights(1)


def test_a_custom_optimizer_is_used_at_its_own_rate() -> None:
    problem = WordProblem()
    trainer = Trainer(
        TrainingConfiguration(training_steps=1, lr=1e-5), ASTSampler(problem, PROMPTS), DPO(problem)
    )
    trainer.optimizer = torch.optim.SGD(problem.parameters(), lr=0.5)
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.5)
    assert problem.attacker.logits.abs().max() > 1e-3


def test_training_goes_on_where_it_was_when_there_are_more_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problem = WordProblem()
    config = TrainingConfiguration(training_steps=1)
    trainer = Trainer(config, ASTSampler(problem, PROMPTS), DPO(problem))
    trainer.train()
    config.training_steps = 3
    trainer.train()
    assert trainer._loop.state.iteration == 3
    trainer.train()
    assert "nothing left to train: 3 of 3" in caplog.text


def test_a_configuration_of_another_kind_is_refused() -> None:
    problem = WordProblem()
    with pytest.raises(ConfigurationError, match="is a dict"):
        Trainer({"lr": 1.0}, ASTSampler(problem, PROMPTS), DPO(problem))


def small(**changes: Any) -> TrainingConfiguration:
    values = {"training_steps": 2, "num_episodes_per_experience": 2, "batch_size": 4}
    return TrainingConfiguration(**{**values, **changes})


def test_a_replaced_or_wrapped_harness_is_used_in_training() -> None:
    def trained(change: Any) -> tuple[Trainer, WordProblem]:
        problem = WordProblem(ppl_weight=0.0)
        trainer = Trainer(
            small(lr=0.3, training_steps=4), ASTSampler(problem, PROMPTS), DPO(problem)
        )
        change(trainer)
        trainer.train()
        return trainer, problem

    class Counting(Harness):
        num_experiences = num_steps = 0

        def experience(self, seed: int | None = None) -> Any:
            self.num_experiences += 1
            return super().experience(seed)

        def step(self, batch: Any) -> Any:
            self.num_steps += 1
            loss, logs = super().step(batch)
            return 0.0 * loss, logs

    def replace(trainer: Trainer) -> None:
        trainer.harness = Counting(
            trainer.harness.sampler, trainer.harness.algorithm, 2, config=trainer.config
        )

    weights = [p.detach().clone() for p in WordProblem(ppl_weight=0.0).parameters()]
    trainer, problem = trained(replace)
    assert trainer.harness.num_experiences == 4
    assert trainer.harness.num_steps == trainer._global_step_counter > 4
    # The replacement's loss has no gradient, so nothing was learnt.
    assert all(torch.equal(a, b) for a, b in zip(weights, problem.parameters(), strict=True))

    seen: list[int] = []

    def wrap(trainer: Trainer) -> None:
        step = trainer.harness.step
        trainer.harness.step = lambda batch: (  # type: ignore[method-assign]
            seen.append(trainer._global_step_counter) or step(batch)
        )

    trainer, problem = trained(wrap)
    assert seen == list(range(1, trainer._global_step_counter + 1))
    _, same = trained(lambda trainer: None)
    assert all(
        torch.equal(a, b) for a, b in zip(problem.parameters(), same.parameters(), strict=True)
    )


def test_batches_are_counted_before_their_step_also_where_several_make_one() -> None:
    problem = WordProblem()
    config = TrainingConfiguration(batch_size=1, training_steps=2, gradient_accumulation_steps=3)
    trainer = Trainer(config, ASTSampler(problem, PROMPTS), DPO(problem))
    trainer.train()
    steps = trainer._loop.state.num_optimizer_steps
    assert 3 * steps - 4 <= trainer._global_step_counter <= 3 * steps
    assert trainer._global_step_counter > steps


def test_a_trainer_sends_w_and_b_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    started: list[dict[str, Any]] = []
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb, "init", lambda **options: started.append(options))
    problem = WordProblem()
    Trainer(small(lr=0.25), ASTSampler(problem, PROMPTS), DPO(problem), use_wandb=True)
    assert started[0]["config"]["lr"] == 0.25
    assert started[0]["config"]["num_episodes_per_experience"] == 2
