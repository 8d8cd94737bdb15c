"""Failing plug-ins, scorers and trainers: the run ends with a message, and nothing half-done."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from nip_astra import plugins
from nip_astra.resume_check import in_a_fork
from nip_astra.scorers.base import SCORERS
from tests.kit.command_line import CommandLine, CommandResult, refused
from tests.kit.messages import says

SCORER = """
    from nip_astra.scorers.base import Scorer, register_scorer

    @register_scorer("mine")
    class Mine(Scorer):
        def _score(self, texts):
            {body}
    """
TRAINER = """
    from nip_astra.trainers.ast.dpo import AstDpoTrainer
    from nip_astra.trainers.registry import register_trainer

    @register_trainer("my_trainer")
    class MyTrainer(AstDpoTrainer):
    """


def scorer_of(
    cli: CommandLine, body: str, *overrides: str, options: tuple[str, ...] = ()
) -> CommandResult:
    path = cli.write("mine.py", SCORER.format(body=body))
    overrides = ("ast_chat.scorer={_type: mine}", *overrides)
    return cli.run("--plugin", path, *options, overrides=overrides)


def forget_scorer() -> None:
    """Another process would read the file again."""
    SCORERS.forget("mine")
    plugins._LOADED.clear()


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ("raise ValueError('out of words')", ["'mine'", "ValueError: out of words"]),
        ("return [float('nan') for text in texts]", ["'mine'", "nan"]),
        ("return [0.5]", ["'mine'", "1 score", "16 texts"]),
        ("import sys; sys.exit(0)", ["sys.exit(0)"]),
    ],
)
def test_a_scorer_that_fails_ends_a_run_which_resumes_once_it_is_corrected(
    cli: CommandLine, body: str, facts: list[str]
) -> None:
    run = cli.folder / "runs" / "one"
    refused(scorer_of(cli, body, options=("--dry-run",)))
    forget_scorer()
    assert says(refused(scorer_of(cli, body)), *facts)
    assert says((run / "log.txt").read_text(), "ERROR", *facts)
    forget_scorer()
    cli.write("mine.py", SCORER.format(body="return [0.5 for text in texts]"))
    cli.ok("resume", "runs/one")
    assert (run / "results.json").is_file()


def test_a_collapse_of_the_attacker_is_reported(cli: CommandLine) -> None:
    result = scorer_of(
        cli,
        "return [0.5 for text in texts]",
        "ast_chat.attacker.temperature=0",
        "ast_chat.target.temperature=0",
        "ast_chat.evaluation.num_episodes=12",
    )
    assert result.code == 0, result.err
    hints = ("training.num_episodes_per_experience", "training.lr")
    assert says(" ".join(result.out.split()), "warning: the attacker has collapsed", *hints)


@pytest.mark.parametrize("override", ["ast_chat.tree_width=1", "ast_dpo.min_reward_difference=99"])
def test_a_run_without_anything_to_learn_from_reports_this(cli: CommandLine, override: str) -> None:
    result = cli.run(overrides=(override,))
    assert result.code == 0, result.err
    assert says(" ".join(result.out.split()), "warning: nothing was learned", "tree_width")
    assert "nan" not in result.err
    assert "loss=nothing to learn from" in result.err


def test_a_trainer_of_another_family_is_refused_with_scenarios_that_it_trains_on(
    cli: CommandLine,
) -> None:
    for trainer, scenario, shipped in (
        ("pure_text_ei", "pocket_chat", "secret_word"),
        ("self_hosted_grpo", "secret_word", "countdown"),
        ("vanilla_ppo", "secret_word", "graph_isomorphism"),
    ):
        message = refused(cli.run("--trainer", trainer, "--scenario", scenario))
        assert says(message, repr(trainer), repr(scenario), shipped)
        assert "pocket_chat_api" not in message
    path = cli.write("mine.py", TRAINER + "\n        scenario_kinds = ('other', 'third')\n")
    message = refused(cli.run("--plugin", path, "--trainer", "my_trainer"))
    assert says(message, "'my_trainer'", cli.scenario, "'ast_chat'", "other, third")


def test_a_loss_that_is_not_a_number(cli: CommandLine) -> None:
    path = cli.write(
        "mine.py",
        TRAINER
        + """
        num_calls = 0

        def step(self, batch):
            MyTrainer.num_calls += 1
            output = super().step(batch)
            if MyTrainer.num_calls < 3:
                return output
            return output._replace(loss=output.loss * float("nan"))
    """,
    )
    result = cli.run(
        *("--plugin", path, "--trainer", "my_trainer"),
        overrides=("training.minibatch_size=1", "training.num_episodes_per_experience=2"),
    )
    message = refused(result)
    assert says(message, "step 3", "iteration 1", "loss nan", "norm nan", "training.lr")
    checkpoints = cli.folder / "runs" / "one" / "checkpoints"
    latest = checkpoints / (checkpoints / "latest").read_text().strip()
    weights = load_file(latest / "attacker" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


TASK = """
    import os, sys
    import nip_astra as na

    class Mine(na.Environment):
        def reset(self):
            return [na.Message("user", "1+1=")]

        def step(self, message):
            {body}

    @na.register_task("mine")
    class MyTask(na.Task):
        def environment(self, split, index):
            return Mine()
    """


@pytest.mark.parametrize(
    ("body", "fact"),
    [
        ("os._exit(0)", "os._exit(0)"),
        ("sys.exit(0)", "sys.exit(0)"),
        ("return na.Reaction(reward=float('nan'))", "step of Mine returned 'nan'"),
    ],
)
def test_an_environment_that_exits_or_rewards_with_nan_ends_the_run_with_an_error(
    cli: CommandLine, body: str, fact: str
) -> None:
    def run() -> None:
        result = cli(
            *("--plugin", cli.write("mine.py", TASK.format(body=body)), "--run-id", "one"),
            *("--trainer", "self_hosted_grpo", "--scenario", "arithmetic"),
            *("--set", "task.task={_type: mine}", "--set", "task.evaluation.num_problems=2"),
        )
        cli.write("refusal.txt", refused(result))

    # Otherwise the program's exit would end the tests, with 0.
    in_a_fork(run)
    assert fact in (cli.folder / "refusal.txt").read_text()
    assert fact in (cli.folder / "runs" / "one" / "log.txt").read_text()
