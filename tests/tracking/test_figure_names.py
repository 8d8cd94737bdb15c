"""Old names of figures, in files of earlier versions and where a user names them."""

from __future__ import annotations

import json

import pytest

from nip_astra.evaluation.conditions import holds
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.sweep.plan import SearchParameters
from nip_astra.tracking.figure_names import (
    CURRENT_NAMES,
    current_figure_name,
    with_nested_current_names,
)
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import read_records

RENAMED = pytest.mark.parametrize(("old", "new"), CURRENT_NAMES.items())


@RENAMED
def test_files_of_earlier_versions_are_read_with_current_names(
    directory: RunDirectory, old: str, new: str
) -> None:
    metrics = [{"step": 1, old: 0.5, f"dev/{old}": 0.25}, {"step": 2, new: 0.75}]
    lines = [json.dumps(line) for line in metrics]
    (directory.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    first, second = read_records(directory)
    assert first.values == {new: 0.5, f"dev/{new}": 0.25}
    assert second.values == {new: 0.75}
    (directory.path / "results.json").write_text(json.dumps({"after": {"tests": [{old: 1}]}}))
    assert directory.read_json("results.json") == {"after": {"tests": [{new: 1}]}}


@RENAMED
def test_a_user_may_name_figures_as_before(old: str, new: str) -> None:
    if "/" not in old:  # In a condition it divides.
        assert holds(f"after.{old} > 0.5", {"after": {new: 0.75}})
    assert TrainingConfiguration(eval_period=1, dev_metric=old).dev_metric == new
    assert SearchParameters(objective=f"dev/{old}").objective == f"dev/{new}"


def test_a_name_is_changed_once_and_only_as_a_whole() -> None:
    assert not set(CURRENT_NAMES) & set(CURRENT_NAMES.values())
    assert current_figure_name("not_is_right") == "not_is_right"
    assert current_figure_name("is_right/prover") == "is_right/prover"
    # Only names of objects change, not their values.
    assert with_nested_current_names({"column": "is_right"}) == {"column": "is_right"}
