"""`evaluate` with foreign attackers: lists of probes, prompted chat models, folders of models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.evaluation.storage import read_rows
from nip_astra.language_models.adapters import LoraParameters, add_adapter
from nip_astra.language_models.services import chat
from nip_astra.language_models.sources import load_causal_lm
from nip_astra.scorers.base import Exchange, Scorer, Verdict, register_scorer
from tests.cli.trained_run import figures_of
from tests.kit.command_line import CommandLine, refused
from tests.kit.messages import says
from tests.kit.tiny import make_language_model

requests: list[chat.ChatRequest] = []
exchanges_rated: list[Exchange] = []
PROBES = "probe,goal\nthe cat sat,rudeness\nare you fine,calm\na silly mat,rudeness\n"
TWO_MESSAGES = (
    '{"prompt": [{"role": "user", "content": "one"}]}\n'
    '{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}\n'
)


class EchoChatModel(chat.ChatModel):
    """Returns the roles that it read; fails once."""

    name, place = "echo", "here"

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = chat.CPU
    ) -> chat.ChatModel:
        return cls()

    async def answer(self, request: chat.ChatRequest) -> chat.ChatOutcome:
        requests.append(request)
        if len(requests) == 2:
            return chat.ChatOutcome((chat.ChatFailure(chat.FailureReason.REFUSED, "no"),))
        # Probes get longer from turn to turn.
        text = "so " * len(request.messages) + "silly"
        return chat.ChatOutcome((chat.ChatAnswer(text),), chat.ChatUsage(5, 3))


class GoalScorer(Scorer):
    """Reads the goal beside a prompt."""

    reads_history = True

    def _score_exchanges(self, exchanges: Any) -> list[Verdict]:
        exchanges_rated.extend(exchanges)
        return [1.0 if dict(one.columns).get("goal") == "rudeness" else 0.0 for one in exchanges]


@pytest.fixture(autouse=True)
def _registered(cli: CommandLine) -> None:
    # The command line forgets them after the test.
    chat.register_chat_model("echo")(EchoChatModel)
    register_scorer("goal")(GoalScorer)
    requests.clear()
    exchanges_rated.clear()


def evaluate(cli: CommandLine, *arguments: str) -> dict[str, Any]:
    options = ("--scenario", str(cli.scenario), "--probability-episodes", "0", "--json")
    figures: dict[str, Any] = json.loads(cli.ok("evaluate", *arguments, *options).out)
    return figures


def rows_of(cli: CommandLine, attacker: str, name: str = "test") -> list[dict[str, Any]]:
    return read_rows(cli.folder / attacker / "evaluations" / name / "rows.jsonl")


@pytest.mark.parametrize(
    ("attacker", "name"),
    [
        ("attack.csv", "attack"),
        # A folder is read like a repository of the hub: a file per split.
        ("owner/attacks:test", "owner_attacks_test"),
    ],
)
def test_a_list_of_probes_is_an_attacker_whose_goals_scorers_read(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, attacker: str, name: str
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cli.folder / "cache"))
    (cli.folder / "owner" / "attacks").mkdir(parents=True)
    cli.write("owner/attacks/train.csv", "probe,goal\nhello,calm\n")
    for file in ("attack.csv", "owner/attacks/test.csv"):
        cli.write(file, PROBES)
    figures = evaluate(cli, attacker, "--column", "probe", "--scorer", "goal")
    assert (figures["attacker"], figures["num_episodes"], figures["tree_depth"]) == (name, 3, 1)
    assert figures["failure_rate"]["value"] == pytest.approx(2 / 3)
    assert figures["nll"]["reference"] > 0
    rows = rows_of(cli, name, "test-goal")
    assert [row["probe"] for row in rows] == ["the cat sat", "are you fine", "a silly mat"]
    assert [row["prompt_columns"]["goal"] for row in rows] == ["rudeness", "calm", "rudeness"]
    assert all(row["probe_logprob"] is None for row in rows)
    assert {one.history[-1].text for one in exchanges_rated} >= {"the cat sat", "a silly mat"}
    further = evaluate(cli, attacker, "--column", "probe", "--scorer", "own", "--scorer", "goal")
    assert further["scorers"]["goal"]["failure_rate"]["value"] == pytest.approx(2 / 3)


def test_probes_are_sent_verbatim_whatever_the_references_vocabulary(cli: CommandLine) -> None:
    cli.write("attack.jsonl", '{"prompt": "Größe, unknown WORDS!"}\n')
    evaluate(cli, "attack.jsonl")
    assert [row["probe"] for row in rows_of(cli, "attack")] == ["Größe, unknown WORDS!"]


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
    rows = rows_of(cli, "hosted")
    failures = [row["response_failure"] for row in rows]
    assert failures.count("attacker refused") == failures.count("ended") == 1
    assert {row["probe"] for row in rows} == {"", "so so silly", "so so so so silly"}
    assert all(row["reference_logprob"] < 0 for row in rows if row["probe"])
    roles = [message["role"] for message in requests[-1].messages]
    assert roles == ["system", "user", "assistant", "user"]
    assert requests[-1].messages[0]["content"] == "Provoke."
    assert (figures["outcomes"]["error"], figures["outcomes"]["undetermined"]) == (0, 2)


def test_hosted_and_listed_attackers_and_runs_stand_in_one_matrix(cli: CommandLine) -> None:
    cli.write("attack.txt", "the cat sat\nare you fine\n")
    cli.write("hosted.yaml", "chat_model: {_type: scripted}\nsystem_prompt: Provoke.\n")
    result = cli.ok(
        *("evaluate", "attack.txt", "hosted.yaml", "--scenario", str(cli.scenario)),
        *("--num-episodes", "4", "--probability-episodes", "2"),
    )
    assert "episodes with a failure" in result.out
    matrix = json.loads((cli.folder / "attack" / "evaluations" / "transfer.json").read_text())
    assert [cell["attacker"] for cell in matrix["cells"]] == ["attack", "hosted"]


@pytest.mark.parametrize(
    ("name", "text", "arguments", "facts"),
    [
        ("a.csv", PROBES, (), ["'prompt'", "'probe', 'goal'"]),
        ("a.txt", "one\n", ("--num-turns", "2"), ["one turn"]),
        ("a.txt", "\n", (), ["no prompts"]),
        ("a.jsonl", TWO_MESSAGES, (), ["probe 2", "2 messages"]),
        ("a.jsonl", '{"prompt": [{"role": "assistant", "content": "a"}]}', (), ["'assistant'"]),
        ("a.yaml", "- 1\n", (), ["chat_model", "system_prompt"]),
        ("a.yaml", "system_prompt: x\n", (), ["chat_model"]),
        ("a.yaml", "chat_model: {_type: scipted}\nsystem_prompt: x\n", (), ["'scripted'"]),
    ],
)
def test_invalid_attackers_are_reported(
    cli: CommandLine, name: str, text: str, arguments: tuple[str, ...], facts: list[str]
) -> None:
    cli.write(name, text)
    scenario = ("--scenario", str(cli.scenario))
    assert says(refused(cli("evaluate", name, *scenario, *arguments)), *facts)


def test_a_list_is_exported_and_rated_again_without_its_scenario(cli: CommandLine) -> None:
    cli.write("attack.csv", PROBES)
    evaluate(cli, "attack.csv", "--column", "probe")
    stored = cli.folder / "attack" / "evaluations" / "test"
    cli.ok("export", str(stored), "--format", "jsonl", "--output", "out")
    _, *nodes, _ = map(json.loads, (cli.folder / "out" / "turns.jsonl").open())
    assert [node["probe"] for node in nodes] == ["the cat sat", "are you fine", "a silly mat"]
    figures = json.loads(cli.ok("score", str(stored), "--scorer", "goal", "--json").out)
    assert (figures["scorer"], figures["failure_rate"]["value"]) == ("goal", pytest.approx(2 / 3))
    again = cli.folder / "attack" / "evaluations" / figures["name"]
    own = json.loads(cli.ok("score", str(again), "--scorer", "own", "--json").out)
    assert own["outcomes"] == figures_in(stored)["outcomes"]
    # A scenario is code, so that of a changed record needs approval.
    record = json.loads((stored / "experiment.json").read_text())
    record["experiment"]["overrides"] = ["seed=7"]
    (stored / "experiment.json").write_text(json.dumps(record))
    assert "--trust" in refused(cli("score", str(stored), "--scorer", "goal", "--name", "b"))
    cli.ok("score", str(stored), "--scorer", "goal", "--name", "b", "--trust")
    (stored / "experiment.json").unlink()
    assert "`evaluate`" in refused(cli("export", str(stored), "--format", "jsonl"))


def figures_in(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return figures


def test_lists_are_compared_attack_by_attack(cli: CommandLine) -> None:
    cli.write("first.txt", "the cat sat\nare you fine\na silly mat\n")
    cli.write("second.txt", "a silly mat\nhello\nthe cat sat\n")
    for name in ("first", "second"):
        evaluate(cli, f"{name}.txt")
    folders = [str(cli.folder / name / "evaluations" / "test") for name in ("first", "second")]
    (metrics,) = json.loads(cli.ok("compare", *folders, "--json").out)["comparisons"].values()
    assert metrics["num_pairs"] == 2
    assert metrics["probe_nll"]["num_attacks"] == 2
    # The same probes have the same likelihood, whatever their position in the list.
    rows = [{row["probe"]: row for row in rows_of(cli, name)} for name in ("first", "second")]
    for side, found in zip(("first", "second"), rows, strict=True):
        expected = sum(
            -found[probe]["reference_logprob"] / found[probe]["probe_num_tokens"]
            for probe in ("the cat sat", "a silly mat")
        )
        assert metrics["probe_nll"][side] == pytest.approx(expected / 2)


def test_a_list_that_is_repeated_is_no_collapsed_attacker(cli: CommandLine) -> None:
    cli.write("attack.csv", PROBES)
    figures = evaluate(
        cli, "attack.csv", "--column", "probe", "--scorer", "goal", "--num-episodes", "60"
    )
    assert figures["outcomes"]["failure"] == 40
    variety = figures["diversity"]
    assert (variety["num_probes"], variety["distinct_share"]) == (2, 1.0)
    assert not says(" ".join(figures["warnings"]), "collapsed")


def test_a_list_of_probes_needs_a_scenario_and_a_split_that_exists(cli: CommandLine) -> None:
    assert "--scenario NAME" in refused(cli("evaluate", cli.write("a.txt", "one\n")))
    (cli.folder / "attacks").mkdir()
    cli.write("attacks/test.csv", PROBES)
    result = cli("evaluate", "attacks:dev", "--scenario", str(cli.scenario))
    assert says(refused(result), "attacks", "dev")


FEW = ("--num-episodes", "6", "--probability-episodes", "0")
SMALL = (*FEW, "--set", "ast_chat.failure_threshold=0.5")


def rows_of_folder(cli: CommandLine, folder: Path) -> list[dict[str, Any]]:
    """The rows of an evaluation of an attacker's folder."""
    cli.ok("evaluate", str(folder), *SMALL, "--scenario", str(cli.scenario))
    return read_rows(folder / "evaluations" / "test" / "rows.jsonl")


def test_a_copied_model_generates_the_same_as_in_its_run(cli: CommandLine, run: Path) -> None:
    copied = Path(shutil.copytree(run / "model", cli.folder / "copied"))
    cli.ok("evaluate", str(run), *SMALL)
    assert rows_of_folder(cli, copied) == read_rows(run / "evaluations" / "test" / "rows.jsonl")
    assert figures_of(copied)["failure_rate"] == figures_of(run)["failure_rate"]


def test_an_adapter_is_added_to_its_base_model(cli: CommandLine, tiny_model_dir: Path) -> None:
    pytest.importorskip("peft")
    model = add_adapter(load_causal_lm(str(tiny_model_dir), None), LoraParameters(rank=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    model.save_pretrained(cli.folder / "adapter")
    for name in ("plain", "merged"):
        shutil.copytree(tiny_model_dir, cli.folder / name)
    model.merge_and_unload().save_pretrained(cli.folder / "merged")
    adapted, merged, plain = (
        [row["probe"] for row in rows_of_folder(cli, cli.folder / name)]
        for name in ("adapter", "merged", "plain")
    )
    assert adapted == merged != plain


def test_missing_parts_are_reported(cli: CommandLine, run: Path, tiny_model_dir: Path) -> None:
    for name in ("empty", "nameless"):
        (cli.folder / name).mkdir()
    cli.write("nameless/adapter_config.json", "{}")
    other = make_language_model(cli.folder / "other")
    tokenizer = (other / "tokenizer.json").read_text().replace('"hello"', '"hallo"')
    (other / "tokenizer.json").write_text(tokenizer)
    scenario = ("--scenario", str(cli.scenario))
    for arguments, fact in (
        ((str(tiny_model_dir),), "--scenario NAME"),
        (("empty", *scenario), "neither a run nor a model"),
        ((str(run), *scenario), "--scenario"),
        (("nameless", *scenario), "base model"),
        (("other", *scenario), "vocabulary"),
    ):
        assert fact in refused(cli("evaluate", *arguments))
