"""`evaluate` with foreign attackers: lists of probes, and chat models with a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.language_models.services.chat import (
    CHAT_MODELS,
    CPU,
    ChatAnswer,
    ChatFailure,
    ChatModel,
    ChatOutcome,
    ChatRequest,
    ChatUsage,
    FailureReason,
    register_chat_model,
)
from nip_astra.scorers.base import SCORERS, Exchange, Scorer, Verdict, register_scorer
from tests.kit.command_line import CommandLine, refused

asked: list[ChatRequest] = []
rated: list[Exchange] = []
PROBES = "probe,goal\nthe cat sat,rudeness\nare you fine,calm\na silly mat,rudeness\n"


class EchoChatModel(ChatModel):
    """Returns the roles that it read; fails once."""

    class Parameters(ChatModel.Parameters):
        """None of its own."""

    name, place = "echo", "here"

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> ChatModel:
        return cls()

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        asked.append(request)
        if len(asked) == 2:
            return ChatOutcome((ChatFailure(FailureReason.REFUSED, "no"),))
        return ChatOutcome((ChatAnswer(f"silly {len(request.messages)}"),), ChatUsage(5, 3))


class GoalScorer(Scorer):
    """Reads the goal beside a prompt."""

    reads_history = True

    class Parameters(Scorer.Parameters):
        """None of its own."""

    def _score_exchanges(self, exchanges: Any) -> list[Verdict]:
        rated.extend(exchanges)
        return [1.0 if dict(one.columns).get("goal") == "rudeness" else 0.0 for one in exchanges]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    models, scorers = CHAT_MODELS.snapshot(), SCORERS.snapshot()
    register_chat_model("echo")(EchoChatModel)
    register_scorer("goal")(GoalScorer)
    asked.clear()
    rated.clear()
    yield
    CHAT_MODELS.restore(models)
    SCORERS.restore(scorers)


def evaluate(cli: CommandLine, *arguments: str) -> dict[str, Any]:
    said = cli.ok(
        "evaluate",
        *arguments,
        "--scenario",
        str(cli.scenario),
        "--probability-episodes",
        "0",
        "--json",
    )
    figures: dict[str, Any] = json.loads(said.out)
    return figures


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_a_file_of_probes_is_an_attacker_whose_goals_scorers_read(cli: CommandLine) -> None:
    cli.write("attack.csv", PROBES)
    figures = evaluate(cli, "attack.csv", "--column", "probe", "--scorer", "goal")
    assert (figures["attacker"], figures["num_episodes"], figures["tree_depth"]) == ("attack", 3, 1)
    assert figures["failure_rate"]["value"] == pytest.approx(2 / 3)
    assert figures["nll"]["reference"] > 0
    rows = rows_of(cli.folder / "attack" / "evaluations" / "test-goal")
    assert [row["probe"] for row in rows] == ["the cat sat", "are you fine", "a silly mat"]
    assert [row["prompt_columns"]["goal"] for row in rows] == ["rudeness", "calm", "rudeness"]
    assert all(row["probe_logprob"] is None for row in rows)
    assert {one.history[-1].text for one in rated} >= {"the cat sat", "a silly mat"}
    further = evaluate(
        cli, "attack.csv", "--column", "probe", "--scorer", "own", "--scorer", "goal"
    )
    assert further["scorers"]["goal"]["failure_rate"]["value"] == pytest.approx(2 / 3)


def test_a_data_set_of_probes_is_an_attacker_whose_goals_scorers_read(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    # A folder is read like a repository of the hub: a file per split.
    folder = cli.folder / "owner" / "attacks"
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text("probe,goal\nhello,calm\n")
    (folder / "test.csv").write_text(PROBES)
    spec = "owner/attacks:test"
    figures = evaluate(cli, spec, "--column", "probe", "--scorer", "goal")
    assert (figures["num_episodes"], figures["tree_depth"]) == (3, 1)
    assert figures["failure_rate"]["value"] == pytest.approx(2 / 3)
    rows = rows_of(cli.folder / "owner_attacks_test" / "evaluations" / "test-goal")
    assert [row["probe"] for row in rows] == ["the cat sat", "are you fine", "a silly mat"]
    assert [row["prompt_columns"]["goal"] for row in rows] == ["rudeness", "calm", "rudeness"]
    said = cli("evaluate", "owner/attacks:dev", "--scenario", str(cli.scenario))
    assert "the dataset" in refused(said)


def test_probes_are_sent_verbatim_whatever_the_references_vocabulary(
    cli: CommandLine,
) -> None:
    cli.write("attack.jsonl", '{"prompt": "Größe, unknown WORDS!"}\n')
    evaluate(cli, "attack.jsonl")
    (row,) = rows_of(cli.folder / "attack" / "evaluations" / "test")
    assert row["probe"] == "Größe, unknown WORDS!"


def test_a_chat_model_with_a_prompt_attacks_turn_by_turn(cli: CommandLine) -> None:
    cli.write(
        "hosted.yaml",
        "chat_model: {_type: echo, prices: {prompt: 10.0, completion: 10.0}, "
        "limits: {concurrency: 1}}\nsystem_prompt: Provoke.\n",
    )
    figures = evaluate(cli, "hosted.yaml", "--num-turns", "2", "--num-episodes", "4")
    assert figures["attacker"] == "hosted"
    use = figures["services"]["attacker"]
    assert (use["num_requests"], use["failures"]) == (7, {"refused": 1})
    assert use["cost"] > 0
    rows = rows_of(cli.folder / "hosted" / "evaluations" / "test")
    failures = [row["response_failure"] for row in rows]
    assert failures.count("attacker refused") == failures.count("ended") == 1
    assert {row["probe"] for row in rows} == {"", "silly 2", "silly 4"}
    roles = [message["role"] for message in asked[-1].messages]
    assert roles == ["system", "user", "assistant", "user"]
    assert asked[-1].messages[0]["content"] == "Provoke."
    assert figures["outcomes"]["error"] == 1


def test_hosted_and_listed_attackers_and_runs_stand_in_one_matrix(cli: CommandLine) -> None:
    cli.write("attack.txt", "the cat sat\nare you fine\n")
    cli.write("hosted.yaml", "chat_model: {_type: scripted}\nsystem_prompt: Provoke.\n")
    said = cli.ok(
        *("evaluate", "attack.txt", "hosted.yaml", "--scenario", str(cli.scenario)),
        *("--num-episodes", "4", "--probability-episodes", "2"),
    )
    assert "episodes with a failure" in said.out
    matrix = json.loads((cli.folder / "attack" / "evaluations" / "transfer.json").read_text())
    assert [cell["attacker"] for cell in matrix["cells"]] == ["attack", "hosted"]


@pytest.mark.parametrize(
    ("name", "text", "arguments", "problem"),
    [
        ("a.csv", PROBES, [], "no column 'prompt', only 'probe', 'goal'"),
        ("a.txt", "one\n", ["--num-turns", "2"], "fixed probes have one turn each"),
        ("a.txt", "\n", [], "no prompts"),
        ("a.yaml", "- 1\n", [], "chat_model and system_prompt"),
        ("a.yaml", "system_prompt: x\n", [], "chat_model"),
        (
            "b.yaml",
            "chat_model: {_type: scipted}\nsystem_prompt: x\n",
            [],
            "Did you mean 'scripted'",
        ),
    ],
)
def test_invalid_attackers_are_reported(
    cli: CommandLine, name: str, text: str, arguments: list[str], problem: str
) -> None:
    cli.write(name, text)
    said = cli("evaluate", name, "--scenario", str(cli.scenario), *arguments)
    assert problem in refused(said)


def test_a_list_of_probes_needs_a_scenario(cli: CommandLine) -> None:
    cli.write("a.txt", "one\n")
    assert "--scenario NAME" in refused(cli("evaluate", "a.txt"))
