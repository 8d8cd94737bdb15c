"""Names of older versions are accepted in files, with a note, and suggested elsewhere."""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from nip_astra.errors import ParameterError
from nip_astra.parameters.conversion import RENAMED, convert, current_name, with_new_names
from nip_astra.parameters.files import read_yaml_layers
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.trainers.registry import TRAINERS
from tests.kit.messages import says

OLD = {"training": {"training_steps": 3, "lr": 0.5, "batch_size": 2}, "seed": 1}
NEW = {"training": {"num_iterations": 3, "lr": 0.5, "minibatch_size": 2}, "seed": 1}
MOVED = {
    "training.training_steps": "training.num_iterations",
    "training.batch_size": "training.minibatch_size",
}


def test_old_names_are_read_with_a_note_in_files_and_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = deepcopy(OLD)
    assert with_new_names(OLD, source="a.yaml") == NEW
    assert before == OLD
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert says(record.getMessage(), "a.yaml", *(f"{old} is {new}" for old, new in MOVED.items()))
    stored = convert(OLD | {"package_version": "0.1.0"}, source="a run")
    assert stored["training"] == NEW["training"]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(OLD))
    assert read_yaml_layers(path, source="mine")[-1].values == NEW


def test_new_names_stay_without_a_note(caplog: pytest.LogCaptureFixture) -> None:
    twice = {"training": {"training_steps": 3, "num_iterations": 4}}  # left to validation
    for values in (NEW, {}, {"training": None}, {"scorer": {"batch_size": 3}}, twice):
        assert with_new_names(values, source="a.yaml") == values
    assert not caplog.records


@pytest.mark.parametrize("old", MOVED)
def test_old_names_are_read_in_assignments_and_objects(old: str) -> None:
    group, _, name = old.partition(".")
    assigned = resolve_experiment(trainer="ast_dpo", overrides=[f"{old}=2"])
    assert assigned.hyper_params.get(MOVED[old]) == 2
    assert assigned.sources[MOVED[old]] == "--set"
    given = resolve_experiment(trainer="ast_dpo", hyper_params={group: {name: 3}})
    assert given.hyper_params.get(MOVED[old]) == 3


def test_an_old_name_elsewhere_is_answered_with_the_new_name() -> None:
    for refused in (
        lambda: resolve_experiment(trainer="ast_dpo", overrides=["training_steps=2"]),
        lambda: resolve_experiment(trainer="ast_dpo").hyper_params.get("training.training_steps"),
        lambda: TrainingConfiguration(training_steps=3),  # type: ignore[call-arg]
    ):
        with pytest.raises(ParameterError) as caught:
            refused()
        [fault] = caught.value.faults
        assert fault.path.endswith("training_steps")
        assert "num_iterations" in fault.suggestion


def test_every_new_name_is_read_by_a_trainer() -> None:
    examples = {"solo_agent": "vanilla_ppo", "text_rl": "pure_text_ei", "spg": "spg"}
    for old, move in RENAMED.items():
        for new in [move] if isinstance(move, str) else move:
            group = new.partition(".")[0]
            assert new in (current_name(old) or "")
            if group in ("training", *examples):
                trainer = examples.get(group, "ast_dpo")
                resolve_experiment(trainer=trainer).hyper_params.get(new)
    regressor = {"_type": "mlp", "minibatch_size": 7}
    result = resolve_experiment(
        trainer="vanilla_ppo", hyper_params={"message_regression": {"regressor": regressor}}
    )
    assert result.hyper_params.get("message_regression.regressor.minibatch_size") == 7
    for name in TRAINERS.names():
        fields = {*TRAINERS.get(name).Parameters.model_fields, *TrainingConfiguration.model_fields}
        assert not {"training_steps", "learning_rate", "batch_size"} & fields, name


MOVED_VALUES = {
    "ppo": """
        {clip_epsilon: 0.1, entropy_coef: 0.5, num_runs: 4}
        {clip_low: 0.1, clip_high: 0.1, entropy_weight: 0.5, group_size: 4}""",
    "ast_ppo": """
        {clip_range: 0.3, kl: {weight: 0.1, kind: k1}}
        {clip_low: 0.3, clip_high: 0.3, kl: {weight: 0.1, value: k1, gradient: k2}}""",
    "ast_grpo": """
        {kl_weight: 0.2, kl_kind: k3}
        {kl: {weight: 0.2, value: k3, gradient: k3}}""",
    "my_trainer": """
        {policy_loss: {least_ratio: 0.9, most_ratio: 1.3, dual_clip: 3.0}}
        {policy_loss: {clip_low: 0.1, clip_high: 0.3, loss_options: {dual_clip: 3.0}}}""",
    "other_trainer": """
        {policy_loss: {kl_weight: 0.1, kl_value: k1, kl_gradient: k3, most_mismatch: 4}}
        {policy_loss: {kl: {weight: 0.1, value: k1, gradient: k3}, max_mismatch: 4}}""",
    "remote_api_grpo": """
        {service_loss: {loss_fn: cispo, clip_low_threshold: 0.0, clip_high_threshold: 4.0}}
        {policy_loss: {loss: cispo, clip_low: 1.0, clip_high: 3.0}}""",
}
"""Old and new values of each section."""


@pytest.mark.parametrize("section", MOVED_VALUES)
def test_options_of_losses_are_read_by_their_old_names(section: str) -> None:
    old, new = map(yaml.safe_load, MOVED_VALUES[section].strip().splitlines())
    assert with_new_names({section: old}, source="a.yaml") == {section: new}
    assert with_new_names({section: new}, source="a.yaml") == {section: new}
