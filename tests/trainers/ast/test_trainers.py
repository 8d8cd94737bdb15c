"""Every AST trainer learns, and its parameters have an effect."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nip_astra.errors import ConfigurationError, DataError, ParameterError
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.scorers.base import SCORERS, Scorer, register_scorer
from nip_astra.trainers.ast.base import AstState
from nip_astra.trainers.ast.sft import best_of, probes_that_worked
from tests.kit.experiments import ast_trainer
from tests.kit.learning import Learning
from tests.kit.tiny import experience_of, learn, write_scenario

TRAINERS = ("ast_dpo", "ast_ipo", "ast_simpo", "ast_ppo", "ast_grpo", "ast_reinforce", "ast_sft")


@pytest.fixture
def _toy_scorers() -> Iterator[None]:
    snapshot = SCORERS.snapshot()

    @register_scorer("rhymes")
    class Rhymes(Scorer):
        """1 for a text whose first word is one of three, which a random model seldom says."""

        def _score(self, texts: Sequence[str]) -> list[float]:
            return [float(text.split(" ")[0] in ("cat", "mat", "sat")) for text in texts]

    @register_scorer("unsure")
    class Unsure(Scorer):
        """No verdict on texts of an odd number of words, an error where there are four."""

        def _score(self, texts: Sequence[str]) -> list[float | None]:
            result: list[float | None] = []
            for text in texts:
                count = len(text.split())
                if count == 4:
                    raise ArithmeticError("four words")
                result.append(None if count % 2 else min(count / 8, 1.0))
            return result

    yield
    SCORERS.restore(snapshot)


@pytest.mark.usefixtures("_toy_scorers")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ast_dpo", "ast_dpo.beta=0.05 training.minibatch_size=16"),
        ("ast_ipo", "ast_ipo.beta=0.03"),
        ("ast_simpo", "ast_simpo.beta=1.0 ast_simpo.margin=2.0 ast_simpo.length_normalised=false"),
        (
            "ast_ppo",
            "training.num_epochs=4 training.lr=2e-2 training.num_iterations=16 ast_ppo.kl.weight=0",
        ),
        ("ast_grpo", "ast_grpo.kl.weight=0.0 training.num_iterations=16"),
        ("ast_reinforce", "ast_reinforce.kl_mix=0.01"),
        ("ast_sft", "ast_sft.min_score=0.0 ast_sft.num_best=16 training.num_iterations=30"),
        # From an older attacker's rollout.
        ("ast_grpo", "ast_grpo.kl.weight=0.0 ast_grpo.max_staleness=1"),
        pytest.param(
            *("ast_reinforce", "ast_reinforce.kl_mix=0.01 ast_reinforce.max_staleness=1"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_attacker_learns_rewarded_probes(
    tmp_path: Path, learning: Learning, name: str, options: str
) -> None:
    width = 1 if name == "ast_ppo" else 4
    scenario = write_scenario(
        tmp_path,
        scorer={"_type": "rhymes"},
        reward={"w_response": 0.0, "w_combined": 1.0, "w_likelihood": 0.0},
        tree_width=width,
        tree_depth=1,
    )
    sizes = (f"num_episodes_per_experience={64 // width}", "minibatch_size=64")
    lr = 1e-2 if name in ("ast_ppo", "ast_sft") else 2e-2
    common = [f"training.{one}" for one in ("num_iterations=12", f"lr={lr}", *sizes)]
    trainer = ast_trainer(name, scenario, *common, *options.split(), f"seed={learning.seed}")

    def measure_share_of_rhymes() -> float:
        return float(experience_of(trainer, 1000).tree.nodes["combined_score"].mean())

    learning.check(measure_share_of_rhymes(), threshold=0.5, best=0.0)
    trainer.train()
    # One of the four prompts may keep another first word.
    learning.check(measure_share_of_rhymes(), threshold=0.65, best=1.0)


# As on the command line, below the section of the trainer.
CHANGES = {
    "ast_dpo": "beta=2.0 min_reward_difference=0.3 min_score_difference=0.5 min_chosen_score=0.6 "
    "loss=hinge divergence=js alpha=0.1 label_smoothing=0.3 length_normalised=true "
    "credit.kind=best_child",
    "ast_ipo": "beta=2.0 length_normalised=true credit.kind=mean_child",
    "ast_simpo": "loss=orpo orpo_weight=2.0 beta=0.5 length_normalised=false margin=3.0",
    "ast_ppo": "loss=importance_sampling clip_low=0.001 clip_high=0.001 "
    "loss_options.temperature_negative=3.0 gamma=0.0 lam=0.1 whiten_advantages=false "
    "value_weight=5.0 value_clip_range=0.001 value_lr_factor=100.0 value_trains_model=true "
    "kl.weight=1.0 kl.value=k3 kl.gradient=k3 kl.place=loss kl.target=0.01 kl.horizon=10.0 "
    "entropy_weight=0.5",
    "ast_grpo": "variant=dr_grpo clip_low=0.0001 clip_high=0.0001 loss=importance_sampling "
    "loss_options.temperature_negative=3.0 reduction=sequence_sum baseline=leave_one_out "
    "scale=batch std_epsilon=1.0 kl.weight=1.0 kl.gradient=k3 kl.target=0.01 kl.horizon=10.0 "
    "entropy_weight=0.5 credit.kind=best_child",
    "ast_reinforce": "kl_mix=0.9 baseline=siblings divides_by_std=false std_epsilon=1.0 "
    "kl_estimator=token_k2 entropy_weight=0.5 credit.kind=mean_child",
    "ast_sft": "num_best=2 num_samples=3 min_score=0.6 credit.kind=best_child",
}
OF_BEHAVIOUR = (
    " behaviour.logprobs=raw behaviour.importance_weights=token "
    "behaviour.max_importance_weight=0.3 staleness_weights=sequence max_staleness_weight=0.3"
)
# Without these the parameter has no effect.
CONTEXT: dict[str, tuple[str, ...]] = {
    "ast_dpo.alpha": ("ast_dpo.divergence=alpha",),
    "ast_dpo.label_smoothing": ("ast_dpo.loss=robust",),
    "ast_ipo.credit.kind": ("training.num_episodes_per_experience=12",),
    "ast_simpo.orpo_weight": ("ast_simpo.loss=orpo",),
    "ast_ppo.kl.horizon": ("ast_ppo.kl.target=0.01",),
    "ast_ppo.kl.gradient": ("ast_ppo.kl.place=loss",),
    "ast_ppo.loss_options.temperature_negative": ("ast_ppo.loss=sapo",),
    "ast_grpo.kl.horizon": ("ast_grpo.kl.target=0.01",),
    "ast_grpo.loss_options.temperature_negative": ("ast_grpo.loss=sapo",),
    "ast_sft.credit.kind": ("ast_sft.num_best=4",),
}
TEMPERED = "ast_chat.attacker.temperature=0.5"
for _name in ("ast_ppo", "ast_grpo", "ast_reinforce"):
    CHANGES[_name] += OF_BEHAVIOUR
    _behaviour, _raw = f"{_name}.behaviour", f"{_name}.behaviour.logprobs=raw"
    CONTEXT |= {
        f"{_behaviour}.logprobs": (TEMPERED,),
        f"{_behaviour}.importance_weights": (TEMPERED, _raw),
        f"{_behaviour}.max_importance_weight": (
            *(TEMPERED, _raw, f"{_behaviour}.importance_weights=sequence"),
        ),
        f"{_name}.staleness_weights": (f"{_name}.max_staleness=1",),
        f"{_name}.max_staleness_weight": (f"{_name}.max_staleness=1",),
    }


@cache
def _outcome(name: str, scenario: Path, *overrides: str) -> list[float]:
    # Several steps on one rollout, so that clipping has ratios to clip.
    short = ("num_iterations=1", "num_epochs=2", "lr=2e-2", "minibatch_size=8")
    trainer = ast_trainer(name, scenario, *(f"training.{part}" for part in short), *overrides)
    learn(trainer)
    return [parameter.sum().item() for parameter in trainer.learned]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (name, change)
        for name, changes in CHANGES.items()
        for change in (*changes.split(), "max_staleness=1")
    ],
)
def test_every_parameter_of_a_trainer_acts(tiny_scenario: Path, name: str, change: str) -> None:
    field = change.partition("=")[0]
    context = CONTEXT.get(f"{name}.{field}", ())
    # A single small rollout comes from the reference itself, and has few pairs.
    if field.partition(".")[0] in ("kl", "kl_mix", "kl_estimator", "credit") or "stale" in field:
        context += ("training.num_iterations=2",)
    outcome = _outcome(name, tiny_scenario, *context)
    assert outcome != _outcome(name, tiny_scenario, *context, f"{name}.{change}")


OF_TRAINING = (
    "lr=1e-2 minibatch_size=2 optimizer=sgd weight_decay=0.5 batch_order=by_episode "
    "gradient_accumulation_steps=2 num_iterations=2 num_episodes_per_experience=4 num_epochs=2 "
    "max_grad_norm=0.01 lr_schedule=linear num_warmup_steps=10 eval_period=1 "
    "schedules_steps=true decays_vectors=false "
    "dev_metric=mean_score early_stopping_patience=1"
)
OF_SCENARIO = (
    "tree_width=3 tree_depth=1 failure_threshold=0.9 reward.w_response=3.0 reward.w_combined=0.0 "
    "reward.w_likelihood=2.0 reward.likelihood_model=target attacker.max_new_tokens=3 "
    "attacker.min_new_tokens=4 attacker.temperature=0.3 attacker.top_k=2 attacker.top_p=0.3 "
    "attacker.preamble=hello attacker.format=plain target.max_new_tokens=2 "
    "target.temperature=0.0 scorer.label=civil"
)
SELECTS = ("training.num_iterations=6", "training.eval_period=1", "training.lr=1e-2")
CONTEXT |= {"training.dev_metric": SELECTS, "training.early_stopping_patience": SELECTS}
CONTEXT["training.lr_schedule"] = ("training.num_iterations=2",)
# Of two steps the first has no rate.
CONTEXT["training.schedules_steps"] = ("training.num_warmup_steps=2", "training.num_iterations=2")
CONTEXT["training.decays_vectors"] = ("training.weight_decay=0.5",)


@cache
def _weights_and_results(scenario: Path, *overrides: str) -> tuple[Any, ...]:
    short = ("training.minibatch_size=3", "training.num_iterations=1")
    trainer = ast_trainer("ast_dpo", scenario, *short, *overrides)
    trainer.train()
    return [p.sum().item() for p in trainer.policy.parameters()], trainer.results


def test_every_field_of_the_training_configuration_has_a_change_to_test() -> None:
    fields = {change.partition("=")[0] for change in OF_TRAINING.split()}
    assert fields == set(TrainingConfiguration.model_fields)


@pytest.mark.parametrize(
    "change",
    [
        "seed=1",
        *(f"training.{change}" for change in OF_TRAINING.split()),
        *(f"ast_chat.{change}" for change in OF_SCENARIO.split()),
    ],
)
def test_every_parameter_of_the_experiment_acts(tiny_scenario: Path, change: str) -> None:
    context = CONTEXT.get(change.partition("=")[0], ())
    outcome = _weights_and_results(tiny_scenario, *context)
    assert outcome != _weights_and_results(tiny_scenario, *context, change)


@pytest.mark.parametrize("variant", ["grpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo"])
def test_each_variant_of_grpo_takes_steps_and_records_its_options(
    tiny_scenario: Path, variant: str
) -> None:
    options = (f"ast_grpo.variant={variant}", "training.num_iterations=1")
    trainer = ast_trainer("ast_grpo", tiny_scenario, *options)
    learn(trainer)
    assert trainer.state.num_optimizer_steps > 0
    objective = trainer.results["objective"]
    assert objective["variant"] == variant
    assert {"std_epsilon", "reduction", "zero_variance", "source"} <= set(objective)
    named = ast_trainer("ast_grpo", tiny_scenario, *options, f"ast_grpo.loss={objective['loss']}")
    assert named.results["objective"] == objective, "the variant's own loss changes nothing"


@pytest.mark.parametrize(
    ("overrides", "fact"),
    [
        ("ast_grpo.scale=group ast_chat.tree_width=1", "tree_width is 1.*ast_ppo or ast_reinforce"),
        ("ast_reinforce.baseline=siblings ast_chat.tree_width=1", "tree_width is 1.*iteration"),
        ("ast_ppo.kl.gradient=k1 ast_ppo.kl.place=loss", r"kl\.gradient"),
        ("ast_grpo.kl.gradient=k1 ast_grpo.kl.weight=0.1", r"kl\.gradient"),
        ("ast_dpo.beta=1.0 training.early_stopping_patience=2", "eval_period is 0"),
        ("ast_dpo.loss=hinge ast_dpo.label_smoothing=0.1", "label_smoothing.*hinge"),
        ("ast_simpo.loss=orpo ast_simpo.length_normalised=false", "length_normalised"),
    ],
)
def test_what_a_trainer_cannot_use_is_refused(
    tiny_scenario: Path, overrides: str, fact: str
) -> None:
    error = ConfigurationError if "tree_width" in fact else ParameterError
    with pytest.raises(error, match=fact):
        ast_trainer(overrides.partition(".")[0], tiny_scenario, *overrides.split())


def test_training_ends_when_dev_evaluations_bring_nothing_better(tiny_scenario: Path) -> None:
    # At this rate no text changes: every dev evaluation after the first is a tie.
    values = ("num_iterations=40", "eval_period=1", "early_stopping_patience=2", "lr=1e-12")
    trainer = ast_trainer("ast_dpo", tiny_scenario, *(f"training.{value}" for value in values))
    trainer.train()
    assert trainer.state.iteration == 3
    assert trainer.results["training"]["stopped_early"] is True
    assert trainer.results["training"]["best_dev"]["metric"] == "mean_reward"


def test_an_evaluation_without_a_verdict_is_never_the_best() -> None:
    state = AstState()
    assert not state.count_evaluation(math.nan)
    assert state.count_evaluation(-1.0)
    assert not state.count_evaluation(math.nan)
    assert (state.best_dev_value, state.num_evals_since_best) == (-1.0, 1)


@pytest.mark.usefixtures("_toy_scorers")
@pytest.mark.parametrize("name", TRAINERS)
def test_nodes_without_a_verdict_are_counted_and_never_learnt_from(
    tmp_path: Path, name: str
) -> None:
    scenario = write_scenario(tmp_path, scorer={"_type": "unsure", "on_failure": "skip"})
    trainer = ast_trainer(name, scenario, "training.num_iterations=1")
    tree = experience_of(trainer).tree
    is_rated_N = ~tree.nodes["reward"].isnan()
    assert 0 < is_rated_N.sum() < tree.num_nodes
    trainer.train()
    assert trainer.state.num_optimizer_steps > 0
    assert all(torch.isfinite(parameter).all() for parameter in trainer.learned)
    metrics = trainer.evaluation.tree_metrics(tree)
    response_N = tree.nodes["response_score"]
    assert metrics["num_undetermined"] + metrics["num_scorer_errors"] >= response_N.isnan().sum()
    assert metrics["num_scorer_errors"] == tree.nodes["is_error"].sum() > 0
    assert metrics["mean_score"] == pytest.approx(float(response_N.nanmean()))


def test_given_probes_win_in_their_share_of_the_episodes(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    (tmp_path / "given.txt").write_text("silly cat\nstupid mat\n")
    supervision = f"ast_dpo.weak_supervision={{probes: {tmp_path / 'given.txt'}, share: 0.5}}"
    number = "training.num_episodes_per_experience=40"
    trainer = ast_trainer("ast_dpo", tiny_scenario, supervision, number)
    samples = experience_of(trainer).samples
    decode = trainer.policy.tokenizer.decode
    given = [
        sample
        for sample in samples
        if decode(sample["chosen"], skip_special_tokens=True) in ("silly cat", "stupid mat")
    ]
    assert 10 <= len(given) <= 30
    assert all(int(sample["chosen"][-1]) in trainer.policy.end_ids for sample in given)
    # An episode has only the given pair, or its own.
    episodes = Counter(int(sample["episode"]) for sample in samples)
    assert {episodes[int(sample["episode"])] for sample in given} == {1}
    policy_B, reference_B = trainer.logratios(trainer.collate_fn(samples))
    assert torch.allclose(policy_B, reference_B, atol=1e-4)


def test_supervised_training_imitates_a_given_file(tiny_scenario: Path, tmp_path: Path) -> None:
    (tmp_path / "given.txt").write_text("silly cat sat\n")
    values = (f"ast_sft.probes={tmp_path / 'given.txt'}", "ast_sft.min_score=0.5")
    values += ("training.num_iterations=25", "training.lr=1e-2", "ast_chat.tree_depth=1")
    trainer = ast_trainer("ast_sft", tiny_scenario, *values)
    trainer.train()
    assert set(experience_of(trainer, 99).tree.probes) == {"silly cat sat"}


def test_supervised_training_learns_each_probe_of_a_conversation_in_its_context(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    turns = ["silly cat", "fine thanks", "stupid mat", "good day", "the cat sat"]
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": text}
        for index, text in enumerate(turns)
    ]
    (tmp_path / "given.jsonl").write_text(json.dumps({"prompt": messages}))
    values = (f"ast_sft.probes={tmp_path / 'given.jsonl'}", "ast_sft.min_score=0.5")
    trainer = ast_trainer("ast_sft", tiny_scenario, *values)
    played = experience_of(trainer)
    tokenizer = trainer.policy.tokenizer
    first = [sample for sample in played.samples if int(sample["episode"]) == 0]
    probes = [tokenizer.decode(s["probe"], skip_special_tokens=True) for s in first]
    assert probes == turns[::2]
    contexts = [tokenizer.decode(s["context"], skip_special_tokens=True) for s in first]
    opening = played.tree.prompts[0]
    heard = [[opening], [opening, *turns[:2]], [opening, *turns[:4]]]
    assert [" ".join(context.split()) for context in contexts] == [" ".join(t) for t in heard]
    assert len(played.samples) == 3 * played.tree.num_episodes


def test_given_probes_of_several_messages_are_refused_where_only_one_is_learned(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    row = [{"role": role, "content": "silly cat"} for role in ("user", "assistant", "user")]
    (tmp_path / "given.jsonl").write_text(json.dumps({"prompt": row}))
    supervision = f"{{probes: {tmp_path / 'given.jsonl'}, share: 0.5}}"
    with pytest.raises(DataError, match="probe 1 "):
        ast_trainer("ast_dpo", tiny_scenario, f"ast_dpo.weak_supervision={supervision}")
    (tmp_path / "given.jsonl").write_text(json.dumps({"prompt": row[1:]}))
    values = (f"ast_sft.probes={tmp_path / 'given.jsonl'}", "ast_sft.min_score=0.5")
    with pytest.raises(DataError, match="assistant"):
        ast_trainer("ast_sft", tiny_scenario, *values)


def test_the_best_probes_so_far_are_kept_once_and_ranked(tiny_scenario: Path) -> None:
    trainer = ast_trainer("ast_sft", tiny_scenario, "ast_sft.num_best=5")
    trees = [experience_of(trainer, i).tree for i in (0, 0, 1)]
    rewards = torch.cat([tree.nodes["credit"] for tree in trees[1:]])
    kept = [float(sample["credit"]) for sample in trainer.trainer_state()["best"]]
    assert kept == sorted(kept, reverse=True)
    assert len(kept) == 5
    assert kept[0] == pytest.approx(float(rewards.max()))


BETA = 0.5
AT_THE_REFERENCE = {
    "ast_dpo.loss=sigmoid": math.log(2),
    "ast_dpo.loss=sppo": 2 * (0.5 / BETA) ** 2,
    "ast_dpo.loss=kto": 0.5,
    "ast_dpo.divergence=js": math.log(2),
}
"""By hand, where policy and reference are one."""


@pytest.mark.parametrize("choice", [*AT_THE_REFERENCE, "ast_simpo.loss=orpo"])
def test_a_step_separates_chosen_from_rejected(tiny_scenario: Path, choice: str) -> None:
    name = choice.partition(".")[0]
    beta = f"{name}.beta={BETA}" if name == "ast_dpo" else "training.lr=1e-2"
    common = ("training.optimizer=sgd", "training.lr=1e-2", "training.max_grad_norm=0.1")
    trainer = ast_trainer(name, tiny_scenario, choice, beta, *common)
    with torch.no_grad():
        batch = trainer.collate_fn(experience_of(trainer).samples)

    def margin() -> float:
        with torch.no_grad():
            chosen_B, rejected_B = trainer.pair_logprobs(batch)  # type: ignore[attr-defined]
        return float((chosen_B - rejected_B).mean())

    before = margin()
    loss = trainer.loss(batch).loss.item()
    if choice in AT_THE_REFERENCE:
        assert loss == pytest.approx(AT_THE_REFERENCE[choice], abs=1e-4)
    for _ in range(3):
        trainer._optimizer_step([batch])
    assert margin() > before + 1e-4
    assert trainer.loss(batch).loss.item() < loss


@pytest.mark.parametrize(
    ("samples", "number", "kept"),
    [
        ([], 3, []),
        ([(1, 1, 0.2), (2, 2, 0.9), (3, 3, 0.5)], 2, [(2, 2, 0.9), (3, 3, 0.5)]),
        ([(1, 1, 0.2), (2, 2, 0.9)], 9, [(2, 2, 0.9), (1, 1, 0.2)]),
        # Contexts take turns among equals.
        (
            [(1, 1, 0.5), (1, 2, 0.5), (1, 3, 0.5), (2, 1, 0.5)],
            *(3, [(1, 1, 0.5), (2, 1, 0.5), (1, 2, 0.5)]),
        ),
        # A probe is kept once in its context, as it was last sampled.
        ([(1, 1, 0.9), (2, 1, 0.5), (1, 1, 0.1)], 3, [(2, 1, 0.5), (1, 1, 0.1)]),
    ],
)
def test_the_best_of_some_probes_are_those_of_the_table(
    samples: list[tuple[int, int, float]], number: int, kept: list[tuple[int, int, float]]
) -> None:
    """Samples are of a context, a probe and a credit."""
    names = ("context", "probe", "credit")
    given = [
        {name: torch.tensor([value]) for name, value in zip(names, sample, strict=True)}
        for sample in samples
    ]
    best = [[float(sample[name]) for name in names] for sample in best_of(given, number)]
    assert best == [pytest.approx(sample) for sample in kept]


def test_successful_probes_have_their_tokens_and_a_credit() -> None:
    content = {
        "probe": torch.tensor([[5, 6], [7, 0], [8, 9], [4, 4]]),
        "probe_mask": torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]).bool(),
        "credit": torch.tensor([0.5, 0.25, math.nan, 1.0]),
    }
    tree: Any = SimpleNamespace(
        nodes=TensorDict(content, batch_size=[4]), context_of=lambda node: [1, 2]
    )
    samples = probes_that_worked(tree, torch.tensor([True, True, True, False]))
    assert [sample["probe"].tolist() for sample in samples] == [[5, 6], [7]]
    assert [sample["context"].tolist() for sample in samples] == [[1, 2], [1, 2]]
    assert [float(sample["credit"]) for sample in samples] == [0.5, 0.25]
