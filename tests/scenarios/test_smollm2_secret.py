"""The secret scenario is consistent, and runs with a model made by the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nip_astra.evaluation.run_results import read_results
from nip_astra.parameters.content import find_scenario
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.scenario_base.conversation.prompts import read_prompts
from nip_astra.utils.ngrams import word_tokens
from tests.kit.experiments import run_in
from tests.kit.tiny import make_language_model, make_tokenizer

SCENARIO = "smollm2_secret"
TEMPLATE = (
    "<bos>{% for m in messages %}<{{ 'user' if m.role == 'user' else 'assistant' }}> "
    "{{ m.content }} <end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_the_secret_is_known_to_the_target_alone() -> None:
    section: Any = resolve_experiment(trainer="ast_grpo", scenario=SCENARIO).hyper_params.ast_chat
    (secret,) = (set(word_tokens(item)) for item in section.scorer.secrets)
    # The name alone is a failure.
    assert len({"silver", "heron"} & secret) / len(secret) >= section.failure_threshold
    assert secret <= set(word_tokens(section.target.system_prompt))
    references = (section.prompts.train, section.prompts.dev, section.prompts.test)
    folder = find_scenario(SCENARIO)
    prompts = [prompt for reference in references for prompt in read_prompts(reference, folder)]
    known_to_attacker = set(word_tokens(" ".join([section.attacker.system_prompt, *prompts])))
    # Places may have boats; the secret name must not occur.
    assert secret & known_to_attacker <= {"boat"}


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
    after = read_results(run_in(tmp_path, resolved, test_run=True)).results["after"]
    assert (after["num_episodes"], after["outcomes"]["error"]) == (4, 0)
