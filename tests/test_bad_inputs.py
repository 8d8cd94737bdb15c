"""A hundred bad inputs to tasks, texts, services and sweeps end with a message and exit code 2.

A seeded list: names of parameters and options, each with a value that its type, range or place does
not allow. An input that is valid by chance may run; none may end in a traceback.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from tests.kit.command_line import CommandLine, plugins_forgotten_after

VALUES = (
    *("\N{SUPERSCRIPT TWO}", "1e400", ".nan", "-1", "1" + "0" * 30, "9" * 5000, "true", "0", "1.5"),
    *("[]", "{}", "''", '"\\0"', "null", "../../x", "hub://x", "x" * 5000, "${a.b}", "[1,["),
    *("{a: 1", "{_type: nope}", "{_type: openai}", "[[[[1]]]]", "scenario://../x"),
    *("package://no.such/x", "\ud800"),
)
SERVICE = "remote_api_grpo.train_service"
INPUTS = {
    "tasks": (
        "--dry-run --trainer self_hosted_grpo --set",
        "training.num_iterations training.minibatch_size training.lr training.optimizer task.task "
        "task.task._type task.max_turns task.evaluation.num_problems task.num_rollout_parts "
        "task.policy.language_model.model task.policy.max_new_tokens self_hosted_grpo.group_size "
        "self_hosted_grpo.max_staleness seed scenario nothing",
    ),
    "text": (
        "--dry-run --trainer pure_text_ei --set",
        "text_rl.num_iterations text_rl.rollouts_per_iteration text_rl.fine_tune_method "
        "secret_word.num_test secret_word.agents.default.model secret_word.agents.verifier "
        "secret_word.agents.default.max_tokens nip.max_message_rounds interaction_protocol "
        "protocol_common.prover_reward pure_text_ei base_run.run plugins",
    ),
    "services": (
        "show --trainer remote_api_grpo --set",
        f"{SERVICE}.backend {SERVICE}.base_url {SERVICE}.model {SERVICE}.token_variable "
        f"{SERVICE}.patience_seconds {SERVICE}.nothing",
    ),
    "parts of sweeps": (
        "sweep --dry-run --trainer ast_dpo",
        "--seeds --shard --scenario --objective --metric --num-trials",
    ),
    "values of sweeps": ("sweep --dry-run --trainer ast_dpo --set", "training.lr seed"),
    "searches": ("sweep --dry-run --trainer ast_dpo --search", "training.lr"),
    "settings of sweeps": ("sweep --dry-run --trainer ast_dpo --settings", "num_threads"),
    "trainers of sweeps": ("sweep --dry-run", "--trainer"),
}
"""The start of a command, and names of parameters or options."""
NUM_INPUTS = 100


def bad_inputs() -> list[Any]:
    """The arguments of each input, every ninth for a fast test; the same for every call."""
    draw = random.Random(31)
    commands = []
    for family, (head, names) in INPUTS.items():
        for name, value in product(names.split(), VALUES):
            words = [name, value] if name.startswith("--") else [f"{name}={value}"]
            commands.append((f"{family} {name} {value[:20]!a}", (*head.split(), *words)))
    marks = [() if number % 9 == 0 else (pytest.mark.slow,) for number in range(NUM_INPUTS)]
    return [
        pytest.param(words, id=name, marks=mark)
        for (name, words), mark in zip(draw.sample(commands, NUM_INPUTS), marks, strict=True)
    ]


@pytest.mark.parametrize("words", bad_inputs())
def test_a_bad_input_is_refused(cli: CommandLine, words: tuple[str, ...]) -> None:
    with plugins_forgotten_after():
        result = cli(*words)
    assert result.code in (0, 2), result
    assert "Traceback" not in result.err
    assert result.code == 0 or result.err.startswith(("error: ", "Usage: ")), result.err
