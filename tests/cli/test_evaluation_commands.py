"""`evaluate`, `score` and `compare`, as a user runs them, on a run of tiny models."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.evaluation import playing
from nip_astra.evaluation.api import compare, score
from nip_astra.evaluation.storage import PARTS, Row, RowFile, read_rows
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.samplers import executor, trees
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.utils import processor
from nip_astra.utils.forked import can_fork, get_num_processes
from tests.cli.trained_run import SMALL, figures_of
from tests.kit import actors_here
from tests.kit.command_line import CommandLine, refused
from tests.kit.experiments import run_in
from tests.kit.messages import says

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


def test_an_evaluation_shows_the_figures_of_the_run_itself_and_is_not_repeated(
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


def test_a_checkpoint_and_the_untrained_attacker_can_be_evaluated(
    cli: CommandLine, evaluated: Path
) -> None:
    (checkpoint,) = (evaluated / "checkpoints").glob("step_*")
    cli.ok("evaluate", str(checkpoint))
    cli.ok("evaluate", "runs/one", "--untrained")
    of_checkpoint = figures_of(evaluated, f"test-{checkpoint.name}")
    assert of_checkpoint["scores"] == figures_of(evaluated)["scores"]
    untrained = figures_of(evaluated, "test-untrained")
    before = json.loads((evaluated / "results.json").read_text())["before"]
    assert untrained["scores"]["response"]["mean"] == pytest.approx(before["mean_score"])
    assert untrained["probability_of_failure"]["importance_sampling"] is None


def test_the_latest_checkpoint_is_read_by_its_pointer_or_by_a_link(
    cli: CommandLine, run: Path
) -> None:
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    older, latest = "step_00000001", run / "checkpoints" / "latest"
    shutil.copytree(checkpoint, checkpoint.parent / older)
    cli.ok("evaluate", "runs/one/checkpoints/latest", *FEW)
    assert figures_of(run, f"test-{checkpoint.name}")["attacker"] == f"one {checkpoint.name}"
    latest.unlink()
    latest.symlink_to(older)
    cli.ok("evaluate", "runs/one/checkpoints/latest", *FEW, "--name", "linked")
    assert figures_of(run, "linked")["attacker"] == f"one {older}"


def test_attackers_against_targets_make_a_matrix(
    cli: CommandLine, run: Path, tiny_scenario: Path
) -> None:
    targets = ("--target", "runs/one", "--target", str(tiny_scenario / "attacker"))
    result = cli.ok("evaluate", "runs/one", *targets, "--probability-episodes", "0")
    matrix = json.loads((run / "evaluations" / "transfer.json").read_text())
    assert [cell["target"] for cell in matrix["cells"]] == ["one", "attacker"]
    for cell in matrix["cells"]:
        assert cell["warnings"] == figures_of(run, cell["name"])["warnings"] != []
    assert says(" ".join(result.out.split()), *matrix["cells"][1]["warnings"])
    assert figures_of(run, "test-one")["plants"] is None
    assert figures_of(run, "test-attacker")["target"] == "attacker"
    assert "episodes with a failure" in result.out
    rows = [rows_of(run, f"test-{target}") for target in ("one", "attacker")]
    # The first probe precedes the target's first answer.
    first, second = ([row["probe"] for row in of if row["depth"] == 0] for of in rows)
    answers, others = ([row["response"] for row in of] for of in rows)
    assert (first == second, answers == others) == (True, False)


def test_planted_failures_are_shown_of_the_scenarios_own_target_alone(
    cli: CommandLine, run: Path, tiny_scenario: Path
) -> None:
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


def test_options_that_stored_evaluations_do_not_read_are_refused(run: Path) -> None:
    with pytest.raises(ConfigurationError, match="--num-episodes, --set"):
        score(run, overrides=["seed=1"], num_episodes=3)
    with pytest.raises(ConfigurationError, match="--target"):
        compare(run, run / "x", targets=["y"])


def picky_scorer(cli: CommandLine) -> tuple[str, ...]:
    """Write a custom scorer called `skip`, and return its options."""
    cli.write("picky.py", SCORER)
    cli.write("skip.yaml", "{_type: picky, on_failure: skip}\n")
    return "--scorer", "skip.yaml", "--plugin", "picky.py"


def test_each_matrix_has_its_own_file_and_equal_matrices_share_it(
    cli: CommandLine, run: Path, tiny_scenario: Path
) -> None:
    targets = ("--target", "runs/one", "--target", str(tiny_scenario / "attacker"))

    def matrices(*options: str) -> list[str]:
        cli.ok("evaluate", "runs/one", *targets, *FEW, "--num-turns", "1", *options)
        return sorted(path.name for path in (run / "evaluations").glob("transfer*.json"))

    assert matrices() == matrices() == ["transfer.json"]
    first = (run / "evaluations" / "transfer.json").read_text()
    both = ["transfer-2.json", "transfer.json"]
    assert matrices(*picky_scorer(cli)) == both
    assert matrices("--name", "named") == ["transfer-2.json", "transfer-named.json", both[1]]
    assert (run / "evaluations" / "transfer.json").read_text() == first
    assert matrices("--overwrite", "--seed", "7") == matrices("--seed", "7")
    cells = json.loads((run / "evaluations" / "transfer.json").read_text())["cells"]
    assert cells != json.loads(first)["cells"]


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


def test_a_run_that_was_not_evaluated_is_rated_from_its_own_table(
    cli: CommandLine, run: Path
) -> None:
    cli.ok("score", "runs/one", "--scorer", "own", "--threshold", "0.4")
    figures = figures_of(run, "evaluation-classifier")
    after = json.loads((run / "results.json").read_text())["after"]
    assert figures["scores"]["response"]["mean"] == pytest.approx(after["mean_score"])
    assert figures["nll"]["target"] is None
    assert figures["failure_threshold"] == 0.4


def test_several_scorers_are_reported_side_by_side(cli: CommandLine, run: Path) -> None:
    options = ("--scorer", "own", *picky_scorer(cli))
    result = cli.ok("evaluate", "runs/one", *options, "--probability-episodes", "0")
    figures = figures_of(run, "test-classifier-skip")
    assert figures["scorer"] == "classifier"
    other = figures["scorers"]["skip"]
    assert 0.0 <= other["agreement"] <= 1.0
    assert f"{other['agreement']:.1%} of {other['num_turns']} " in result.out
    cli.ok("score", "runs/one/evaluations/test-classifier-skip", *options, "--name", "again")
    for name in ("scorers", "failure_rate"):
        assert figures_of(run, "again")[name] == figures[name]


def test_two_evaluations_are_compared_pair_by_pair(cli: CommandLine, evaluated: Path) -> None:
    cli.ok("evaluate", "runs/one", "--untrained")
    pair = ("runs/one/evaluations/test-untrained", "runs/one/evaluations/test")
    assert "one/test-untrained" in cli.ok("compare", *pair, "--out", "comparison.json").out
    comparison = json.loads((cli.folder / "comparison.json").read_text())
    metric = comparison["comparisons"]["one/test"]["mean_score"]
    scores = [figures_of(evaluated, name)["scores"] for name in ("test-untrained", "test")]
    first, second = (one["response"]["mean"] for one in scores)
    assert metric["difference"] == pytest.approx(second - first)
    assert json.loads(cli("compare", *pair, "--json").out) == comparison


def test_the_newest_evaluation_of_a_run_is_compared_with_a_warning_about_its_scorer(
    cli: CommandLine, evaluated: Path
) -> None:
    shutil.copytree(evaluated, cli.folder / "runs" / "two")
    cli.ok("evaluate", "runs/one", *picky_scorer(cli))
    comparison = json.loads(cli("compare", "runs/one", "runs/two", "--json").out)
    assert comparison["baseline"] == "one/test-skip"
    assert any('scorer._type: "picky" in one/test-skip' in one for one in comparison["warnings"])


@pytest.mark.parametrize(
    ("runs", "open_gate"),
    [
        ("evaluated", "comparison.failure_rate.difference > 0 or baseline.failure_rate.high > 2"),
        # A run that was not evaluated is compared by its own table.
        ("run", "failure_rate.high < 0 or outcomes.error > 0 or nll.reference < 0"),
    ],
)
def test_a_comparison_may_be_a_gate(
    cli: CommandLine, request: pytest.FixtureRequest, runs: str, open_gate: str
) -> None:
    shutil.copytree(request.getfixturevalue(runs), cli.folder / "runs" / "two")
    pair = ("compare", "runs/one", "runs/two", "--fail-if")
    assert "failure rate" in cli.ok(*pair, open_gate).out
    assert cli(*pair, "failure_rate.high > 0.0").code == 1
    assert "'failure_rate'?" in refused(cli(*pair, "failure_rte.high > 0"))


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
        (("evaluate", "runs/two"), "'runs/two'"),
        (("evaluate", "runs/one/checkpoints"), "runs/one/checkpoints", "run"),
        (("evaluate", "runs/none/latest"), "runs/none/latest", "run"),
        (("evaluate", "runs/one", "--split", "exam"), "--split"),
        (("evaluate", "runs/one", "--scorer", "clasifier"), "'clasifier'", "'classifier'?"),
        (("evaluate", "runs/one", "--scorer", scorer), "_type"),
        (("evaluate", "runs/one", "--name", "a/b"), "'a/b'"),
        (("evaluate", "runs/one", "--target", "./nowhere"), "./nowhere"),
        (("evaluate", "runs/one", "--set", "training.lr=1"), "training.lr=1"),
        (("compare", "runs/one"), "two"),
    ):
        assert says(refused(cli(*arguments)), *facts), arguments
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints")
    assert "--untrained" in refused(cli("evaluate", "runs/one"))


def test_a_run_of_networks_that_has_not_begun_is_refused(cli: CommandLine, run: Path) -> None:
    proof = resolve_experiment(trainer="vanilla_ppo", scenario="graph_isomorphism")
    folder = RunDirectory.create(cli.folder / "runs", "proof")
    folder.write_yaml("hyper_parameters.yaml", proof.hyper_params.to_dict())
    for command in (("evaluate",), ("score",), ("compare", "runs/one")):
        assert "runs/proof" in refused(cli(*command, "runs/proof"))
