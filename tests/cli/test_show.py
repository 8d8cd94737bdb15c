"""Output of `show` about an experiment."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from nip_astra.cli.app import described_commands
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.overview import every_parameter, find_described
from tests.kit.command_line import CommandLine, refused
from tests.kit.messages import says

ZERO = "protocol_common.zero_knowledge"


def shown(output: str) -> set[str]:
    return {line.split()[0] for line in output.splitlines() if line.strip()}


@pytest.mark.parametrize(
    ("arguments", "names", "hidden"),
    [
        ("ast_dpo", "training.lr ast_dpo.beta ast_chat.tree_width", "rl ppo zk_protocol"),
        ("ast_dpo --all", "training.lr rl.lr ppo.loss_type", ""),
        # Part of a shown group.
        (
            "pure_text_ei --scenario secret_word",
            "protocol_common.shared_reward",
            ZERO,
        ),
        ("vanilla_ppo", "rl.lr ppo.kl_target", "zk_protocol"),
        # Whose condition holds.
        (f"vanilla_ppo --set {ZERO}=true", "zk_protocol.simulator_reward_coefficient", ""),
    ],
)
def test_groups_that_the_trainer_does_not_read_are_named_and_not_shown(
    cli: CommandLine, arguments: str, names: str, hidden: str
) -> None:
    table, _, rest = cli("show", "--trainer", *arguments.split()).out.partition("not shown")
    assert gc.isenabled(), "it is suspended only while modules are loaded"
    assert set(names.split()) <= shown(table)
    last = set(rest.replace(",", " ").split())
    for group in hidden.split():
        assert group in last
        assert not any(path == group or path.startswith(f"{group}.") for path in shown(table))
    assert not {name.partition(".")[0] for name in names.split()} & last, "these groups are shown"
    assert ("--all" in rest) is ("--all" not in arguments)


def test_explain_describes_each_parameter_and_where_it_is_read(cli: CommandLine) -> None:
    output = " ".join(cli("show", "--trainer", "vanilla_ppo", "--explain").out.split())
    assert says(output, "Discount per round.", "loss_type is kl_penalty")


FIRST = {
    "learning rate": "training.lr",
    "batch size": "training.minibatch_size",
    "warmup": "training.num_warmup_steps",
    "max_steps": "training.num_iterations",  # of TRL
    "checkpoint": "--settings checkpoint_period",
    "resume": "nip-astra resume",
    "fail if": "nip-astra evaluate --fail-if",
}
"""The best match of a text."""


def test_a_text_is_searched_in_parameters_settings_and_commands() -> None:
    described = [*every_parameter(), *described_commands()]
    assert {text: find_described(text, described)[0].name for text in FIRST} == FIRST


def test_explain_searches_without_torch(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nip_astra.overview.show", None)
    lines = cli("show", "--explain", "warmup").out.splitlines()
    assert lines[1].split()[0] == "training.num_warmup_steps"


PLUGIN = """
import nip_astra as na

@na.register_trainer("mine")
class Mine(na.AstDpoTrainer):
    class Parameters(na.AstDpoTrainer.Parameters):
        qqq: float = 0.5
        '''Margin in furlongs.'''
"""


def test_a_search_includes_the_parameters_of_a_plug_in(cli: CommandLine) -> None:
    plugin = cli.write("mine.py", PLUGIN)
    shown = cli("show", "--trainer", "mine", "--plugin", plugin, "--explain", "furlongs").out
    assert says(shown, "mine.qqq", "Margin in furlongs.")


def test_settings_are_listed_with_their_defaults(cli: CommandLine) -> None:
    names = {line.split()[0]: line for line in cli("show", "--settings").out.splitlines()}
    fields = {name for name, one in ExperimentSettings.model_fields.items() if not one.exclude}
    assert fields <= set(names)
    assert " 10 " in names["checkpoint_period"]


def test_templates_are_shown_with_the_first_turn_of_each_agent(cli: CommandLine) -> None:
    output = cli.ok("show", "--trainer", "pure_text_ei", "--prompts").out
    template = "it is {{ datapoint.word }}"
    assert says(output, "scenarios/secret_word/prompts/prover.jinja", template)
    verifier = output.partition("--- what verifier reads in its first turn, in round 0")[2]
    assert says(verifier, "[user] You are the verifier. The claim is that the secret word is ")
    prover = output.partition("--- what prover reads in its first turn, in round 1")[2]
    assert "You are paid when the verifier decides to accept." in prover
    # An agent that the seed leaves out is shown too.
    protocol = "interaction_protocol=merlin_arthur"
    output = cli("show", "--trainer", "pure_text_ei", "--prompts", "--set", protocol).out
    assert says(output, "--- what prover0 reads", "--- prover1 ")


def test_prompts_of_others_read_no_file_outside(cli: CommandLine, tmp_path: Path) -> None:
    outside = {"problems": str(tmp_path / "mine.jsonl")}
    values = {"trainer": "pure_text_ei", "scenario": "code_validation", "code_validation": outside}
    file = tmp_path / "theirs" / "hyper_parameters.yaml"
    file.parent.mkdir()
    file.write_text(json.dumps(values | {"package_version": "0.1.0"}))
    message = refused(cli("show", "--prompts", "--parameters", str(file)))
    assert says(message, "code_validation.problems", "--trust")


def test_scenarios_without_words_have_no_prompts(cli: CommandLine) -> None:
    experiment = ("--trainer", "vanilla_ppo", "--scenario", "graph_isomorphism")
    assert "'graph_isomorphism'" in refused(cli("show", *experiment, "--prompts"))
