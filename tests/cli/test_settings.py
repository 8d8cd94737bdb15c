"""Settings from options, files and the resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nip_astra.errors import ParameterError
from nip_astra.resolving.resolution import resolve_experiment
from tests.kit.command_line import CommandLine, refused

TOY = """
    trainer: ast_dpo
    training: {{num_iterations: 2}}
    scenario: {scenario}
    settings:
      checkpoint_period: 7
      num_checkpoints_kept: 5
      wandb_tags: [from, file]
"""


@pytest.fixture
def stored(cli: CommandLine) -> str:
    return cli.write("experiment.yaml", TOY.format(scenario=cli.scenario))


def settings_of(folder: Path) -> dict[str, object]:
    values: dict[str, object] = yaml.safe_load((folder / "settings.yaml").read_text())
    return values


SMALL = (
    *("--set", "ast_chat.evaluation.num_episodes=2"),
    *("--set", "ast_chat.evaluation.use_random_search=false", "--test-run"),
)


def test_a_file_has_settings_and_the_command_line_wins(cli: CommandLine, stored: str) -> None:
    cli.ok(
        *("--parameters", stored, "--run-id", "one", *SMALL, "--num-threads", "1"),
        *("--settings", "num_checkpoints_kept=1", "--settings", "rollout_sample_period=3"),
        *("--settings", "num_threads=2", "--settings", "num_rollout_samples=1"),
    )
    run = cli.folder / "runs" / "one"
    settings = settings_of(run)
    assert settings["checkpoint_period"] == 7
    assert settings["num_checkpoints_kept"] == 1
    assert settings["wandb_tags"] == ["from", "file"]
    assert settings["rollout_sample_period"] == 3
    assert settings["num_rollout_samples"] == 1
    # A dedicated option takes precedence.
    assert settings["num_threads"] == 1
    assert "settings" not in yaml.safe_load((run / "hyper_parameters.yaml").read_text())


def test_settings_of_a_file_are_no_part_of_the_experiment(cli: CommandLine, stored: str) -> None:
    other = cli.write("other.yaml", "extends: experiment.yaml\nsettings: {checkpoint_period: 1}")
    first, second = (resolve_experiment(parameter_file=path) for path in (stored, other))
    assert first.hyper_params == second.hyper_params
    assert (first.settings.checkpoint_period, second.settings.checkpoint_period) == (7, 1)
    assert second.settings.num_checkpoints_kept == 5


def test_wrong_settings_of_a_file_are_reported_with_its_other_faults(cli: CommandLine) -> None:
    path = cli.write(
        "wrong.yaml", "extends: experiment.yaml\nsettings: {wandb: on_line, a: 1}\nsede: 3"
    )
    cli.write("experiment.yaml", TOY.format(scenario=cli.scenario))
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(parameter_file=path)
    assert {f.path for f in caught.value.faults} == {"settings.wandb", "settings.a", "sede"}


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("checkpoint_perod=5", "Did you mean 'checkpoint_period'"),
        ("checkpoint_period", "--settings path.to.parameter=value"),
        ("num_checkpoints_kept=0", "must be at least 1"),
        ("checkpoint_period=often", "must be a whole number"),
    ],
)
def test_a_wrong_assignment_is_refused(cli: CommandLine, assignment: str, words: str) -> None:
    assert words in refused(cli.run("--settings", assignment))


def test_the_end_of_an_offline_run_says_how_to_upload_it(cli: CommandLine, stored: str) -> None:
    pytest.importorskip("wandb")
    said = cli.ok("--parameters", stored, "--run-id", "one", *SMALL, "--wandb", "offline")
    (folder,) = (cli.folder / "runs/one/wandb").glob("offline-run-*")
    assert f"wandb sync runs/one/wandb/{folder.name}" in said.out
