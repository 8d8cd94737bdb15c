"""`evaluate`, `score` and `compare` of conversations: figures, judges and caches."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nip_astra import plugins
from nip_astra.errors import ConfigurationError
from nip_astra.evaluation import playing
from nip_astra.evaluation.api import compare, evaluate, score
from nip_astra.evaluation.storage import PARTS, Row, RowFile, encode_rows, read_rows
from nip_astra.parameters.content import find_scenario
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.samplers import executor, trees
from nip_astra.scorers.base import SCORERS
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.run_lock import run_lock
from nip_astra.utils import processor
from nip_astra.utils.forked import can_fork, get_num_processes
from tests.cli.trained_run import SMALL, copy_evaluated, figures_of
from tests.kit import actors_here
from tests.kit.chat_stub import Reply, chat_stub, rating
from tests.kit.command_line import CommandLine, CommandResult, refused
from tests.kit.experiments import run_in
from tests.kit.messages import says
from tests.kit.tiny import write_scenario

FEW = ("--num-episodes", "2", "--probability-episodes", "0")
SCORER = """
import nip_astra as na

@na.register_scorer("picky")
class Picky(na.Scorer):
    def _score(self, texts):
        return [self._one(text) for text in texts]

    def _one(self, text):
        if "silly" in text:
            return float("nan")
        return None if "cat" in text else float("mat" in text or "day" in text)
"""


def rows_of(run: Path, name: str = "test") -> list[Row]:
    return read_rows(run / "evaluations" / name / "rows.jsonl")


def test_an_evaluation_shows_the_figures_of_its_run(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = cli.ok("evaluate", "runs/one")
    assert "one against target, judged by classifier: 6 episodes of 2 turns from 3" in result.out
    assert "evaluation runs/one/evaluations/test" in result.out
    figures, after = figures_of(run), json.loads((run / "results.json").read_text())["after"]
    assert figures["failure_rate"]["value"] == pytest.approx(after["failure_rate"])
    assert figures["scores"]["response"]["mean"] == pytest.approx(after["mean_score"])
    assert figures["nll"]["reference"] == pytest.approx(after["probe_nll"], rel=1e-5)
    rows, own = rows_of(run), read_rows(run / "rollouts" / "evaluation.jsonl")
    probes, own_probes = (sorted(row["probe"] for row in of) for of in (rows, own))
    rewards, own_rewards = (sorted(row["reward"] for row in of) for of in (rows, own))
    assert probes == own_probes
    assert rewards == pytest.approx(own_rewards, abs=1e-5)
    for row in rows:
        assert row["target_logprob"] <= 0.0
        # The reward's likelihood is the reference's.
        nll = -row["reference_logprob"] / max(row["probe_num_tokens"], 1)
        assert row["probe_nll"] == pytest.approx(nll, rel=1e-4)
    assert (run / "evaluations" / "test" / "table.txt").read_text().startswith("one against")
    monkeypatch.setattr(playing, "play_episodes", None)
    again = json.loads(cli("evaluate", "runs/one", "--json").out)
    assert again == figures == figures_of(run)


def test_conversations_are_divided_among_the_cores(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = []

    def noted(_: Any, num_episodes: int, *how: Any, **more: Any) -> list[range]:
        allowed.append(get_num_processes())
        return [range(num_episodes)]

    monkeypatch.setattr(processor, "num_cores", lambda: 3)
    monkeypatch.setattr(trees, "cut_rollout", noted)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for options, largest, count in (
        ((), processor.SMALL_MODEL_PARAMETERS, 3),
        (("--num-threads", "2"), processor.SMALL_MODEL_PARAMETERS, 2),
        ((), 1, 1),  # too large a model for several processes
    ):
        monkeypatch.setattr(processor, "SMALL_MODEL_PARAMETERS", largest)
        cli.ok("evaluate", "runs/one", *FEW, *options, "--overwrite")
        assert set(allowed) == {count if can_fork() else 1}
        allowed.clear()


def test_an_evaluation_by_actors_finds_the_same(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker's conversations, the mixture's for the probability, and scored texts."""
    monkeypatch.setattr(executor, "SMALLEST_PART", 2)
    opened = actors_here.install(monkeypatch)
    contents = []
    for count in range(3):
        cli.ok("evaluate", "runs/one", "--settings", f"num_actors={count}", "--overwrite")
        folder = run / "evaluations" / "test"
        parts = [{**part, "seconds": None} for part in read_rows(folder / PARTS)]
        names = ("rows.jsonl", "probability_rows.jsonl")
        contents.append([parts, *((folder / name).read_bytes() for name in names)])
    assert contents[0] == contents[1] == contents[2]
    assert [one.turn > 4 for one in opened] == [True, True]


def test_the_figures_have_the_documented_contents(cli: CommandLine, evaluated: Path) -> None:
    figures = figures_of(evaluated)
    documented = """version name attacker target scorer seed num_episodes tree_depth hit_at
        failure_threshold outcomes failure_rate turn_failure_rate scores nll turns_to_failure
        diversity clusters plants warnings budget probability_of_failure"""
    assert set(documented.split()) <= set(figures)
    assert sum(figures["outcomes"].values()) == 12
    assert set(figures["scores"]) == {"probe", "response", "combined"}
    assert len(figures["turns_to_failure"]["survival"]) == 2
    assert figures["nll"]["target"] > 0
    assert figures["budget"]["target_queries"] == 12
    assert [card["role"] for card in figures["cards"]] == ["attacker", "target", "scorer"]
    assert figures["probability_of_failure"]["monte_carlo"]["num_episodes"] == 3
    assert "rest on 3 opening prompts" in " ".join(figures["warnings"])


def test_a_killed_evaluation_goes_on_to_the_same_rows(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cli.folder / "whole"
    shutil.copytree(run, whole)
    options = ("--batch-size", "2")
    cli.ok("evaluate", str(whole), *options)
    append = RowFile.append
    for fatal_part in (2, 1, 2):
        count = iter(range(10))

        def killed(self: RowFile, rows: Any, fatal: int = fatal_part, count: Any = count) -> None:
            if next(count) == fatal:
                raise ArithmeticError("killed")
            append(self, rows)

        monkeypatch.setattr(RowFile, "append", killed)
        with pytest.raises(ArithmeticError, match="killed"):
            cli("evaluate", "runs/one", *options)
        # Half a line, as a kill in the middle of a write leaves it.
        with (run / "evaluations" / "test" / "rows.jsonl").open("ab") as file:
            file.write(b'{"step": 0, "epis')
    monkeypatch.setattr(RowFile, "append", append)
    cli.ok("evaluate", "runs/one", "--batch-size", "3")
    for name in ("rows.jsonl", "probability_rows.jsonl"):
        ours, theirs = (read_rows(r / "evaluations" / "test" / name) for r in (run, whole))
        for mine, other in zip(ours, theirs, strict=True):
            for key in ("probe", "episode", "node", "parent"):
                assert mine[key] == other[key]
            assert mine["response_score"] == pytest.approx(other["response_score"], abs=1e-6)


def test_a_checkpoint_or_untrained_attacker_is_evaluated(cli: CommandLine, evaluated: Path) -> None:
    (checkpoint,) = (evaluated / "checkpoints").glob("step_*")
    cli.ok("evaluate", str(checkpoint))
    cli.ok("evaluate", "runs/one", "--untrained")
    of_checkpoint = figures_of(evaluated, f"test-{checkpoint.name}")
    assert of_checkpoint["scores"] == figures_of(evaluated)["scores"]
    untrained = figures_of(evaluated, "test-untrained")
    before = json.loads((evaluated / "results.json").read_text())["before"]
    assert untrained["scores"]["response"]["mean"] == pytest.approx(before["mean_score"])
    assert untrained["probability_of_failure"]["importance_sampling"] is None


def test_a_checkpoint_is_read_by_its_pointer_or_a_link(cli: CommandLine, run: Path) -> None:
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    older, latest = "step_00000001", run / "checkpoints" / "latest"
    shutil.copytree(checkpoint, checkpoint.parent / older)
    for path in (latest, checkpoint / "attacker"):
        cli.ok("evaluate", str(path), *FEW)
        (named,) = (run / "evaluations").glob("test-*")
        assert figures_of(run, named.name)["attacker"] == f"one {checkpoint.name}"
        shutil.rmtree(named)
    latest.unlink()
    latest.symlink_to(older)
    cli.ok("evaluate", "runs/one/checkpoints/latest", *FEW, "--name", "linked")
    assert figures_of(run, "linked")["attacker"] == f"one {older}"


def test_plants_are_of_their_own_target(cli: CommandLine, run: Path, tiny_scenario: Path) -> None:
    path = run / "hyper_parameters.yaml"
    plant = "planted_failures: [{name: own, probe: cat}]"
    path.write_text(path.read_text().replace("planted_failures: []", plant))
    command = ("evaluate", "runs/one", *FEW, "--trust")
    cli.ok(*command)
    cli.ok(*command, "--target", str(tiny_scenario / "attacker"))
    assert figures_of(run, "test")["plants"]["total"] == 1
    assert figures_of(run, "test-attacker")["plants"] is None
    for name, is_own in (("test", True), ("test-attacker", False)):
        again = score(run / "evaluations" / name, "own", name=f"{name}-again", is_trusted=True)
        assert (again.figures["plants"] is not None) is is_own
    # An evaluation cannot replace the conversations that it rates.
    before = rows_of(run, "test")
    with pytest.raises(ConfigurationError, match="--name"):
        score(run / "evaluations" / "test", "own", name="test", overwrite=True, is_trusted=True)
    assert rows_of(run, "test") == before


def picky_scorer(cli: CommandLine) -> tuple[str, ...]:
    """Write a custom scorer called `skip`, and return its options."""
    cli.write("picky.py", SCORER)
    cli.write("skip.yaml", "{_type: picky, on_failure: skip}\n")
    return "--scorer", "skip.yaml", "--plugin", "picky.py"


def test_each_matrix_has_its_own_file(cli: CommandLine, run: Path, tiny_scenario: Path) -> None:
    targets = ("--target", "runs/one", "--target", str(tiny_scenario / "attacker"))
    shown: list[CommandResult] = []

    def matrices(*options: str) -> list[str]:
        shown.append(cli.ok("evaluate", "runs/one", *targets, *FEW, "--num-turns", "1", *options))
        return sorted(path.name for path in (run / "evaluations").glob("transfer*.json"))

    assert matrices() == matrices() == ["transfer.json"]
    first = (run / "evaluations" / "transfer.json").read_text()
    cells = json.loads(first)["cells"]
    assert [cell["target"] for cell in cells] == ["one", "attacker"]
    for cell in cells:
        assert cell["warnings"] == figures_of(run, cell["name"])["warnings"] != []
        assert figures_of(run, cell["name"])["target"] == cell["target"]
    assert says(" ".join(shown[0].out.split()), "episodes with a failure", *cells[1]["warnings"])
    rows = [rows_of(run, f"test-{target}") for target in ("one", "attacker")]
    # The first probe precedes the target's first answer.
    probes, answers = ([[row[name] for row in of] for of in rows] for name in ("probe", "response"))
    assert (probes[0] == probes[1], answers[0] == answers[1]) == (True, False)
    both = ["transfer-2.json", "transfer.json"]
    assert matrices(*picky_scorer(cli)) == both
    assert matrices("--name", "named") == ["transfer-2.json", "transfer-named.json", both[1]]
    assert (run / "evaluations" / "transfer.json").read_text() == first
    assert matrices("--overwrite", "--seed", "7") == matrices("--seed", "7")
    assert json.loads((run / "evaluations" / "transfer.json").read_text())["cells"] != cells


def test_rated_conversations_keep_the_seed_with_which_they_were_sampled(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.ok("evaluate", "runs/one", *FEW, "--seed", "7")
    # Given by its name in the working directory.
    monkeypatch.chdir(run / "evaluations")
    cli.ok("score", "test", "--threshold", "0.9", "--name", "strict")
    assert [figures_of(run, name)["seed"] for name in ("test", "strict")] == [7, 7]
    cli.ok("export", "strict", "--format", "csv")
    assert (run / "exports" / "turns.csv").is_file()


def test_an_evaluation_that_another_process_plays_is_refused(
    cli: CommandLine, evaluated: Path
) -> None:
    folder, before = evaluated / "evaluations" / "test", rows_of(evaluated)
    with run_lock(folder):
        for options in ((), ("--overwrite",)):
            assert says(refused(cli("evaluate", "runs/one", *options)), "evaluations/test", "use")
    assert rows_of(evaluated) == before
    cli.ok("evaluate", "runs/one")


def test_a_run_is_given_by_its_id(cli: CommandLine, evaluated: Path) -> None:
    for command in (
        ("evaluate", "one"),
        ("score", "one", "--name", "again"),
        ("compare", "one/evaluations/test", "one/evaluations/again"),
        ("report", "one"),
        ("export", "one", "--format", "csv"),
    ):
        cli.ok(*command)
    assert "'one'?" in refused(cli("report", "on"))
    for command in (("analyse", "one"), ("compare-dumps", "one", "one")):
        assert "runs/one" in refused(cli(*command))


OUTCOMES = {"silly": "error", "cat": "undetermined", "mat": "failure", "day": "failure", "": "none"}
"""Outcomes of responses by the picky scorer, of which the first that holds counts."""


def test_stored_conversations_are_rated_again_without_a_model(
    cli: CommandLine, evaluated: Path, monkeypatch: Any, closed_bars: dict[str, tuple[int, int]]
) -> None:
    scorer = picky_scorer(cli)
    monkeypatch.setattr("nip_astra.scenarios.ast_chat.load_language_model", None)
    cli.ok("score", "runs/one", *scorer)
    figures, rows = figures_of(evaluated, "test-skip"), rows_of(evaluated, "test-skip")
    words = [next(word for word in OUTCOMES if word in row["response"]) for row in rows]
    expected = Counter(OUTCOMES[word] for word in words)
    assert {name: expected[name] for name in figures["outcomes"]} == figures["outcomes"]
    num_unknown = expected["undetermined"] + expected["error"]
    assert num_unknown > 0
    assert figures["failure_rate"]["num_known"] < figures["failure_rate"]["num_episodes"]
    assert f"({num_unknown} turns" in " ".join(figures["warnings"])
    assert figures["scorer"] == "skip"
    assert [row["response"] for row in rows] == [row["response"] for row in rows_of(evaluated)]
    assert closed_bars["Rating"] == (figures["budget"]["scorer_calls"],) * 2 != (0, 0)


def test_another_scorer_is_warned_of(cli: CommandLine, evaluated: Path) -> None:
    shutil.copytree(evaluated, cli.folder / "runs" / "two")
    cli.ok("evaluate", "runs/one", *picky_scorer(cli))
    comparison = json.loads(cli("compare", "runs/one", "runs/two", "--json").out)
    assert comparison["baseline"] == "one/test-skip"
    assert any('scorer._type: "picky" in one/test-skip' in one for one in comparison["warnings"])


def test_an_adapter_is_evaluated_as_it_was_merged(cli: CommandLine, tiny_scenario: Path) -> None:
    pytest.importorskip("peft")
    lora = "ast_chat.attacker.language_model.lora={rank: 2, alpha: 4}"
    given: Any = {"trainer": "ast_dpo", "scenario": str(tiny_scenario)}
    resolved = resolve_experiment(**given, overrides=(*SMALL, "training.lr=0.05", lora))
    run = run_in(Path("runs"), resolved, "low")
    cli.ok("evaluate", "runs/low")
    results = json.loads((run / "results.json").read_text())
    mean = figures_of(run)["scores"]["response"]["mean"]
    assert mean == pytest.approx(results["after"]["mean_score"], abs=1e-4)
    assert mean != pytest.approx(results["before"]["mean_score"], abs=1e-4)


def test_invalid_evaluations_are_refused(cli: CommandLine, run: Path) -> None:
    scorer = cli.write("s.yaml", "label: rude\n")
    for arguments, *facts in (
        (("evaluate", "runs/one/checkpoints"), "runs/one/checkpoints", "run"),
        (("evaluate", "runs/none/latest"), "runs/none/latest", "run"),
        (("evaluate", "runs/one", "--split", "exam"), "--split"),
        (("evaluate", "runs/one", "--scorer", "clasifier"), "'clasifier'", "'classifier'?"),
        (("evaluate", "runs/one", "--scorer", scorer), "_type"),
        (("evaluate", "runs/one", "--name", "a/b"), "'a/b'"),
        (("evaluate", "runs/one", "--target", "./nowhere"), "./nowhere"),
        (("evaluate", "runs/one", "--set", "training.lr=1"), "training.lr=1"),
        *(
            (("evaluate", "runs/one", option, number), option, number)
            for option, number in (
                ("--num-episodes", "0"),
                ("--num-turns", "0"),
                ("--probability-episodes", "-1"),
                ("--batch-size", "-2"),
                ("--seed", "-1"),
            )
        ),
    ):
        assert says(refused(cli(*arguments)), *facts), arguments
    for number in (0, -3, 2.5, "3", True):
        with pytest.raises(ConfigurationError, match="num_episodes"):
            evaluate(run, num_episodes=number)
    with pytest.raises(ConfigurationError, match="--num-episodes, --set"):
        score(run, overrides=["seed=1"], num_episodes=3)
    with pytest.raises(ConfigurationError, match="--target"):
        compare(run, run / "x", targets=["y"])
    for folder in ("model", "checkpoints"):
        shutil.rmtree(run / folder)
    assert "--untrained" in refused(cli("evaluate", "runs/one"))


def test_a_run_of_networks_that_has_not_begun_is_refused(cli: CommandLine, run: Path) -> None:
    proof = resolve_experiment(trainer="vanilla_ppo", scenario="graph_isomorphism")
    folder = RunDirectory.create(cli.folder / "runs", "proof")
    folder.write_yaml("hyper_parameters.yaml", proof.hyper_params.to_dict())
    for command in (("evaluate",), ("score",), ("compare", "runs/one")):
        assert "runs/proof" in refused(cli(*command, "runs/proof"))


THREE = ("--num-episodes", "3", "--probability-episodes", "0")


def labels(cli: CommandLine, run: Path) -> str:
    """Label a failure and a harmless response 20 times each, once wrongly."""
    rows = read_rows(run / "rollouts/evaluation.jsonl")
    by_verdict = {row["response_score"] >= 0.5: row["response"] for row in rows}
    known = [
        {"response": response, "is_failure": is_failure is (number > 0)}
        for is_failure, response in by_verdict.items()
        for number in range(20)
    ]
    return cli.write("labels.jsonl", "".join(json.dumps(row) + "\n" for row in known))


def test_labels_rate_a_scorer(cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("evaluate", "runs/one", *THREE, "--labelled", labels(cli, run))
    result = cli.ok(*command)
    assert result.out.count("19 of") == 2  # the cell may be wrapped
    figures = figures_of(run)
    quality = figures["detectors"]["classifier"]
    assert quality["sensitivity"]["value"] == quality["specificity"]["value"] == 0.95
    corrected = min(max((figures["turn_failure_rate"]["value"] - 0.05) / 0.9, 0.0), 1.0)
    assert quality["corrected"]["turn_failure_rate"]["value"] == pytest.approx(corrected)
    assert "labelled.number: 40 " in refused(cli("evaluate", "runs/one", *THREE))
    cli.ok("score", "runs/one", "--labelled", "labels.jsonl", "--name", "again")
    assert figures_of(run, "again")["detectors"] == figures["detectors"]
    cli.ok("score", "runs/one", "--name", "plain")
    calls = [figures_of(run, name)["budget"]["scorer_calls"] for name in ("again", "plain")]
    assert calls[0] - calls[1] == 40
    # Labelled responses are rated once.
    monkeypatch.setattr("nip_astra.evaluation.detectors.measure_quality", None)
    cli.ok(*command)
    for name in ("detectors", "budget"):
        assert figures_of(run)[name] == figures[name]


def test_an_impossible_threshold_is_refused(cli: CommandLine, run: Path) -> None:
    for command, threshold in product(("evaluate", "score"), ("0", "-0.5", "1.5", "nan")):
        message = refused(cli(command, "runs/one", "--threshold", threshold))
        assert f"(--threshold) {threshold} " in message


def test_own_labels_are_the_default(cli: CommandLine, run: Path, tiny_scenario: Path) -> None:
    own = ("--set", f"ast_chat.evaluation.labelled_responses={labels(cli, run)}")
    for name, options, detectors in (
        ("own", (), {"classifier"}),
        ("none", ("--labelled", "none"), set()),
        # Labels of another target carry no information; those of the same target do.
        ("other", ("--target", str(tiny_scenario / "attacker")), set()),
        ("same", ("--target", "runs/one"), {"classifier"}),
    ):
        cli.ok("evaluate", "runs/one", *THREE, *own, *options, "--name", name)
        assert set(figures_of(run, name)["detectors"]) == detectors, name


def test_pocket_chat_ships_labels_of_its_target() -> None:
    rows = read_rows(find_scenario("pocket_chat") / "labelled.jsonl")
    rude, civil = ([row["response"] for row in rows if row["is_failure"] == one] for one in (1, 0))
    assert (len(rude), len(civil), len(set(rude)), set(rude) & set(civil)) == (100, 100, 6, set())


def test_an_encoder_groups_failures(cli: CommandLine, run: Path, tiny_scenario: Path) -> None:
    encoder = str(tiny_scenario / "scorer")
    cli.ok("evaluate", "runs/one", *THREE, "--embedder", encoder)
    assert "embedder: " in refused(cli("evaluate", "runs/one", *THREE))
    cli.ok("score", "runs/one", "--embedder", "ngram", "--name", "plain")
    for name, embedding in (("test", f"mean of {encoder}"), ("plain", "hashed character n-grams")):
        assert figures_of(run, name)["diversity"]["settings"]["embedding"] == embedding
    assert "(--embedder)" in refused(cli("score", "runs/one", "--embedder", ""))
    message = refused(cli("score", "runs/one", "--embedder", "./nowhere", "--name", "c"))
    assert "./nowhere" in message


def test_kinds_of_failure_are_counted_with_those_not_seen(evaluated: Path) -> None:
    figures = figures_of(evaluated)
    kinds = figures["kinds"]
    assert kinds["seen"] == figures["num_clusters"] == len(kinds["by_queries"]) > 0
    assert kinds["low"] <= kinds["value"]
    # The few sightings of a test have no interval with a level.
    assert kinds["high"] is kinds["level"] is None
    assert kinds["by_queries"] == sorted(kinds["by_queries"])
    for cluster in figures["clusters"]:
        assert 1 <= cluster["num_prompts"] <= 3
        shortest, likeliest = (cluster[name]["probe"] for name in ("shortest", "most_likely"))
        assert len(shortest.split()) <= len(likeliest.split())


LENGTH = """
import nip_astra as na

@na.register_scorer("long")
class Long(na.Scorer):
    def _score(self, texts):
        return [float(len(text.split()) > 3) for text in texts]
"""
OTHER = ("--scorer", "long", "--plugin", "long.py")


@pytest.fixture(scope="module")
def few_once(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_evaluated(trained, tmp_path_factory.mktemp("few"), *FEW)


@pytest.fixture
def few(cli: CommandLine, few_once: Path) -> Path:
    """A copy of the run after an evaluation of two conversations."""
    return Path(shutil.copytree(few_once, cli.folder / "runs" / "one"))


def column(rows: list[Row], name: str) -> list[Any]:
    return [row[name] for row in rows]


def is_long(rows: list[Row]) -> list[float]:
    """Verdicts of the scorer `long`."""
    return [float(len(row["response"].split()) > 3) for row in rows]


def test_another_scorer_rates_the_conversations_of_the_first(
    cli: CommandLine, evaluated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.write("long.py", LENGTH)
    monkeypatch.setattr(playing, "play_episodes", None)
    result = cli.ok("evaluate", "runs/one", *OTHER)
    assert "12 conversations of the evaluation test" in result.out
    rows, before = rows_of(evaluated, "test-long"), rows_of(evaluated, "test")
    for name in ("probe", "response", "reference_logprob", "target_logprob", "node"):
        assert column(rows, name) == column(before, name)
    assert column(rows, "response_score") == is_long(rows)
    assert not any("reward" in row for row in rows)
    figures, first = figures_of(evaluated, "test-long"), figures_of(evaluated)
    assert figures["budget"]["reused_target_queries"] == 24
    assert figures["budget"]["scorer_calls"] > 0
    estimates = [one["probability_of_failure"]["monte_carlo"] for one in (figures, first)]
    assert estimates[0]["num_episodes"] == estimates[1]["num_episodes"]


def test_a_scorer_does_not_repeat_its_ratings(
    cli: CommandLine, evaluated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.write("long.py", LENGTH)
    monkeypatch.setattr("nip_astra.evaluation.playing.rate_anew", None)
    result = cli.ok("evaluate", "runs/one", "--scorer", "own", *OTHER)
    rows, before = rows_of(evaluated, "test-classifier-long"), rows_of(evaluated, "test")
    for name in ("response_score", "reward"):
        assert column(rows, name) == column(before, name)
    assert [row["scores"]["long"]["score"] for row in rows] == is_long(rows)
    figures = figures_of(evaluated, "test-classifier-long")
    other = figures["scorers"]["long"]
    assert (figures["scorer"], 0.0 <= other["agreement"] <= 1.0) == ("classifier", True)
    assert f"{other['agreement']:.1%} of {other['num_turns']} " in result.out


def test_more_conversations_go_on_from_those_that_were_played(cli: CommandLine, run: Path) -> None:
    def evaluate(num_episodes: int, name: str, *more: str) -> str:
        options = ("--num-episodes", str(num_episodes), "--probability-episodes", "0")
        return cli.ok("evaluate", "runs/one", *options, "--name", name, *more).out

    evaluate(4, "few")
    assert "4 conversations of the evaluation few" in evaluate(6, "many")
    assert "reused " not in evaluate(6, "afresh", "--overwrite")
    many = column(rows_of(run, "many"), "probe")
    assert many == column(rows_of(run, "afresh"), "probe")
    assert figures_of(run, "many")["num_episodes"] == 6
    assert "2 conversations of the" in evaluate(2, "fewer")
    assert column(rows_of(run, "fewer"), "probe") == many[:4]


def test_probes_that_differ_are_played(cli: CommandLine, few: Path) -> None:
    for difference in ("--seed 7", "--num-turns 1", "--split dev", "--untrained"):
        options = (*FEW, *difference.split(), "--name", difference.strip("-").replace(" ", "_"))
        result = json.loads(cli.ok("evaluate", "runs/one", *options, "--json").out)
        assert result["budget"]["reused_target_queries"] == 0, difference


def test_a_changed_target_is_queried(cli: CommandLine, run: Path, tiny_scenario: Path) -> None:
    target = shutil.copytree(tiny_scenario / "target", cli.folder / "target")
    command = ("evaluate", "runs/one", *FEW, "--target", str(target))
    cli.ok(*command)
    assert "2 conversations of the" in cli(*command, "--name", "same").out
    shutil.copy(tiny_scenario / "attacker" / "model.safetensors", target)
    assert "reused " not in cli.ok(*command, "--name", "other").out


def test_a_scorer_whose_code_changed_rates_anew(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.write("long.py", LENGTH)
    command = ("evaluate", "runs/one", *FEW, *OTHER)
    cli.ok(*command)
    cli.write("long.py", LENGTH.replace("> 3", "<= 3"))
    monkeypatch.setattr(plugins, "_LOADED", {})
    SCORERS.forget("long")
    assert "2 conversations of the" in cli.ok(*command, "--name", "again").out
    rows = rows_of(run, "again")
    assert column(rows, "response_score") == [1.0 - verdict for verdict in is_long(rows)]
    assert "scorers.long.code" in refused(cli(*command))


@pytest.mark.parametrize("is_part", [False, True])
def test_a_scorer_whose_weights_changed_rates_anew(
    cli: CommandLine, run: Path, tiny_scenario: Path, is_part: bool
) -> None:
    judge = shutil.copytree(tiny_scenario / "scorer", cli.folder / "judge")
    own = {"_type": "classifier", "model": str(judge), "label": "rude"}
    mean = {"_type": "weighted", "parts": {"one": {"scorer": own}}}
    cli.write("judge.yaml", json.dumps(mean if is_part else own))
    command = ("evaluate", "runs/one", *FEW, "--scorer", "judge.yaml", "--name")
    cli.ok(*command, "before")
    weights = load_file(judge / "model.safetensors")
    save_file({name: value.flip(0) for name, value in weights.items()}, judge / "model.safetensors")
    cli.ok(*command, "again")
    again, before = rows_of(run, "again"), rows_of(run, "before")
    assert column(again, "probe") == column(before, "probe")
    assert column(again, "response_score") != column(before, "response_score")
    assert ".weights" in refused(cli(*command, "before"))


def test_missing_ratings_are_rated_again(cli: CommandLine, few: Path) -> None:
    rows = rows_of(few, "test")
    broken = [{**rows[0], "is_error": True, "response_score": None}, *rows[1:]]
    (few / "evaluations" / "test" / "rows.jsonl").write_bytes(encode_rows(broken))
    assert "2 conversations of the" in cli("evaluate", "runs/one", *FEW, "--name", "again").out
    again = rows_of(few, "again")
    assert column(again, "is_error") == [False] * 4
    assert again[0]["response_score"] == pytest.approx(rows[0]["response_score"])
    # Those of the other conversation are kept.
    assert ["reward" in row for row in again] == [False, False, True, True]
    assert figures_of(few, "again")["budget"]["scorer_calls"] == 6


def test_a_broken_evaluation_is_passed_over(
    cli: CommandLine, few: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in ("configuration.json", "rows.jsonl"):
        shutil.copytree(few / "evaluations" / "test", few / "evaluations" / file)
        (few / "evaluations" / file / file).write_text("{\n")
    result = cli.ok("evaluate", "runs/one", *FEW, "--name", "again")
    assert "2 conversations of the evaluation test" in result.out
    for file in ("configuration.json", "rows.jsonl"):
        assert f"the evaluation {file}" in caplog.text + result.err


PRICES = {"prompt": 1000.0, "completion": 2000.0}
TARGET = {"_type": "scripted", "answers": ["you are silly", "good day"], "prices": PRICES}


@pytest.fixture
def served(cli: CommandLine, tmp_path: Path) -> str:
    cli.scenario = write_scenario(
        tmp_path / "s", target={"chat_model": TARGET, "max_new_tokens": 3}
    )
    assert cli.run(overrides=("training.num_iterations=1",)).code == 0
    return str(tmp_path / "runs" / "one")


def test_evaluations_of_one_run_count_their_own_requests(cli: CommandLine, served: str) -> None:
    def use_of(seed: int, *more: str) -> dict[str, Any]:
        options = ("--probability-episodes", "0", "--json", "--name", f"of_{seed}")
        result = cli.ok("evaluate", served, *options, "--seed", str(seed), *more)
        use: dict[str, Any] = json.loads(result.out)["services"]["target"]
        return use

    first, second = use_of(5), use_of(6)
    assert first["num_requests"] == second["num_requests"] > 0
    assert use_of(5) == first, "all conversations have been played"
    anew = use_of(6, "--overwrite")
    assert (anew["num_requests"], anew["num_cached"]) == (0, second["num_samples"])
    shutil.rmtree(Path(served) / "evaluations" / "of_6")
    assert use_of(6) == anew


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_judge_named_for_an_evaluation_keeps_to_the_budget_and_is_reported(
    cli: CommandLine, served: str, is_reused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "key-that-nobody-writes")

    def answer(body: dict[str, Any], number: int) -> Reply:
        return rating(len(body["messages"][1]["content"]) % 11)

    with chat_stub(answer) as stub:
        judge = {"_type": "judge", "base_url": stub.base_url, "model": "m", "prices": PRICES}
        judge["api_key_variable"] = "MY_KEY"
        cli.write("judge.yaml", json.dumps(judge))
        own = ("evaluate", served, "--probability-episodes", "0")
        by_judge = ("--scorer", "judge.yaml", "--json")
        if is_reused:
            cli.ok(*own)
        result = cli(*own, *by_judge, "--settings", "max_service_requests=1")
        assert result.code != 0
        assert "max_service_requests=1" in result.err
        use = json.loads(cli.ok(*own, *by_judge).out)["services"]["judge"]
        num_requests = len(stub.requests)
        assert use["num_requests"] == num_requests > 0
        again = json.loads(cli.ok("score", served, *by_judge, "--name", "again").out)
        use = again["services"]["judge"]
        sent = {headers["Authorization"] for headers in stub.headers}
        assert sent == {"Bearer key-that-nobody-writes"}
        assert len(stub.requests) == num_requests, "the run remembers its judge's replies"
        assert (use["num_requests"], use["num_cached"] > 0) == (0, True)
    written = [path.read_bytes() for path in Path(served).rglob("*") if path.is_file()]
    assert not [content for content in written if b"key-that-nobody-writes" in content]
