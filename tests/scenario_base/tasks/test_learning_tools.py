"""A small policy learns by reinforcement to call a tool."""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra import find_scenario, resolve_experiment
from nip_astra.evaluation.run_results import read_results
from tests.kit.experiments import run_in
from tests.kit.learning import Learning

pytestmark = pytest.mark.slow
SHARE_CALLS = 0.5
"""Of the conversations that the policy begins with."""


def build_caller(folder: Path) -> Path:
    """The policy of arithmetic, which now calls a calculator occasionally."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arithmetic = find_scenario("arithmetic")
    sys.path.insert(0, str(find_scenario("pocket_chat")))
    build = runpy.run_path(str(arithmetic / "build.py"))
    tiny: Any = build["tiny_models"]
    source = arithmetic / "models" / "policy"
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    problems = build["Corpus"](0).problems

    def turns(rng: random.Random) -> list[tuple[bool, str]]:
        item = rng.choice(problems[4])
        question, answer = (False, f"{item.problem}="), str(item.answer)
        wrong = str(item.answer + rng.choice((-10, -2, -1, 1, 2, 10)))
        if rng.random() > SHARE_CALLS:
            return [question, (True, wrong)]
        return [question, (True, f"calc({item.problem})"), (False, answer), (True, answer)]

    def next_batch(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for _ in range(64):
            ids, labels = [tiny.BOS], [-100]
            for is_own, text in turns(rng):
                tokens = [*tokenizer.encode(text, add_special_tokens=False), tiny.END]
                ids += [tiny.ASSISTANT if is_own else tiny.USER, *tokens]
                labels += [-100, *(tokens if is_own else [-100] * len(tokens))]
            rows.append((ids, labels))
        width = max(len(ids) for ids, _ in rows)
        padded = [
            (ids + [tiny.PAD] * (width - len(ids)), labels + [-100] * (width - len(labels)))
            for ids, labels in rows
        ]
        all_ids, all_labels = map(torch.tensor, zip(*padded, strict=True))
        return all_ids, all_labels

    tiny.train(model, next_batch, steps=250, lr=1e-3, seed=0)
    tiny.save(model, tokenizer, folder)
    return folder


def test_a_policy_learns_to_call_the_calculator(tmp_path: Path, learning: Learning) -> None:
    """Over five seeds, accuracy rose from at most 0.35 to at least 0.61, and calls to 0.93."""
    caller = build_caller(tmp_path / "caller")
    resolved = resolve_experiment(
        trainer="self_hosted_grpo",
        scenario="arithmetic",
        overrides=[
            f"seed={learning.seed}",
            f"task.policy.language_model.model={caller}",
            "task.policy.max_new_tokens=16",
            "task.task.levels=[4]",
            *("task.tools.offered.calc.function=calculator", "task.tools.describe=false"),
            *("task.max_turns=3", "task.evaluation.num_problems=100"),
            *("training.num_iterations=80", "training.num_episodes_per_experience=16"),
        ],
    )
    results = read_results(run_in(tmp_path, resolved)).results
    before, after = results["before"], results["after"]
    learned_share = (after["accuracy"] - before["accuracy"]) / (1 - before["accuracy"])
    learning.check(learned_share, threshold=0.05, best=1.0)
    # A call in each conversation is best, and half of them begin with one.
    learning.check(after["tools/calls_mean"], threshold=0.7, best=1.0)
    learning.check(after["tools/error_share"], threshold=0.2, best=0.0)
