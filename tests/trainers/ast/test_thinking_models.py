"""A stress test whose models think before they write."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nip_astra.checkpoints.run_state import STATE
from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.resolving.resolution import resolve_experiment
from tests.kit.experiments import run_in, trainer_of
from tests.kit.messages import says
from tests.kit.tiny import make_language_model, make_thinking_tokenizer, write_scenario

OVERRIDES = ("training.num_iterations=1", "ast_chat.tree_depth=1")


def test_a_resumed_run_of_earlier_code_says_that_reasoning_is_now_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scenario = write_scenario(tmp_path / "scenario")
    tokenizer = make_thinking_tokenizer()
    make_language_model(scenario / "target", window=512, tokenizer=tokenizer)
    resolved = resolve_experiment(trainer="ast_dpo", scenario=str(scenario), overrides=OVERRIDES)
    run = run_in(tmp_path, resolved)
    checkpoint = CheckpointStore(run / "checkpoints").latest()
    assert checkpoint is not None
    trainer = trainer_of("ast_dpo", *OVERRIDES, scenario=scenario)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        trainer.resume(checkpoint)
    assert not caplog.records
    content = load_state(checkpoint / STATE)
    (mark,) = (name for name in content["parts"] if "reasoning" in name)
    del content["parts"][mark]
    save_state(checkpoint / STATE, content)
    with caplog.at_level(logging.WARNING):
        trainer.resume(checkpoint)
    (record,) = caplog.records
    assert says(record.getMessage(), checkpoint.name, "reasoning", "target")
    assert "attacker" not in record.getMessage()
