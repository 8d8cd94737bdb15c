"""`show --prompts` prints templates and what agents read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import CommandLine, refused


@pytest.fixture
def type_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, tmp_path, capsys)


def test_templates_are_shown_with_the_first_turn_of_each_agent(type_command: CommandLine) -> None:
    said = type_command("show", "--trainer", "pure_text_ei", "--prompts")
    assert said.code == 0
    assert "scenarios/secret_word/prompts/prover.jinja" in said.out
    assert "it is {{ datapoint.word }}" in said.out, "the template"
    verifier = said.out.partition("--- what verifier reads in its first turn, in round 0")[2]
    assert "[user] You are the verifier. The claim is that the secret word is " in verifier
    assert "Ask for the word, or decide" in verifier
    prover = said.out.partition("--- what prover reads in its first turn, in round 1")[2]
    assert "You are paid when the verifier decides to accept." in prover


def test_an_agent_that_the_seed_leaves_out_is_told(type_command: CommandLine) -> None:
    protocol = "interaction_protocol=merlin_arthur"
    said = type_command("show", "--trainer", "pure_text_ei", "--prompts", "--set", protocol)
    assert "--- what prover0 reads" in said.out
    assert "--- prover1 has no turn in an episode of this seed" in said.out


def test_scenarios_without_words_have_no_prompts(type_command: CommandLine) -> None:
    said = type_command(
        *("show", "--trainer", "vanilla_ppo", "--scenario", "graph_isomorphism", "--prompts")
    )
    assert "whose agents do not play a protocol in words" in refused(said)
