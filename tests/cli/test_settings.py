"""Settings from options, files and the resumed run."""

from __future__ import annotations

import pytest
import yaml

from nip_astra.errors import ParameterError
from nip_astra.resolving.resolution import resolve_experiment
from tests.kit.command_line import CommandLine

EXPERIMENT = """
    trainer: ast_dpo
    training: {{num_iterations: 2}}
    scenario: {scenario}
    settings:
      checkpoint_period: 7
      num_checkpoints_kept: 5
      wandb_tags: [from, file]
"""
SMALL = (
    *("--set", "ast_chat.evaluation.num_episodes=2"),
    *("--set", "ast_chat.evaluation.use_random_search=false", "--test-run", "--run-id", "one"),
)


@pytest.fixture
def stored(cli: CommandLine) -> str:
    return cli.write("experiment.yaml", EXPERIMENT.format(scenario=cli.scenario))


def test_a_file_has_settings_and_the_command_line_wins(cli: CommandLine, stored: str) -> None:
    options = ("--settings", "num_checkpoints_kept=1", "--settings", "num_threads=2")
    cli.ok("--parameters", stored, *SMALL, "--num-threads", "1", *options)
    run = cli.folder / "runs" / "one"
    expected = {"checkpoint_period": 7, "num_checkpoints_kept": 1, "wandb_tags": ["from", "file"]}
    # A dedicated option takes precedence.
    expected["num_threads"] = 1
    settings = yaml.safe_load((run / "settings.yaml").read_text())
    assert {name: settings[name] for name in expected} == expected
    assert "settings" not in yaml.safe_load((run / "hyper_parameters.yaml").read_text())


def test_settings_of_a_file_are_no_part_of_the_experiment(cli: CommandLine, stored: str) -> None:
    other = cli.write("other.yaml", "extends: experiment.yaml\nsettings: {checkpoint_period: 1}")
    first, second = (resolve_experiment(parameter_file=path) for path in (stored, other))
    assert first.hyper_params == second.hyper_params
    assert (first.settings.checkpoint_period, second.settings.checkpoint_period) == (7, 1)
    assert second.settings.num_checkpoints_kept == 5


@pytest.mark.usefixtures("stored")
def test_wrong_settings_of_a_file_are_reported_with_its_other_faults(cli: CommandLine) -> None:
    text = "extends: experiment.yaml\nsettings: {wandb: on_line, a: 1}\nsede: 3"
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(parameter_file=cli.write("wrong.yaml", text))
    assert {f.path for f in caught.value.faults} == {"settings.wandb", "settings.a", "sede"}


def test_the_end_of_an_offline_run_names_the_command_that_uploads_it(
    cli: CommandLine, stored: str
) -> None:
    pytest.importorskip("wandb")
    result = cli.ok("--parameters", stored, *SMALL, "--wandb", "offline")
    (folder,) = (cli.folder / "runs/one/wandb").glob("offline-run-*")
    assert f"wandb sync runs/one/wandb/{folder.name}" in result.out
