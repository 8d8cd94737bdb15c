"""`evaluate`, `score` and `compare`, as a user runs them, on a run of tiny models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.evaluation import playing
from nip_astra.evaluation.api import compare, score
from nip_astra.evaluation.storage import PARTS, RowFile, read_rows
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from nip_astra.samplers import executor, trees
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.utils import processor
from nip_astra.utils.forked import can_fork, get_num_processes
from tests.cli.trained_run import SMALL, figures_of
from tests.kit import actors_here
from tests.kit.command_line import CommandLine, refused

SCORER = """
from nip_astra.scorers.base import Scorer
from nip_astra.scorers.base import register_scorer


@register_scorer("picky")
class Picky(Scorer):
    \"\"\"Cannot tell of some texts, and fails on others.\"\"\"

    def _score(self, texts):
        return [self._one(text) for text in texts]

    def _one(self, text):
        if "silly" in text:
            return float("nan")
        return None if "cat" in text else float("mat" in text or "day" in text)
"""


def test_an_evaluation_shows_the_figures_of_the_run_itself(cli: CommandLine, run: Path) -> None:
    said = cli.ok("evaluate", "runs/one")
    assert "one against target, judged by classifier: 6 episodes of 2 turns from 3" in said.out
    assert "evaluation runs/one/evaluations/test" in said.out
    found, after = figures_of(run), json.loads((run / "results.json").read_text())["after"]
    assert found["failure_rate"]["value"] == pytest.approx(after["failure_rate"])
    assert found["scores"]["response"]["mean"] == pytest.approx(after["mean_score"])
    assert found["nll"]["reference"] == pytest.approx(after["probe_nll"], rel=1e-5)
    rows = read_rows(run / "evaluations" / "test" / "rows.jsonl")
    shown = read_rows(run / "rollouts" / "evaluation.jsonl")
    assert sorted(row["probe"] for row in rows) == sorted(row["probe"] for row in shown)
    assert sorted(row["reward"] for row in rows) == pytest.approx(
        sorted(r["reward"] for r in shown), abs=1e-5
    )
    assert (run / "evaluations" / "test" / "table.txt").read_text().startswith("one against")


@pytest.mark.parametrize(("more", "count"), [((), 3), (("--num-threads", "2"), 2)])
def test_conversations_are_divided_among_the_cores(
    cli: CommandLine,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    count: int,
) -> None:
    allowed = []

    def noted(_: Any, num_episodes: int, *how: Any, **_more: Any) -> list[range]:
        allowed.append(get_num_processes())
        return [range(num_episodes)]

    monkeypatch.setattr(processor, "num_cores", lambda: 3)
    monkeypatch.setattr(trees, "cut_rollout", noted)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    cli.ok("evaluate", "runs/one", *more)
    assert set(allowed) == {count if can_fork() else 1}
    # Too large a model for several processes.
    monkeypatch.setattr(processor, "SMALL_MODEL_PARAMETERS", 1)
    allowed.clear()
    cli.ok("evaluate", "runs/one", *more, "--overwrite")
    assert set(allowed) == {1}


def test_an_evaluation_by_actors_finds_the_same(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """# The attacker's conversations, the mixture's for the probability, and scored texts."""
    monkeypatch.setattr(executor, "SMALLEST_PART", 2)
    opened = actors_here.install(monkeypatch)
    found = {}
    for count in ("0", "1", "2"):
        cli.ok("evaluate", "runs/one", "--settings", f"num_actors={count}", "--overwrite")
        folder = run / "evaluations" / "test"
        names = ("rows.jsonl", "probability_rows.jsonl")
        found[count] = [(folder / name).read_bytes() for name in names]
        record = read_rows(folder / PARTS)
        found[count].append([{n: p[n] for n in p if n != "seconds"} for p in record])
    assert found["0"] == found["1"] == found["2"]
    assert [one.turn > 4 for one in opened] == [True, True]


def test_the_figures_have_the_documented_contents(cli: CommandLine, evaluated: Path) -> None:
    found = figures_of(evaluated)
    promised = (
        *("version", "name", "attacker", "target", "scorer", "seed", "num_episodes", "tree_depth"),
        *("failure_threshold", "outcomes", "failure_rate", "turn_failure_rate", "scores", "nll"),
        *("turns_to_failure", "hit_at", "diversity", "clusters", "plants", "warnings", "budget"),
        "probability_of_failure",
    )
    assert set(promised) <= set(found)
    assert sum(found["outcomes"].values()) == 12
    assert set(found["scores"]) == {"probe", "response", "combined"}
    assert len(found["turns_to_failure"]["survival"]) == 2
    assert found["nll"]["target"] > 0
    assert found["budget"]["target_queries"] == 12
    assert found["probability_of_failure"]["monte_carlo"]["num_episodes"] == 3
    assert "rest on 3 opening prompts" in " ".join(found["warnings"])


def test_the_targets_likelihood_is_the_models_own(cli: CommandLine, run: Path) -> None:
    """# And the reward is the scenario's, whose likelihood is the reference's."""
    cli.ok("evaluate", "runs/one", "--probability-episodes", "0")
    rows = read_rows(run / "evaluations" / "test" / "rows.jsonl")
    for row in rows:
        assert row["target_logprob"] <= 0.0
        assert row["probe_nll"] == pytest.approx(
            -row["reference_logprob"] / max(row["probe_num_tokens"], 1), rel=1e-4
        )
    assert figures_of(run)["probability_of_failure"] is None


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
        assert [row["probe"] for row in ours] == [row["probe"] for row in theirs]
        assert [(r["episode"], r["node"], r["parent"]) for r in ours] == [
            (r["episode"], r["node"], r["parent"]) for r in theirs
        ]
        assert [row["response_score"] for row in ours] == pytest.approx(
            [row["response_score"] for row in theirs], abs=1e-6
        )


def test_a_finished_evaluation_plays_nothing_again(
    cli: CommandLine, evaluated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = figures_of(evaluated)
    monkeypatch.setattr(playing, "play_episodes", None)
    cli.ok("evaluate", "runs/one")
    assert figures_of(evaluated) == before


def test_other_options_under_the_same_name_are_refused(cli: CommandLine, evaluated: Path) -> None:
    message = refused(cli("evaluate", "runs/one", "--seed", "7", "--num-turns", "1"))
    assert "options.num_turns: 2 there, 1 now" in message
    assert "options.seed: 0 there, 7 now" in message
    cli.ok("evaluate", "runs/one", "--seed", "7", "--name", "seven")
    cli.ok("evaluate", "runs/one", "--seed", "7", "--overwrite")
    assert figures_of(evaluated)["seed"] == figures_of(evaluated, "seven")["seed"] == 7


def test_a_checkpoint_and_the_untrained_attacker_can_be_evaluated(
    cli: CommandLine, evaluated: Path
) -> None:
    checkpoint = sorted((evaluated / "checkpoints").glob("step_*"))[-1]
    name = f"runs/one/checkpoints/{checkpoint.name}"
    cli.ok("evaluate", name)
    cli.ok("evaluate", "runs/one", "--untrained")
    same = (
        figures_of(evaluated)["scores"]
        == figures_of(evaluated, f"test-{checkpoint.name}")["scores"]
    )
    assert same
    untrained = figures_of(evaluated, "test-untrained")
    before = json.loads((evaluated / "results.json").read_text())["before"]
    assert untrained["scores"]["response"]["mean"] == pytest.approx(before["mean_score"])
    assert untrained["probability_of_failure"]["importance_sampling"] is None


def test_the_latest_checkpoint_is_found_by_its_pointer_or_by_a_link(
    cli: CommandLine, run: Path
) -> None:
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    name, older = checkpoint.name, "step_00000001"
    shutil.copytree(checkpoint, checkpoint.parent / older)
    small = ("--num-episodes", "2", "--probability-episodes", "0")
    cli.ok("evaluate", "runs/one/checkpoints/latest", *small)
    assert figures_of(run, f"test-{name}")["attacker"] == f"one {name}"
    pointer = run / "checkpoints" / "latest"
    pointer.unlink()
    pointer.symlink_to(older)
    cli.ok("evaluate", "runs/one/checkpoints/latest", *small, "--name", "linked")
    assert figures_of(run, "linked")["attacker"] == f"one {older}"


@pytest.mark.parametrize("path", ["runs/one/checkpoints", "runs/none/latest"])
def test_the_error_for_another_folder_names_valid_choices(
    cli: CommandLine, run: Path, path: str
) -> None:
    message = refused(cli("evaluate", path))
    assert path in message
    assert "run" in message


def test_attackers_against_targets_make_a_matrix(
    cli: CommandLine, run: Path, tiny_scenario: Path
) -> None:
    other = tiny_scenario / "attacker"
    said = cli.ok(
        "evaluate", "runs/one", "--target", "runs/one", "--target", str(other),
        "--probability-episodes", "0",
    )  # fmt: skip
    matrix = json.loads((run / "evaluations" / "transfer.json").read_text())
    assert [cell["target"] for cell in matrix["cells"]] == ["one", "attacker"]
    for cell in matrix["cells"]:
        assert cell["warnings"] == figures_of(run, cell["name"])["warnings"]
        assert any("fluency was not measured" in text for text in cell["warnings"])
    assert "warning: one against attacker: fluency was not" in " ".join(said.out.split())
    assert figures_of(run, "test-one")["plants"] is None
    assert figures_of(run, "test-attacker")["target"] == "attacker"
    assert "episodes with a failure" in said.out
    rows = [
        read_rows(run / "evaluations" / f"test-{t}" / "rows.jsonl") for t in ("one", "attacker")
    ]
    # The first probe precedes the target's first answer.
    assert [r["probe"] for r in rows[0] if r["depth"] == 0] == [
        r["probe"] for r in rows[1] if r["depth"] == 0
    ]
    assert [r["response"] for r in rows[0]] != [r["response"] for r in rows[1]]


def test_planted_failures_are_shown_of_the_scenarios_own_target_alone(
    cli: CommandLine, run: Path, tiny_scenario: Path
) -> None:
    path = run / "hyper_parameters.yaml"
    plant = "planted_failures: [{name: own, probe: cat}]"
    path.write_text(path.read_text().replace("planted_failures: []", plant))
    typed = ("evaluate", "runs/one", "--probability-episodes", "0", "--trust")
    cli.ok(*typed)
    cli.ok(*typed, "--target", str(tiny_scenario / "attacker"))
    assert figures_of(run, "test")["plants"]["total"] == 1
    assert figures_of(run, "test-attacker")["plants"] is None
    for name, is_own in (("test", True), ("test-attacker", False)):
        again = score(run / "evaluations" / name, "own", name=f"{name}-again", is_trusted=True)
        assert (again.figures["plants"] is not None) is is_own


def test_options_that_stored_evaluations_do_not_read_are_refused(run: Path) -> None:
    with pytest.raises(ConfigurationError, match="--num-episodes, --set has no effect on stored"):
        score(run, overrides=["seed=1"], num_episodes=3)
    with pytest.raises(ConfigurationError, match="--target has no effect on stored"):
        compare(run, run / "x", targets=["y"])


def _another_scorer(cli: CommandLine) -> tuple[str, ...]:
    """Write a custom scorer called `skip`, and return its options."""
    cli.write("picky.py", SCORER)
    cli.write("skip.yaml", "{_type: picky, on_failure: skip}\n")
    return "--scorer", "skip.yaml", "--plugin", "picky.py"


def test_each_matrix_has_its_own_file_and_equal_matrices_share_it(
    cli: CommandLine, run: Path, tiny_scenario: Path
) -> None:
    targets = ("--target", "runs/one", "--target", str(tiny_scenario / "attacker"))
    short = ("--num-episodes", "2", "--num-turns", "1", "--probability-episodes", "0")

    def matrices(*options: str) -> list[str]:
        cli.ok("evaluate", "runs/one", *targets, *short, *options)
        return sorted(path.name for path in (run / "evaluations").glob("transfer*.json"))

    assert matrices() == matrices() == ["transfer.json"]
    first = (run / "evaluations" / "transfer.json").read_text()
    both = ["transfer-2.json", "transfer.json"]
    assert matrices(*_another_scorer(cli)) == both
    assert (run / "evaluations" / "transfer.json").read_text() == first
    assert matrices("--name", "named") == ["transfer-2.json", "transfer-named.json", both[1]]
    assert (run / "evaluations" / "transfer.json").read_text() == first
    assert matrices("--overwrite", "--seed", "7") == matrices("--seed", "7")
    cells = json.loads((run / "evaluations" / "transfer.json").read_text())["cells"]
    assert cells != json.loads(first)["cells"]


def test_stored_conversations_are_rated_again_without_a_model(
    cli: CommandLine,
    evaluated: Path,
    monkeypatch: pytest.MonkeyPatch,
    closed_bars: dict[str, tuple[int, int]],
) -> None:
    scorer = _another_scorer(cli)
    monkeypatch.setattr("nip_astra.scenarios.ast_chat.load_language_model", None)
    cli.ok("score", "runs/one", *scorer)
    found, rows = (
        figures_of(evaluated, "test-skip"),
        read_rows(evaluated / "evaluations/test-skip/rows.jsonl"),
    )
    outcome = {
        True: lambda text: "error" if "silly" in text else "undetermined",
        False: lambda text: "failure" if "mat" in text or "day" in text else "none",
    }
    expected = [
        outcome["silly" in r["response"] or "cat" in r["response"]](r["response"]) for r in rows
    ]
    counted = {name: expected.count(name) for name in found["outcomes"]}
    assert counted == found["outcomes"]
    assert counted["undetermined"] + counted["error"] > 0
    assert found["failure_rate"]["num_known"] < found["failure_rate"]["num_episodes"]
    assert f"({counted['undetermined'] + counted['error']} turns" in " ".join(found["warnings"])
    assert found["scorer"] == "skip"
    before = read_rows(evaluated / "evaluations" / "test" / "rows.jsonl")
    assert [row["response"] for row in rows] == [row["response"] for row in before]
    assert closed_bars["Rating"] == (found["budget"]["scorer_calls"],) * 2 != (0, 0)


def test_a_run_that_was_not_evaluated_is_rated_from_its_own_table(
    cli: CommandLine, run: Path
) -> None:
    cli.ok("score", "runs/one", "--scorer", "own", "--threshold", "0.4")
    found = figures_of(run, "evaluation-classifier")
    after = json.loads((run / "results.json").read_text())["after"]
    assert found["scores"]["response"]["mean"] == pytest.approx(after["mean_score"])
    assert found["nll"]["target"] is None
    assert found["failure_threshold"] == 0.4


def test_truncated_sampling_is_measured_by_monte_carlo_alone(cli: CommandLine, run: Path) -> None:
    cold = ("--set", "ast_chat.attacker.temperature=0.7")
    cli.ok("evaluate", "runs/one", *cold)
    found = figures_of(run)["probability_of_failure"]
    assert found["monte_carlo"]["num_episodes"] == 6
    assert "sampled with temperature 0.7" in found["importance_sampling"]["reason"]
    cli.ok("score", "runs/one", "--name", "again")
    again = figures_of(run, "again")["probability_of_failure"]
    assert again["importance_sampling"]["reason"] == found["importance_sampling"]["reason"]


def test_several_scorers_are_reported_side_by_side(cli: CommandLine, run: Path) -> None:
    options = ("--scorer", "own", *_another_scorer(cli))
    said = cli.ok("evaluate", "runs/one", *options, "--probability-episodes", "0")
    found = figures_of(run, "test-classifier-skip")
    assert found["scorer"] == "classifier"
    agreement, num_turns = (found["scorers"]["skip"][name] for name in ("agreement", "num_turns"))
    assert 0.0 <= agreement <= 1.0
    assert f"{agreement:.1%} of {num_turns} " in said.out
    cli.ok("score", "runs/one/evaluations/test-classifier-skip", *options, "--name", "again")
    assert figures_of(run, "again")["scorers"] == found["scorers"]
    assert figures_of(run, "again")["failure_rate"] == found["failure_rate"]


def test_two_evaluations_are_compared_pair_by_pair(cli: CommandLine, evaluated: Path) -> None:
    cli.ok("evaluate", "runs/one", "--untrained")
    pair = ("runs/one/evaluations/test-untrained", "runs/one/evaluations/test")
    said = cli.ok("compare", *pair, "--out", "comparison.json")
    assert "difference to one/test-untrained" in said.out
    found = json.loads((cli.folder / "comparison.json").read_text())
    metric = found["comparisons"]["one/test"]["mean_score"]
    a, b = (
        figures_of(evaluated, name)["scores"]["response"]["mean"]
        for name in ("test-untrained", "test")
    )
    assert metric["difference"] == pytest.approx(b - a)
    assert json.loads(cli("compare", *pair, "--json").out) == found


def test_evaluations_by_other_conditions_are_compared_with_a_warning(
    cli: CommandLine, run: Path
) -> None:
    shutil.copytree(run, cli.folder / "runs" / "two")
    cli.ok("evaluate", "runs/one", "--probability-episodes", "0")
    strict = ("--threshold", "0.9", "--name", "strict", "--probability-episodes", "0")
    cli.ok("evaluate", "runs/one", *strict)
    cli.ok("evaluate", "runs/one", *_another_scorer(cli), "--num-turns", "1")
    names = [f"runs/one/evaluations/{name}" for name in ("test", "strict", "test-skip")]
    said = cli.ok("compare", *names, "runs/two", "--fail-if", "comparison.failure_rate.high < -2")
    text = " ".join(said.out.split())
    for change in (
        "failure_threshold: 0.5 in one/test, 0.9 in one/strict",
        "tree_depth: 2 in one/test, 1 in one/test-skip",
        'scorer._type: "classifier" in one/test, "picky" in one/test-skip',
    ):
        assert change in text
    assert "in two" not in text
    assert "warning: one/test: fluency was not measured" in text
    found = json.loads(cli("compare", "runs/one", "runs/two", "--json").out)
    assert found["baseline"] == "one/test-skip", "a run's newest evaluation is named"
    assert any('scorer: "skip" in' in text for text in found["warnings"])


def test_a_condition_fails_the_job_with_exit_code_one(cli: CommandLine, evaluated: Path) -> None:
    high = ("--fail-if", "failure_rate.high > 0.0")
    said = cli("evaluate", "runs/one", *high)
    assert (said.code, "failed: failure_rate.high > 0.0" in said.err) == (1, True)
    cli.ok("evaluate", "runs/one", "--fail-if", "failure_rate.value > 1")
    shutil.copytree(evaluated, cli.folder / "runs" / "two")
    gate = "comparison.failure_rate.difference > 0 or baseline.failure_rate.high > 2"
    cli.ok("compare", "runs/one", "runs/two", "--fail-if", gate)
    assert cli("compare", "runs/one", "runs/two", *high).code == 1
    message = refused(cli("compare", "runs/one", "runs/two", "--fail-if", "failure_rte.high > 0"))
    assert "Did you mean 'failure_rate'?" in message
    # Before the first conversation, in syntax and in names.
    for wrong in ("failure_rate.high >", "failure_rte.high > 0", "failure_rate.hgh > 0"):
        refused(cli("evaluate", "runs/one", "--name", "gated", "--fail-if", wrong))
    assert not (evaluated / "evaluations" / "gated" / "rows.jsonl").exists()


def test_a_run_is_compared_by_its_own_table_where_it_was_not_evaluated(
    cli: CommandLine, run: Path
) -> None:
    shutil.copytree(run, cli.folder / "runs" / "two")
    said = cli.ok("compare", "runs/one", "runs/two")
    gate = "failure_rate.high < 0 or outcomes.error > 0 or nll.reference < 0"
    cli.ok("compare", "runs/one", "runs/two", "--fail-if", gate)
    assert cli("compare", "runs/one", "runs/two", "--fail-if", "failure_rate.high > 0").code == 1
    assert "failure rate" in said.out


def test_an_adapter_is_evaluated_as_it_was_merged(
    cli: CommandLine, tiny_scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    lora = "ast_chat.attacker.language_model.lora={rank: 2, alpha: 4}"
    resolved = resolve_experiment(
        trainer="ast_dpo", scenario=str(tiny_scenario), overrides=(*SMALL, "training.lr=0.05", lora)
    )
    run = run_experiment(resolved, runs_dir="runs", run_id="low", progress=False).run_directory.path
    cli.ok("evaluate", "runs/low")
    results = json.loads((run / "results.json").read_text())
    mean = figures_of(run)["scores"]["response"]["mean"]
    assert mean == pytest.approx(results["after"]["mean_score"], abs=1e-4)
    assert mean != pytest.approx(results["before"]["mean_score"], abs=1e-4)


def test_the_printed_json_equals_the_file(cli: CommandLine, evaluated: Path) -> None:
    said = cli("evaluate", "runs/one", "--json")
    assert json.loads(said.out) == figures_of(evaluated)


def test_invalid_evaluations_are_refused(cli: CommandLine, run: Path) -> None:
    assert "'runs/two'" in refused(cli("evaluate", "runs/two"))
    assert "--split" in refused(cli("evaluate", "runs/one", "--split", "exam"))
    assert "unknown scorer 'clasifier'. Did you mean 'classifier'?" in refused(
        cli("evaluate", "runs/one", "--scorer", "clasifier")
    )
    assert "'a/b'" in refused(cli("evaluate", "runs/one", "--name", "a/b"))
    assert "two or more runs" in refused(cli("compare", "runs/one"))
    assert "does not exist" in refused(cli("evaluate", "runs/one", "--target", "./nowhere"))
    assert "training.lr=1" in refused(cli("evaluate", "runs/one", "--set", "training.lr=1"))
    assert "has no _type" in refused(
        cli("evaluate", "runs/one", "--scorer", cli.write("s.yaml", "label: rude\n"))
    )
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints")
    assert "--untrained" in refused(cli("evaluate", "runs/one"))


@pytest.mark.parametrize("command", ["evaluate", "score", "compare"])
def test_a_run_of_networks_that_has_not_begun_is_refused(
    cli: CommandLine, run: Path, command: str
) -> None:
    proof = resolve_experiment(trainer="vanilla_ppo", scenario="graph_isomorphism")
    folder = RunDirectory.create(cli.folder / "runs", "proof")
    folder.write_yaml("hyper_parameters.yaml", proof.hyper_params.to_dict())
    paths = ["runs/one", "runs/proof"] if command == "compare" else ["runs/proof"]
    assert "runs/proof" in refused(cli(command, *paths))
