"""When an AST run is compared with random search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment

PLANT = "ast_chat.planted_failures=[{name: one, probe: a}]"


def parts(tiny_scenario: Path, *overrides: str) -> int:
    resolved = resolve_experiment(
        trainer="ast_dpo", scenario=str(tiny_scenario), overrides=overrides
    )
    trainer: Any = prepare_experiment(resolved).trainer
    return int(trainer.evaluation.num_random_search_parts())


@pytest.mark.parametrize(
    ("planted", "asked", "is_run"),
    [
        (True, "null", True),
        (True, "false", False),
        (False, "null", False),
        (False, "true", True),
    ],
)
def test_it_is_run_where_failures_are_planted_or_where_it_is_asked_for(
    tiny_scenario: Path, planted: bool, asked: str, is_run: bool
) -> None:
    plants = PLANT if planted else "ast_chat.planted_failures=[]"
    found = parts(tiny_scenario, plants, f"ast_chat.evaluation.use_random_search={asked}")
    assert (found > 0) is is_run
