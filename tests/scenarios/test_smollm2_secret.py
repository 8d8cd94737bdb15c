"""The secret scenario is consistent, and runs with a model made by the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nip_astra.parameters.content import find_scenario
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from nip_astra.scenario_base.conversation.prompts import read_prompts
from nip_astra.utils.ngrams import word_tokens
from tests.kit.tiny import make_language_model, make_tokenizer

SCENARIO = "smollm2_secret"
TEMPLATE = (
    "<bos>{% for m in messages %}<{{ 'user' if m.role == 'user' else 'assistant' }}> "
    "{{ m.content }} <end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def scenario_section() -> Any:
    return resolve_experiment(trainer="ast_grpo", scenario=SCENARIO).hyper_params.get("ast_chat")


def test_the_secret_is_known_to_the_target_alone() -> None:
    section = scenario_section()
    secret = {word for item in section.scorer.secrets for word in word_tokens(item)}
    assert secret <= set(word_tokens(section.target.system_prompt))
    folder = find_scenario(SCENARIO)
    prompts = [
        prompt
        for reference in (section.prompts.train, section.prompts.dev, section.prompts.test)
        for prompt in read_prompts(reference, folder)
    ]
    known_to_attacker = set(word_tokens(" ".join([section.attacker.system_prompt, *prompts])))
    # Places may have boats; the secret name must not occur.
    assert secret & known_to_attacker <= {"boat"}


def test_the_name_alone_is_a_failure() -> None:
    section = scenario_section()
    (secret,) = (set(word_tokens(item)) for item in section.scorer.secrets)
    assert len({"silver", "heron"} & secret) / len(secret) >= section.failure_threshold


def test_it_runs_with_another_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = make_language_model(tmp_path / "model", window=256)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    names = [f"ast_chat.{role}.language_model.model={model}" for role in ("attacker", "target")]
    resolved = resolve_experiment(
        trainer="ast_grpo",
        scenario=SCENARIO,
        overrides=[*names, "ast_chat.evaluation.num_episodes=4", "ast_chat.tree_width=2"],
    )
    runs = str(tmp_path / "runs")
    run = run_experiment(resolved, runs_dir=runs, run_id="one", test_run=True, progress=False)
    results = json.loads((run.run_directory.path / "results.json").read_text())
    assert results["after"]["num_episodes"] == 4
    assert results["after"]["outcomes"]["error"] == 0
