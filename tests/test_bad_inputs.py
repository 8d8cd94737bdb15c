"""A hundred bad inputs to tasks, texts, services and sweeps end with a message and exit code 2.

A seeded list: names of parameters and options, each with a value that its type, range or place does
not allow. An input that is valid by chance may run; none may end in a traceback.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

from tests.kit.command_line import CommandLine, plugins_forgotten_after

VALUES = (
    *("\N{SUPERSCRIPT TWO}", "1e400", ".nan", "-1", "1" + "0" * 30, "9" * 5000, "true", "0", "1.5"),
    *(
        "[]",
        "{}",
        "''",
        '"\\0"',
        "null",
        "../../x",
        "hub://x",
        "x" * 5000,
        "${a.b}",
        "[1,[",
        "{a: 1",
    ),
    *(
        "{_type: nope}",
        "{_type: openai}",
        "[[[[1]]]]",
        "scenario://../x",
        "package://no.such/x",
        "\ud800",
    ),
)
TASKS = (
    *("training.num_iterations", "training.minibatch_size", "training.lr", "training.optimizer"),
    *("task.task", "task.task._type", "task.max_turns", "task.evaluation.num_problems"),
    *("task.policy.language_model.model", "task.policy.max_new_tokens", "task.num_rollout_parts"),
    *(
        "self_hosted_grpo.group_size",
        "self_hosted_grpo.max_staleness",
        "seed",
        "scenario",
        "nothing",
    ),
)
TEXT = (
    *("text_rl.num_iterations", "text_rl.rollouts_per_iteration", "text_rl.fine_tune_method"),
    *("secret_word.num_test", "secret_word.agents.default.model", "secret_word.agents.verifier"),
    *("secret_word.agents.default.max_tokens", "nip.max_message_rounds", "interaction_protocol"),
    *("protocol_common.prover_reward", "pure_text_ei", "base_run.run", "plugins"),
)
SERVICES = tuple(
    f"remote_api_grpo.train_service.{name}"
    for name in ("backend", "base_url", "model", "token_variable", "patience_seconds", "nothing")
)
SWEEPS = (
    *("--seeds", "--shard", "--trainer", "--scenario", "--objective", "--metric", "--num-trials"),
    *("--set=training.lr", "--set=seed", "--search=training.lr", "--settings=num_threads"),
)
NUM_OF_EACH = 25


def bad_inputs() -> list[tuple[str, tuple[str, ...]]]:
    """Name and arguments of each input; the same for every call."""
    draw = random.Random(31)
    found = []
    for family, head, names in (
        ("tasks", ("--dry-run", "--trainer", "self_hosted_grpo"), TASKS),
        ("text", ("--dry-run", "--trainer", "pure_text_ei"), TEXT),
        ("services", ("show", "--trainer", "remote_api_grpo"), SERVICES),
        ("sweeps", ("sweep", "--dry-run"), SWEEPS),
    ):
        for name, value in draw.sample(list(product(names, VALUES)), NUM_OF_EACH):
            if family != "sweeps":
                words = (*head, "--set", f"{name}={value}")
            else:
                option, _, path = name.partition("=")
                trainer = () if option == "--trainer" else ("--trainer", "ast_dpo")
                words = (*head, *trainer, option, f"{path}={value}" if path else value)
            found.append((f"{family} {name} {value[:20]!a}", words))
    return found


ALL = bad_inputs()


def refuse_or_run(cli: CommandLine, words: tuple[str, ...]) -> None:
    with plugins_forgotten_after():
        result = cli(*words)
    assert result.code in (0, 2), result
    assert "Traceback" not in result.err
    assert result.code == 0 or result.err.startswith(("error: ", "Usage: ")), result.err


@pytest.mark.parametrize(
    "words", [words for _, words in ALL[::9]], ids=[name for name, _ in ALL[::9]]
)
def test_a_bad_input_is_refused(cli: CommandLine, words: tuple[str, ...]) -> None:
    refuse_or_run(cli, words)


@pytest.mark.slow
def test_a_hundred_bad_inputs_are_refused(cli: CommandLine) -> None:
    assert len(ALL) == 4 * NUM_OF_EACH
    for _, words in ALL:
        refuse_or_run(cli, words)
