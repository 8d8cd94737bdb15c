"""Experience: batch sizes, prompts, order, and logging."""

from __future__ import annotations

import logging
from types import SimpleNamespace
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
from tests.kit.learning import Learning


def harness_of(**options: Any) -> Harness:
    problem = WordProblem()
    config = TrainingConfiguration(batch_size=4)
    return Harness(ASTSampler(problem, PROMPTS), DPO(problem), 6, config=config, **options)


def trainer_of(problem: Any = None, **options: Any) -> Trainer:
    """A trainer by DPO, by default of few small batches."""
    problem = problem or WordProblem(ppl_weight=0.0)
    values = {"training_steps": 2, "num_episodes_per_experience": 2, "batch_size": 4, **options}
    return Trainer(TrainingConfiguration(**values), ASTSampler(problem, PROMPTS), DPO(problem))


def test_equal_seeds_give_equal_experience_in_equal_order_and_calls_go_on() -> None:
    harness, again = harness_of(), harness_of()
    first = [list(harness.experience(seed)) for seed in (0, None, None)]
    torch.manual_seed(5)
    assert [list(again.experience(seed)) for seed in (0, None, None)] == first
    assert first[1] != first[2]
    assert list(harness.experience(seed=0)) == first[0]


@pytest.mark.parametrize("options", [{}, {"dataloader_kwargs": {"shuffle": False}}])
def test_experience_can_be_gone_through_several_times_and_has_a_length(
    options: dict[str, Any],
) -> None:
    harness = harness_of(**options)
    buffer = harness.experience(seed=0)
    num_played = len(harness.sampler.system.requests)
    passes = [[pair for batch in buffer for pair in batch.suffix_pos] for _ in range(3)]
    assert len(harness.sampler.system.requests) == num_played, "it was played again"
    assert len(buffer) == len(list(buffer)) == -(-len(passes[0]) // 4) > 2
    assert {len(batch.prefixes) for batch in list(buffer)[:-1]} == {4}
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
    assert (passes[0] == passes[1]) == bool(options), "a pass has an order of its own"
    assert buffer.num_samples == len(passes[0])
    prefixes = [prefix for batch in buffer for prefix in batch.prefixes]
    assert sum(any(p.startswith(prompt) for p in prefixes) for prompt in PROMPTS) > 2


def test_an_algorithm_or_a_sampler_of_no_or_another_problem_is_reported() -> None:
    class Forgets(DPO):
        def __init__(self, problem: Any) -> None:
            self.own = problem

    class Forgotten(ASTSampler):
        def __init__(self, problem: Any) -> None:
            self.prompts = PROMPTS

    problem = WordProblem()
    for sampler, algorithm, fact in (
        (ASTSampler(problem, PROMPTS), Forgets(problem), "Forgets"),
        (Forgotten(problem), DPO(problem), "Forgotten"),
        (ASTSampler(problem, PROMPTS), DPO(WordProblem()), "one problem"),
    ):
        with pytest.raises(ConfigurationError, match=fact):
            Trainer(TrainingConfiguration(), sampler, algorithm)
        with pytest.raises(ConfigurationError, match=fact):
            Harness(sampler, algorithm)


def test_options_that_would_not_be_used_are_refused() -> None:
    problem = WordProblem()
    env, solver, config = ASTSampler(problem, PROMPTS), DPO(problem), TrainingConfiguration()
    for build, fact in (
        (lambda: harness_of(dataloader_kwargs={"num_workers": 2}), "'num_workers'"),
        (lambda: Trainer(config, env, solver, sampler=env), "two"),
        (lambda: Trainer(config, algorithm=solver), "none"),
        (lambda: Trainer(config, env), "algorithm"),
        (lambda: Trainer({"lr": 1.0}, env, solver), "dict"),
        (lambda: Harness(env, solver, 0), "num_episodes_per_experience=0"),
        (lambda: harness_of(dataloader_kwargs={"batch_size": 0}), "batch_size=0"),
        (lambda: harness_of(dataloader_kwargs={"batch_size": "many"}), "batch_size="),
    ):
        with pytest.raises(ConfigurationError, match=fact):
            build()


@pytest.mark.parametrize("options", [{"eval_period": 1}, {"early_stopping_patience": 2}])
def test_a_trainer_that_evaluates_nothing_warns_before_it_trains(options: dict[str, int]) -> None:
    (fact,) = (f"{name}={value}" for name, value in options.items())
    with pytest.raises(ConfigurationError, match=fact):
        trainer_of(**options)
    trainer = trainer_of()
    for name, value in options.items():
        setattr(trainer.config, name, value)
    with pytest.raises(ConfigurationError, match="dev_prompts="):
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import wandb

    sent: list[dict[str, Any]] = []
    run = SimpleNamespace(log=sent.append)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(wandb, "init", lambda **options: sent.append(options) or run)
    options = {"project": "mine", "mode": "offline", "config": {"lr": 1}}
    harness = harness_of(use_wandb=True, wandb_kwargs=options)
    harness.log_current_step({"loss": 1.0})
    assert sent == [{"project": "mine", "mode": "offline", "config": {"lr": 1}}, {"loss": 1.0}]
    assert options["project"] == "mine"
    # A trainer sends its configuration.
    monkeypatch.setenv("WANDB_MODE", "offline")
    problem = WordProblem()
    config = TrainingConfiguration(lr=0.25, num_episodes_per_experience=2)
    Trainer(config, ASTSampler(problem, PROMPTS), DPO(problem), use_wandb=True)
    assert sent[2]["config"].items() >= {"lr": 0.25, "num_episodes_per_experience": 2}.items()


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
    for given in ("sampler", "environment"):
        trainer = Trainer(TrainingConfiguration(), algorithm=DPO(problem), **{given: sampler})
        assert trainer.harness.sampler is trainer.harness.environment is sampler
    for build in (DPO, PPO, ASTSampler):
        with pytest.raises(ConfigurationError, match="problem"):
            build()
    with pytest.raises(ConfigurationError, match="system"):
        DPO(problem, problem=problem)
    with pytest.raises(ConfigurationError, match="sampler"):
        ASTEvaluator(seeds=PROMPTS)


# ---- configuration and trainer


def test_the_optimizer_is_the_named_one_and_learns(learning: Learning) -> None:
    problem = WordProblem(ppl_weight=0.0)
    config = TrainingConfiguration(
        optimizer="rmsprop", lr=0.3, training_steps=15, batch_size=16, seed=learning.seed
    )
    trainer = Trainer(config, ASTSampler(problem, PROMPTS), DPO(problem, beta=1.0))
    assert isinstance(trainer.optimizer, torch.optim.RMSprop)
    trainer.train()
    learning.check(says(problem, "silly"), threshold=0.25, best=1.0)


@pytest.mark.parametrize(
    ("given", "fact"),
    [({"optimizer": "adamm"}, r"optimizer.*'adam'"), ({"batchsize": 4}, "'minibatch_size'")],
)
def test_a_wrong_field_is_a_typed_error_and_a_value_error(given: dict[str, Any], fact: str) -> None:
    with pytest.raises(ParameterError, match=fact) as caught:
        TrainingConfiguration(**given)
    assert isinstance(caught.value, ValueError)


def test_fields_stay_checked_when_they_are_changed_and_others_may_be_set() -> None:
    config = TrainingConfiguration(seed=0)
    config.training_steps = 7
    config.eval_every = 3
    config.minibatch_size = 5
    for name, value, fact in (("batch_size", 0, "minibatch_size"), ("lr", -1.0, "lr")):
        with pytest.raises(ParameterError, match=fact):
            setattr(config, name, value)
    assert (config.training_steps, config.num_iterations, config.eval_every) == (7, 7, 3)
    assert config.batch_size == 5
    with pytest.raises(ParameterError, match="batch_size"):
        TrainingConfiguration(batch_size=3, minibatch_size=4)
    assert TrainingConfiguration().lr == 1e-5


def test_seed_zero_is_a_seed_of_training_and_another_gives_other_weights() -> None:
    def weights(seed: int) -> list[float]:
        torch.manual_seed(torch.seed())
        trainer = trainer_of(lr=0.1, seed=seed)
        trainer.train()
        logits: list[float] = trainer.harness.sampler.system.attacker.logits.tolist()
        return logits

    assert weights(0) == weights(0) != weights(1)


def test_a_custom_optimizer_is_used_at_its_own_rate() -> None:
    problem = WordProblem()
    trainer = trainer_of(problem, lr=1e-5)
    trainer.optimizer = torch.optim.SGD(problem.parameters(), lr=0.5)
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.5)
    assert problem.attacker.logits.abs().max() > 1e-3


def test_training_goes_on_where_it_was_when_there_are_more_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = trainer_of(training_steps=1)
    trainer.train()
    trainer.config.training_steps = 3
    trainer.train()
    assert trainer._loop.state.iteration == 3
    trainer.train()
    assert "3 of 3" in caplog.text


def test_a_replaced_or_wrapped_harness_is_used_in_training() -> None:
    class Counting(Harness):
        num_experiences = num_steps = 0

        def experience(self, seed: int | None = None) -> Any:
            self.num_experiences += 1
            return super().experience(seed)

        def step(self, batch: Any) -> Any:
            self.num_steps += 1
            loss, logs = super().step(batch)
            return 0.0 * loss, logs

    def logits(trainer: Trainer) -> torch.Tensor:
        return trainer.harness.sampler.system.attacker.logits.detach()

    options = {"lr": 0.3, "training_steps": 4}
    trainer = trainer_of(**options)
    initial, plain = logits(trainer).clone(), trainer.harness
    trainer.harness = Counting(plain.sampler, plain.algorithm, 2, config=trainer.config)
    trainer.train()
    assert trainer.harness.num_experiences == 4
    assert trainer.harness.num_steps == trainer._global_step_counter > 4
    # The replacement's loss has no gradient, so nothing was learnt.
    assert torch.equal(logits(trainer), initial)

    seen: list[int] = []
    trainer, same = trainer_of(**options), trainer_of(**options)
    step = trainer.harness.step
    trainer.harness.step = lambda batch: (  # type: ignore[method-assign]
        seen.append(trainer._global_step_counter) or step(batch)
    )
    trainer.train()
    same.train()
    assert seen == list(range(1, trainer._global_step_counter + 1))
    assert torch.equal(logits(trainer), logits(same))
    assert not torch.equal(logits(trainer), initial)


def test_batches_are_counted_before_their_step_also_where_several_make_one() -> None:
    trainer = trainer_of(gradient_accumulation_steps=3, batch_size=1, num_episodes_per_experience=8)
    trainer.train()
    steps = trainer._loop.state.num_optimizer_steps
    assert 3 * steps - 4 <= trainer._global_step_counter <= 3 * steps
    assert trainer._global_step_counter > steps


# ---- parts that are replaced


class Counting(ASTSampler):
    """Counts its own rollouts."""

    num_rollouts = 0

    def rollout(self, seed: int | None = None) -> Any:
        self.num_rollouts += 1
        return super().rollout(seed)


def test_parts_of_a_trainers_harness_are_read_at_each_iteration() -> None:
    trainer = trainer_of(training_steps=1)
    problem = trainer.harness.sampler.system
    steps: list[str] = []

    class Recording(IPO):
        def flatten(self, graph: Any) -> Any:
            steps.append("flatten")
            return super().flatten(graph)

        def step(self, batch: Any) -> Any:
            steps.append("step")
            return super().step(batch)

    sampler = Counting(problem, ["hello"], tree_width=3, tree_depth=1)
    trainer.harness.algorithm = Recording(problem)
    trainer.harness.sampler = sampler
    trainer.harness.num_episodes_per_experience = 5
    trainer.train()
    assert sampler.num_rollouts == steps.count("flatten") == 5
    assert set(steps) == {"flatten", "step"}


@pytest.mark.parametrize("num_episodes", [1, 3])
def test_methods_that_are_replaced_on_an_object_are_called(num_episodes: int) -> None:
    trainer = trainer_of(training_steps=1, num_episodes_per_experience=num_episodes)
    sampler, algorithm = trainer.harness.sampler, trainer.harness.algorithm
    calls: list[str] = []

    def counted(owner: Any, method: str) -> None:
        original = getattr(owner, method)

        def call(*args: Any, **options: Any) -> Any:
            calls.append(method)
            return original(*args, **options)

        setattr(owner, method, call)

    counted(sampler, "rollout")
    for method in ("flatten", "collate_fn", "step"):
        counted(algorithm, method)
    for method in ("advance", "reward", "get_tester_logprobs", "rollout_prompt_with_auditor"):
        counted(sampler.system, method)
    trainer.train()
    assert {calls.count(method) for method in ("rollout", "flatten")} == {num_episodes}
    assert set(calls) == {
        *("rollout", "flatten", "collate_fn", "step", "advance", "reward"),
        *("get_tester_logprobs", "rollout_prompt_with_auditor"),
    }


def test_a_bare_harness_uses_one_algorithm_for_samples_batches_and_losses() -> None:
    class First(DPO):
        pass

    class Second(DPO):
        """Marks its samples, and accepts no others."""

        def flatten(self, graph: Any) -> Any:
            return [("second", step) for step in super().flatten(graph)]

        @staticmethod
        def collate_fn(batch: Any) -> Any:
            assert {name for name, _ in batch} == {"second"}
            return DPO.collate_fn([step for _, step in batch])

    problem = WordProblem()
    harness = Harness(ASTSampler(problem, PROMPTS), First(problem), 3)
    before = harness.experience(seed=0)
    harness.algorithm = Second(problem)
    # The first experience is collated by its own algorithm, also after the exchange.
    first, second = (
        sorted(probe for batch in experience for probe in batch.suffix_pos)
        for experience in (before, harness.experience(seed=0))
    )
    assert first == second
    harness.dataloader_kwargs = {"batch_size": 2, "shuffle": False}
    assert {len(batch.prefixes) for batch in list(harness.experience(seed=0))[:-1]} == {2}
    harness.dataloader_kwargs = {"num_workers": 1}
    with pytest.raises(ConfigurationError, match="num_workers"):
        harness.experience()


def test_replaced_parts_must_belong_together_and_be_trained() -> None:
    trainer = trainer_of()
    other = WordProblem()
    trainer.harness.algorithm = DPO(other)
    with pytest.raises(ConfigurationError, match="WordProblem"):
        trainer.train()
    trainer.harness.sampler = ASTSampler(other, PROMPTS)
    with pytest.raises(ConfigurationError, match="optimizer"):
        trainer.train()
    trainer.optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    trainer.train()
    assert other.attacker.logits.abs().sum() > 0


def test_the_loss_of_a_step_can_be_taken_as_in_the_oldest_versions() -> None:
    problem = WordProblem()
    harness = Harness(ASTSampler(problem, PROMPTS), DPO(problem), batch_size=4)
    (size,) = {len(batch.prefixes) for batch in list(harness.experience(seed=0))[:-1]}
    assert size == 4
    result = harness.step(next(harness.experience(seed=0)))
    result.backward()
    assert result.loss is result[0]
    assert problem.attacker.logits.grad.abs().sum() > 0
