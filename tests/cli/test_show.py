"""Output of `show` about an experiment."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from nip_astra.cli.app import described_commands
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.overview import every_parameter, find_described, meanings_of
from nip_astra.parameters.files import flatten
from nip_astra.resolving.resolution import resolve_experiment
from tests.kit.command_line import CommandLine, refused


def shown(said: str) -> set[str]:
    return {line.split()[0] for line in said.splitlines() if line.strip()}


def test_groups_that_the_trainer_does_not_read_are_named_and_not_shown(cli: CommandLine) -> None:
    said = cli("show", "--trainer", "ast_dpo").out
    assert {"training.lr", "ast_dpo.beta", "ast_chat.tree_width"} <= shown(said)
    assert not any(path.startswith(("rl.", "ppo.", "message_regression.")) for path in shown(said))
    last = " ".join(said.partition("not shown")[2].split())
    assert "--all" in last
    assert {"rl,", "ppo,", "zk_protocol,"} <= set(last.split())


def test_a_hidden_part_of_a_shown_group_is_named_separately(cli: CommandLine) -> None:
    said = cli("show", "--trainer", "pure_text_ei", "--scenario", "secret_word").out
    assert "protocol_common.shared_reward" in shown(said)
    last = said.partition("not shown")[2].replace(",", " ").split()
    assert "protocol_common.zero_knowledge" in last
    assert "protocol_common" not in last


def test_all_shows_them(cli: CommandLine) -> None:
    said = cli("show", "--trainer", "ast_dpo", "--all").out
    assert gc.isenabled(), "it is suspended only while modules are loaded"
    assert {"training.lr", "rl.lr", "ppo.loss_type"} <= shown(said)
    assert "not shown" not in said


def test_a_group_is_hidden_where_its_condition_does_not_hold(cli: CommandLine) -> None:
    plain = shown(cli("show", "--trainer", "vanilla_ppo").out)
    wrapped = cli(
        "show", "--trainer", "vanilla_ppo", "--set", "protocol_common.zero_knowledge=true"
    )
    assert {"rl.lr", "ppo.kl_target"} <= plain
    assert "zk_protocol.simulator_reward_coefficient" not in plain
    assert "zk_protocol.simulator_reward_coefficient" in shown(wrapped.out)


def test_explain_describes_each_parameter_and_where_it_is_read(cli: CommandLine) -> None:
    said = " ".join(cli("show", "--trainer", "vanilla_ppo", "--explain").out.split())
    assert "Discount per round." in said
    assert "loss_type is kl_penalty" in said


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("learning rate", "training.lr"),
        ("batch size", "training.minibatch_size"),
        ("warmup", "training.num_warmup_steps"),
        ("max_steps", "training.num_iterations"),  # of TRL
        ("checkpoint", "--settings checkpoint_period"),
        ("resume", "nip-astra resume"),
        ("fail if", "nip-astra evaluate --fail-if"),
    ],
)
def test_a_text_is_searched_in_parameters_settings_and_commands(text: str, first: str) -> None:
    described = [*every_parameter(), *described_commands()]
    assert find_described(text, described)[0].name == first


def test_explain_with_a_text_prints_the_best_matches_without_loading_torch(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nip_astra.overview.show", None)
    lines = cli("show", "--explain", "warmup").out.splitlines()
    assert lines[1].split()[0] == "training.num_warmup_steps"
    assert "'qqq'" in refused(cli("show", "--explain", "qqq"))


def test_a_search_includes_the_parameters_of_a_plug_in(cli: CommandLine) -> None:
    plugin = cli.write(
        "mine.py",
        """
        import nip_astra as na

        @na.register_trainer("mine")
        class Mine(na.AstDpoTrainer):
            \"\"\"DPO.\"\"\"

            class Parameters(na.AstDpoTrainer.Parameters):
                \"\"\"A margin.\"\"\"

                qqq: float = 0.5
                \"\"\"Margin in furlongs.\"\"\"
        """,
    )
    said = cli("show", "--trainer", "mine", "--plugin", plugin, "--explain", "furlongs")
    assert "mine.qqq" in said.out
    assert "Margin in furlongs." in said.out


def test_settings_are_listed_with_their_defaults(cli: CommandLine) -> None:
    names = {line.split()[0]: line for line in cli("show", "--settings").out.splitlines()}
    fields = {name for name, one in ExperimentSettings.model_fields.items() if not one.exclude}
    assert fields <= set(names)
    assert " 10 " in names["checkpoint_period"]


@pytest.mark.parametrize("trainer", ["ast_dpo", "vanilla_ppo"])
def test_every_parameter_has_a_meaning(trainer: str) -> None:
    hyper_params = resolve_experiment(trainer=trainer).hyper_params
    meanings = dict(meanings_of(hyper_params))
    assert [path for path, _ in flatten(hyper_params.to_dict()) if not meanings.get(path)] == []


def test_templates_are_shown_with_the_first_turn_of_each_agent(cli: CommandLine) -> None:
    said = cli.ok("show", "--trainer", "pure_text_ei", "--prompts")
    assert "scenarios/secret_word/prompts/prover.jinja" in said.out
    assert "it is {{ datapoint.word }}" in said.out, "the template"
    verifier = said.out.partition("--- what verifier reads in its first turn, in round 0")[2]
    assert "[user] You are the verifier. The claim is that the secret word is " in verifier
    assert "Ask for the word, or decide" in verifier
    prover = said.out.partition("--- what prover reads in its first turn, in round 1")[2]
    assert "You are paid when the verifier decides to accept." in prover


def test_an_agent_that_the_seed_leaves_out_is_shown(cli: CommandLine) -> None:
    protocol = "interaction_protocol=merlin_arthur"
    said = cli("show", "--trainer", "pure_text_ei", "--prompts", "--set", protocol)
    assert "--- what prover0 reads" in said.out
    assert "--- prover1 has no turn in an episode of this seed" in said.out


def test_prompts_of_a_run_of_others_read_no_file_outside_of_it(
    cli: CommandLine, tmp_path: Path
) -> None:
    outside = {"problems": str(tmp_path / "mine.jsonl")}
    values = {"trainer": "pure_text_ei", "scenario": "code_validation", "code_validation": outside}
    file = tmp_path / "theirs" / "hyper_parameters.yaml"
    file.parent.mkdir()
    file.write_text(json.dumps(values | {"package_version": "0.1.0"}))
    message = refused(cli("show", "--prompts", "--parameters", str(file)))
    assert "code_validation.problems" in message
    assert "--trust" in message


def test_scenarios_without_words_have_no_prompts(cli: CommandLine) -> None:
    said = cli(
        *("show", "--trainer", "vanilla_ppo", "--scenario", "graph_isomorphism", "--prompts")
    )
    assert "'graph_isomorphism'" in refused(said)
