"""Runs without a parameter file: `nip-astra task` and `stress`, `train_task`, `stress_test`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nip_astra import recipes, stress_test, train_task
from nip_astra.errors import (
    ConfigurationError,
    DataError,
    ModelLoadError,
    ParameterError,
    UnknownNameError,
)
from nip_astra.evaluation.run_results import read_results
from nip_astra.language_models.sources import load_tokenizer
from nip_astra.parameters.content import content_root
from nip_astra.parameters.files import flatten
from nip_astra.parameters.parameters_base import TRL_OPTIONS
from nip_astra.recipes import named_rewards, stress_parameters, task_parameters
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rl_objectives.policy_losses import GROUP_VARIANTS
from nip_astra.tracking.run_lock import is_abandoned
from tests.kit.command_line import CommandLine, refused
from tests.kit.experiments import FAST, metrics_of
from tests.serve.running import pocket_service

POCKET = content_root() / "scenarios" / "pocket_chat" / "models"
MODEL = content_root() / "scenarios" / "arithmetic" / "models" / "policy"
REWARDS_FILE = """
def right(completions, answer, **kwargs):
    return [float(c.strip() == str(a)) for c, a in zip(completions, answer)]

async def brevity(completions, completion_ids, trainer_state, log_metric, **kwargs):
    log_metric("seen/step", trainer_state.global_step)
    return [None if len(ids) > 4 else -len(ids) / 10 for ids in completion_ids]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS_FILE)
    rows = [{"prompt": f"{n}+{n % 3}=", "answer": n + n % 3} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_one_command_trains_and_its_parameter_file_is_the_run(
    cli: CommandLine, folder: Path
) -> None:
    options = "--num-generations 4 --max_completion_length 5 --learning-rate 5e-4 --max-steps 2"
    line = (
        f"task --model {MODEL} --data rows.jsonl --reward rewards.py:right "
        f"--reward rewards.py:brevity --weights 1,0.5 {options} --run-id r "
        "--set training.num_episodes_per_experience=3"
    )
    printed = cli.ok(*line.split()).out
    assert "num_generations: --set self_hosted_grpo.group_size=4" in printed
    shown = printed.split("# as a parameter file:\n")[1].split("\n\n")[0]
    first = next(row for row in metrics_of(folder / "runs/r") if "rewards/right/mean" in row)
    assert first["rollout/num_trajectories"] == 12
    assert {"rewards/right/std", "rewards/brevity/mean", "seen/step"} <= first.keys()
    results = read_results(folder / "runs/r").results
    for when in ("before", "after"):
        assert results[when]["num_answers"] == 8
        assert 0 <= results[when]["rewards/right/mean"] <= 1
    # The printed file is the run's, except for values of other options.
    resolved = resolve_experiment(hyper_params=yaml.safe_load(shown))
    ran = yaml.safe_load((folder / "runs/r/hyper_parameters.yaml").read_text())
    again = dict(flatten(resolved.hyper_params.to_dict()))
    differing = {path for path, value in flatten(ran) if again.get(path) != value}
    assert differing == {"training.num_episodes_per_experience"}


@pytest.mark.usefixtures("no_plugins_left")
def test_five_lines_of_python_train(folder: Path) -> None:
    def short(completions: Any, **_: Any) -> list[float]:
        return [1.0 / (1 + len(completion)) for completion in completions]

    def first(completions: Any, prompts: Any, answer: Any, **_: Any) -> list[float]:
        assert prompts[0][0]["role"] == "user"
        pairs = zip(completions, answer, strict=True)
        return [float(completion[0]["content"].strip() == right) for completion, right in pairs]

    prompts = [[{"role": "user", "content": f"{n}+1="}] for n in range(9)]
    sizes = {"num_generations": 2, "max_completion_length": 4, "max_steps": 2}
    result = train_task(
        model=MODEL,
        data=[{"prompt": prompt, "answer": str(n + 1)} for n, prompt in enumerate(prompts)],
        rewards=[first, short, "exact"],
        weights=[1, 0.1, 0.5],
        run_id="p",
        progress=False,
        **sizes,
    )
    # Nine prompts are too few to hold any out.
    assert result.results["before"] == result.results["after"] == {}
    assert "held out" in result.results["warnings"][0]
    assert result.results["training"]["num_optimizer_steps"] > 0
    assert len(list(folder.glob("runs/data/*.jsonl"))) == 1


@pytest.mark.usefixtures("no_plugins_left")
@pytest.mark.parametrize(
    ("overrides", "has_accuracy"),
    [([], False), (["task.evaluation.success_reward=3"], True)],
)
def test_a_reward_in_characters_has_no_accuracy(
    cli: CommandLine, folder: Path, overrides: list[str], has_accuracy: bool
) -> None:
    def length(completions: Any, **_: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    result = train_task(
        model=MODEL,
        data="rows.jsonl",
        rewards=length,
        overrides=overrides,
        run_id="c",
        progress=False,
        num_generations=2,
        max_completion_length=4,
        max_steps=1,
    )
    for when in ("before", "after"):
        figures = result.results[when]
        assert ("accuracy" in figures) is has_accuracy
        assert ("num_correct" in figures) is has_accuracy
        assert figures["mean_reward"] > 1
    # Reports, evaluations and comparisons do without.
    cli.ok("report", "runs/c")
    evaluation = json.loads(cli.ok("evaluate", "runs/c", "--json").out)
    assert ("accuracy" in evaluation["figures"]) is has_accuracy
    shutil.copytree("runs/c", "runs/d")
    cli.ok("evaluate", "runs/d")
    comparison = json.loads(cli.ok("compare", "runs/c", "runs/d", "--json").out)
    (metrics,) = comparison["comparisons"].values()
    assert ("accuracy" in metrics) is has_accuracy


def task_values(**arguments: Any) -> Any:
    """The resolved hyper-parameters of a task run."""
    given = {"model": MODEL, "data": "rows.jsonl", "rewards": "rewards.py:right"} | arguments
    return resolve_experiment(hyper_params=task_parameters(**given).values).hyper_params


@pytest.mark.parametrize("algorithm", GROUP_VARIANTS)
def test_every_algorithm_gives_its_published_loss(folder: Path, algorithm: str) -> None:
    section = task_values(algorithm=algorithm).get("self_hosted_grpo")
    variant = GROUP_VARIANTS[algorithm]
    assert (section.baseline, section.scale) == (variant.baseline, variant.scale)
    assert section.policy_loss.loss == variant.loss
    assert section.policy_loss.reduction == variant.reduction


def test_options_of_trl_become_ours(folder: Path) -> None:
    given: dict[str, Any] = {"num_generations": 4, "max_completion_length": 7, "temperature": 0.9}
    given |= {"top_p": 0.8, "top_k": 5, "beta": 0.01, "epsilon": 0.1, "epsilon_high": 0.3}
    given |= {"loss_type": "dr_grpo", "scale_rewards": False, "mask_truncated_completions": True}
    given |= {"learning_rate": 1e-4, "warmup_steps": 3, "max_steps": 11, "max_grad_norm": 0.5}
    given |= {"weight_decay": 0.01, "per_device_train_batch_size": 4, "delta": 2.0}
    given |= {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}
    given |= {"importance_sampling_level": "token", "use_bias_correction_kl": False}
    own_losses = ("sapo", "vespo")
    assert given.keys() == {name for name in TRL_OPTIONS if not name.startswith(own_losses)}
    hyper_params = task_values(options=given)
    expected = given | {"loss_type": "ppo", "importance_sampling_level": "ppo"}
    expected |= {"scale_rewards": "none", "delta": {"dual_clip": 2.0}}
    for name in given:
        assert hyper_params.get(TRL_OPTIONS[name]) == expected[name]
    assert hyper_params.get("self_hosted_grpo.policy_loss.reduction") == "sum_over_length"
    assert hyper_params.get("self_hosted_grpo.policy_loss.logprobs") == "tempered"
    # A clip range is of both sides unless the upper is given.
    loss = task_values(options={"epsilon": 0.1}).get("self_hosted_grpo.policy_loss")
    assert (loss.clip_low, loss.clip_high) == (0.1, 0.1)
    sapo = {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0}
    loss = task_values(options=sapo | {"loss_type": "sapo"}).get("self_hosted_grpo.policy_loss")
    assert loss.chosen_loss().options == {"temperature_positive": 0.5, "temperature_negative": 2.0}
    vespo = {name: float(number) for number, name in enumerate(TRL_OPTIONS) if "vespo" in name}
    loss = task_values(options=vespo | {"loss_type": "vespo"}).get("self_hosted_grpo.policy_loss")
    assert sorted(loss.chosen_loss().options.values()) == sorted(vespo.values())


@pytest.mark.parametrize(
    ("options", "num_problems", "num_minibatches"),
    [
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}, 4, 4),
        ({"gradient_accumulation_steps": 4, "num_generations": 16}, 2, 4),
        ({"per_device_train_batch_size": 32}, 4, 1),
        # Without a batch of TRL's, one step on the completions of eight problems.
        ({}, 8, 2),
        ({"num_generations": 4}, 8, 1),
    ],
)
def test_each_optimizer_step_of_a_task_is_on_completions_of_its_own_weights(
    folder: Path, options: dict[str, Any], num_problems: int, num_minibatches: int
) -> None:
    hyper_params = task_values(options=options | {"max_steps": 5})
    training = hyper_params.training
    assert training.num_iterations == 5
    assert training.num_episodes_per_experience == num_problems
    assert training.gradient_accumulation_steps == num_minibatches
    rows = num_problems * hyper_params.get("self_hosted_grpo.group_size")
    assert rows <= training.minibatch_size * num_minibatches


def test_elsewhere_a_name_of_trl_is_answered_with_ours() -> None:
    for name in ("max_steps", "num_generations", "epsilon", "beta"):
        with pytest.raises(ParameterError, match=TRL_OPTIONS[name]):
            resolve_experiment(trainer="self_hosted_grpo", overrides=[f"training.{name}=1"])


def test_rewards_are_named_by_function_scorer_or_file(folder: Path) -> None:
    (folder / "mine.yaml").write_text("_type: profanity\n")
    own = str(folder / "rewards.py")
    assert named_rewards(["rewards.py:right", "exact", "profanity", "mine.yaml"], [1, 2, 1, 1]) == {
        "right": {"function": f"{own}:right"},
        "exact": {"function": "exact", "weight": 2},
        "profanity": {"scorer": {"_type": "profanity"}},
        "mine": {"scorer": {"_type": "profanity"}},
    }
    trl = pytest.importorskip("trl.rewards")
    assert named_rewards(trl.think_format_reward) == {
        "think_format_reward": {"function": "trl.rewards.format_rewards:think_format_reward"}
    }


OF_RECIPE: dict[Callable[..., Any], dict[str, Any]] = {
    train_task: {"model": MODEL, "data": "rows.jsonl", "rewards": "exact"},
    stress_test: {"scorer": "profanity", "target": POCKET / "target"},
}


@pytest.mark.parametrize(
    ("recipe", "mistake", "error"),
    [
        (train_task, {"rewards": []}, ConfigurationError),
        (train_task, {"rewards": "rigth"}, UnknownNameError),
        (train_task, {"weights": [1, 2]}, ConfigurationError),
        (train_task, {"algorithm": "gropo"}, UnknownNameError),
        (train_task, {"loss_type": "grpoo"}, UnknownNameError),
        (train_task, {"loss_type": "sapo", "epsilon": 0.1}, ConfigurationError),
        (train_task, {"loss_type": "cispo", "epsilon_high": 0}, ConfigurationError),
        (train_task, {"loss_type": "cispo", "delta": 2.0}, ConfigurationError),
        (
            train_task,
            {"loss_type": "sapo", "importance_sampling_level": "sequence"},
            ConfigurationError,
        ),
        (train_task, {"importance_sampling_level": "row"}, UnknownNameError),
        (train_task, {"lr_scheduler_type": "polynomial"}, UnknownNameError),
        (train_task, {"lr_scheduler_type": "constant", "warmup_steps": 2}, ConfigurationError),
        (train_task, {"per_device_train_batch_size": 3}, ConfigurationError),
        (train_task, {"use_bias_correction_kl": False}, ConfigurationError),
        (train_task, {"beta": "much"}, ConfigurationError),
        (train_task, {"scale_rewards": "some"}, UnknownNameError),
        (train_task, {"num_generation": 3}, ConfigurationError),
        (train_task, {"max_steps": "many"}, ConfigurationError),
        (train_task, {"data": 3}, DataError),
        (train_task, {"data": [{"prompt": {1, 2}}]}, DataError),
        (train_task, {"data": "none.jsonl"}, ConfigurationError),
        (stress_test, {"target": "http://127.0.0.1:1/v1"}, ConfigurationError),
        (stress_test, {"target_model": "m"}, ConfigurationError),
        (stress_test, {"scorer": "rudeness"}, UnknownNameError),
        (stress_test, {"scorer": "exact"}, ConfigurationError),
        (stress_test, {"target": "./nowhere"}, ModelLoadError),
        (stress_test, {"trainer": "vanilla_ppo"}, ConfigurationError),
    ],
)
def test_mistakes_are_typed_errors_and_leave_no_run(
    folder: Path, recipe: Callable[..., Any], mistake: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        recipe(**OF_RECIPE[recipe] | mistake, progress=False)
    assert not [path for path in folder.glob("runs/*") if path.name != "data"]


def test_a_mistake_of_the_command_is_refused(cli: CommandLine, folder: Path) -> None:
    line = f"task --model {MODEL} --data rows.jsonl --reward exact --weights high"
    refused(cli(*line.split()))
    with pytest.raises(UnknownNameError):
        task_values(options={"num_generation": 2})


@pytest.mark.usefixtures("no_plugins_left")
def test_a_reward_that_a_plugin_registers_is_given_by_name(cli: CommandLine, folder: Path) -> None:
    cli.write(
        "mine.py",
        """
        import nip_astra as na

        @na.register_reward("shorter")
        def shorter(completions, **columns):
            return [-float(len(completion)) for completion in completions]
        """,
    )
    line = f"task --model {MODEL} --data rows.jsonl --reward shorter --num-generations 2"
    refused(cli(*line.split()))
    cli.ok(*line.split(), "--plugin", "mine.py", "--max-completion-length", "5", "--dry-run")


# ---- stress tests

SHORT = (
    *(*FAST, "training.num_iterations=1", "training.num_episodes_per_experience=1"),
    *("training.minibatch_size=4", "ast_chat.tree_depth=2"),
    "ast_chat.evaluation.labelled_responses=null",
)


def test_one_command_stresses_a_model_and_prints_the_cost_first(
    cli: CommandLine, folder: Path
) -> None:
    (folder / "rude.yaml").write_text(
        f"_type: classifier\nmodel: {POCKET / 'scorer'}\nlabel: rude\n"
    )
    sets = " ".join(f"--set {one}" for one in SHORT)
    line = f"stress --target {POCKET / 'target'} --scorer rude.yaml --run-id s {sets}"
    assert "training target queries" in cli.ok(*f"{line} --dry-run".split()).out
    assert not (folder / "runs").exists()
    printed = cli.ok(*line.split()).out
    assert printed.index("training target queries") < printed.index("held-out")
    assert read_results(folder / "runs/s").results["after"]["num_episodes"] == 2


def test_python_stresses_a_model_behind_an_address(folder: Path) -> None:
    (folder / "own.py").write_text("def f(completions):\n    return [0.5 for _ in completions]")
    with pocket_service() as service:
        result = stress_test(
            target=service.base_url,
            target_model="pocket",
            attacker=POCKET / "attacker",
            scorer="own.py:f",
            overrides=SHORT,
            run_id="a",
            progress=False,
        )
    assert result.results["after"]["num_episodes"] == 2
    assert result.results["services"]


TARGET_FILE = """
def reply(messages, max_tokens):
    return {"content": "my aunt eats soup .", "finish_reason": "stop"}
"""


def test_one_command_stresses_a_function_and_the_run_goes_on(
    cli: CommandLine, folder: Path
) -> None:
    (folder / "target.py").write_text(TARGET_FILE)
    (folder / "own.py").write_text("def f(completions):\n    return [0.5 for _ in completions]")
    sets = " ".join(f"--set {override}" for override in SHORT)
    line = (
        f"stress --target target.py:reply --scorer own.py:f --attacker {POCKET / 'attacker'} "
        f"--run-id f {sets}"
    )
    cli.ok(*line.split())
    results = read_results(folder / "runs/f").results
    assert results["after"]["replies"]["num_received"] == 4
    stored = (folder / "runs/f/hyper_parameters.yaml").read_text()
    assert f"{folder / 'target.py'}:reply" in stored
    cli.ok("evaluate", "runs/f", "--probability-episodes", "0", "--num-episodes", "2")


def test_a_template_file_and_functions_are_targets(folder: Path, no_plugins_left: None) -> None:
    (folder / "template.yaml").write_text(
        "_type: http\nurl: http://127.0.0.1:9/ask\nbody: {q: '{{ prompt }}'}\nanswer: a.0\n"
    )
    shared = {"scorer": "profanity", "attacker": POCKET / "attacker"}

    def answer(messages: Any) -> str:
        return "no"

    for target, kind in (
        ("template.yaml", "http"),
        ({"_type": "scripted", "answers": ["a"]}, "scripted"),
        ("package.module:function", "python"),
        (json.dumps, "python"),
        (answer, "answer"),
    ):
        values = stress_parameters(target=target, **shared)
        assert values["scenario"] == "pocket_chat_api"
        resolved = resolve_experiment(hyper_params=values)
        assert resolved.hyper_params.get("ast_chat.target.chat_model").type_name == kind


def test_a_function_of_a_script_is_a_target_in_python(
    folder: Path, no_plugins_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(messages: Any) -> str:
        return "my aunt eats soup ."

    monkeypatch.setattr(answer, "__module__", "__main__")
    (folder / "own.py").write_text("def f(completions):\n    return [0.5 for _ in completions]")
    result = stress_test(
        target=answer,
        attacker=POCKET / "attacker",
        scorer="own.py:f",
        overrides=SHORT,
        run_id="n",
        progress=False,
    )
    assert result.results["after"]["replies"]["num_received"] == 4


def test_the_scenario_follows_from_target_and_attacker(folder: Path) -> None:
    address = {"target": "https://example.org/v1", "target_model": "m", "scorer": "profanity"}
    assert stress_parameters(**address)["scenario"] == "smollm2_api"
    small = stress_parameters(**address, attacker=POCKET / "attacker")
    assert small["scenario"] == "pocket_chat_api"
    own = stress_parameters(target=POCKET / "target", scorer="profanity")
    assert own["scenario"] == "pocket_chat"
    for values in (small, own):
        resolve_experiment(hyper_params=values)
    hyper_params = resolve_experiment(hyper_params=stress_parameters(**address)).hyper_params
    assert hyper_params.get("ast_chat.target.chat_model.base_url") == "https://example.org/v1"


def test_rows_in_memory_are_written_by_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_unlocked: list[bool] = []

    def write(path: Path, text: str) -> None:
        is_unlocked.append(is_abandoned(path.parent))

    monkeypatch.setattr(recipes, "write_atomically", write)
    recipes._stored([{"prompt": "a"}], tmp_path)
    assert is_unlocked == [False]


@pytest.mark.parametrize("kind", ["table", "splits", "dataset"])
def test_rows_of_other_libraries_are_read(tmp_path: Path, kind: str) -> None:
    rows = [{"question": "1+1=", "answer": 2.5}, {"question": "2+2=", "answer": None}]
    data: Any
    if kind == "table":
        data = pytest.importorskip("pandas").DataFrame(rows)
    else:
        datasets = pytest.importorskip("datasets")
        data = datasets.Dataset.from_list(rows)
        if kind == "splits":
            data = datasets.DatasetDict({"train": data, "test": data.select([0])})
    train, test = recipes._splits_of(data)
    assert (test is not None) is (kind == "splits")
    stored = Path(recipes._stored(train, tmp_path)).read_text(encoding="utf-8")
    assert [json.loads(line) for line in stored.splitlines()] == rows


def test_splits_without_training_rows_are_refused() -> None:
    with pytest.raises(DataError, match="validation"):
        recipes._splits_of({"validation": []})


def test_the_column_of_prompts_is_an_option(cli: CommandLine, folder: Path) -> None:
    text = (folder / "rows.jsonl").read_text(encoding="utf-8")
    (folder / "rows.jsonl").write_text(text.replace('"prompt"', '"goal"'), encoding="utf-8")
    assert task_values(column="goal").get("task.task.column") == "goal"
    options = ["--model", str(MODEL), "--data", "rows.jsonl", "--reward", "rewards.py:right"]
    options += ["--max_completion_length", "5"]
    cli.ok("task", *options, "--column", "goal", "--dry-run")
    assert "'goal'" in refused(cli("task", *options, "--column", "gaol", "--dry-run"))


def plain_length(conversations: list[list[dict[str, str]]]) -> int:
    """Tokens of the first conversation without the beginning of its answer."""
    tokenizer = load_tokenizer(MODEL)
    question = conversations[0][:1]
    return len(
        tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    )


@pytest.mark.usefixtures("no_plugins_left")
def test_a_run_continues_answers_that_its_data_begin(folder: Path) -> None:
    def begins(completions: Any, prompts: Any, **_: Any) -> list[float]:
        assert {len(prompt) for prompt in prompts} == {2}
        assert {prompt[-1]["role"] for prompt in prompts} == {"assistant"}
        return [float(len(completion[-1]["content"])) for completion in completions]

    messages = [
        [{"role": "user", "content": f"{n}+9="}, {"role": "assistant", "content": "1"}]
        for n in range(1, 9)
    ]
    result = train_task(
        model=MODEL,
        data=[{"messages": one} for one in messages],
        column="messages",
        rewards=begins,
        num_generations=2,
        max_completion_length=4,
        max_steps=1,
    )
    metrics = metrics_of(result.run_directory.path)[0]
    assert metrics["rollout/reward_mean"] > 0
    # One token more than the question and the beginning of a turn.
    assert metrics["rollout/prompt_tokens_mean"] == plain_length(messages) + 1
