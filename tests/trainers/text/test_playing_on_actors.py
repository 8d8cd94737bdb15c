"""Agents of text protocols whose local chat model is divided among actors."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.nn import Module

from nip_astra.resume_check import what_was_found
from nip_astra.run import run_experiment
from tests.kit import actors_here
from tests.kit.resuming import short_experiment


def test_levels_that_are_cut_are_answered_alike_by_any_number_of_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = actors_here.install(monkeypatch)
    cut = "secret_word.agents.default.model.num_batches=3"
    resolved = short_experiment("pure_text_ei", tmp_path / "scenario", cut, num_iterations=2)
    found = [
        what_was_found(
            run_experiment(
                resolved,
                runs_dir=str(tmp_path),
                run_id=f"by-{num_actors}",
                progress=False,
                num_actors=num_actors,
            ).run_directory.path
        )
        for num_actors in (0, 2)
    ]
    assert found[0] == found[1]
    assert sum(one.turn for one in made) >= 3
    assert len(made) == 2
    kept = [sum(isinstance(part, Module) for part in one.sender._kept) for one in made]
    assert kept == [1, 1], "actors keep the current model and none before it"
