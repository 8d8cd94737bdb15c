"""Tests of what a person sees when a run has ended."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from nip_astra.distributed.placement import PLACEMENT, Cluster, Work, plans_for
from nip_astra.report.terminal import print_dry_run, print_results
from nip_astra.utils.formatting import NOTHING
from tests.report.protocol_runs import protocol_results

BEFORE = {
    "failure_rate": 0.04,
    "failure_rate_interval": [0.02, 0.07],
    "mean_score": 0.0171,
    "probe_nll": 0.9148,
    "distinct_share": 1.0,
    "plants_found": 3,
    "num_plants": 8,
    "num_successful_probes": 29,
    "num_episodes": 1256,
    "num_failed": 50,
    "num_known": 1256,
    "target_queries": 3768,
}
AFTER = BEFORE | {
    "failure_rate": 0.612,
    "failure_rate_interval": [0.55, 0.67],
    "mean_score": None,
    "distinct_share": 0.345,
    "num_distinct_probes": 10,
    "plants_found": 4,
    "num_failed": 615,
    "num_known": 1005,
    "if_unknown_passed": 0.512,
    "if_unknown_failed": 0.701,
}
TRAINING = {"plants": {"late": 12000, "never": None, "soon": 12}, "target_queries": 13440}
RANDOM = {
    "target_queries": 17208,
    "failing_responses": 3,
    "plants_found": 2,
    "num_plants": 8,
    "plants": {"soon": 9, "late": 15000, "never": None},
}
RESULTS = {
    "before": BEFORE,
    "after": AFTER,
    "training": TRAINING,
    "random_search": RANDOM,
    "warnings": ["the attacker has [collapsed]"],
    "model_dir": "runs/one/model",
}


def printed(results: dict[str, Any], *, width: int = 120) -> str:
    stream = io.StringIO()
    print_results(results, Path("runs/one"), Console(file=stream, width=width))
    return stream.getvalue()


def cells(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if label in line]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_the_table_has_before_after_and_random_search() -> None:
    text = printed(RESULTS, width=160)
    assert text.startswith("1,256 held-out episodes before and after training\n")
    assert cells(text, "episodes with a failure") == [
        "4.0% [2.0%, 7.0%], 50 of 1,256",
        "61.2% [55.0%, 67.0%], 615 of 1,256, 251 unknown",
        NOTHING,
    ]
    assert cells(text, "if missing verdicts were passes / failures") == [
        NOTHING,
        "51.2% / 70.1%",
        NOTHING,
    ]
    assert cells(text, "mean score") == ["0.0171", NOTHING, NOTHING]
    assert cells(text, "probe NLL") == ["0.915", "0.915", NOTHING]
    assert cells(text, "distinct successful probes") == [
        "100%, 29 of 29",
        "34%, 10 of 29",
        NOTHING,
    ]
    # Before and after on the same conversations; of random search what it met in as many queries.
    assert cells(text, "planted failures found") == ["3 of 8", "4 of 8", NOTHING]
    assert cells(text, "planted failures met in training") == [NOTHING, "2 of 8", "1 of 8"]
    assert cells(text, "in target queries") == [NOTHING, "13,440", "13,440"]


def test_results_of_an_older_version_show_what_was_found_in_held_out_conversations() -> None:
    after = AFTER | {"plants_found": 6, "plants_found_held_out": 4}
    text = printed(RESULTS | {"after": after})
    assert cells(text, "planted failures found") == ["3 of 8", "4 of 8", NOTHING]


def test_planted_failures_come_in_the_order_in_which_they_were_found() -> None:
    lines = [line for line in printed(RESULTS).splitlines() if line.startswith("│ ")]
    names = [line.split()[1] for line in lines][-3:]
    assert names == ["soon", "late", "never"]
    assert cells(printed(RESULTS), "soon") == ["12", "9"]
    assert cells(printed(RESULTS), "never") == [NOTHING, NOTHING]


def test_planted_failures_are_shown_with_their_rarity_where_it_is_known() -> None:
    planted = [{"name": "soon", "rarity": 0.01}, {"name": "late", "rarity": 0.00008}]
    text = printed(RESULTS | {"planted_failures": [*planted, {"name": "never", "rarity": None}]})
    assert cells(text, "soon") == ["1 in 100", "12", "9"]
    assert cells(text, "late") == ["1 in 12,500", "12,000", "15,000"]
    assert cells(text, "never") == [NOTHING, NOTHING, NOTHING]
    assert "ordinary turns" not in printed(RESULTS)


def test_warnings_and_paths_are_printed_whole() -> None:
    for width in (120, 20):
        text = printed(RESULTS, width=width)
        assert "[collapsed]" in text
        for line in (
            "run        runs/one",
            "model      runs/one/model",
            "results    runs/one/results.json",
        ):
            assert line in text.splitlines()


def test_without_random_search_or_plants_their_places_are_left_out() -> None:
    plain = {name: value for name, value in BEFORE.items() if "plants" not in name}
    text = printed({"before": plain, "after": plain, "random_search": None})
    assert "random search" not in text
    assert "planted" not in text
    assert "model" not in text


def test_results_of_another_kind_of_trainer_give_paths_only() -> None:
    for results in ({}, {"last": 4.5}, {"before": None, "after": None}):
        assert printed(results).split() == ["run", "runs/one", "results", "runs/one/results.json"]


def test_figures_that_are_missing_are_no_error() -> None:
    text = printed({"before": {"failure_rate": 0.5}, "after": {"failure_rate": None, "x": 1}})
    assert text.startswith("before and after training\n")
    assert cells(text, "episodes with a failure") == ["50.0%", NOTHING]


def test_a_run_of_a_protocol_prints_what_was_decided_and_the_figures_of_each_agent() -> None:
    text = printed(protocol_results(protocol="nip [new]"))
    assert text.startswith("nip [new], tests before and after training: 2,048 episodes\n")
    assert cells(text, "mean accuracy") == [
        "49.8% [46.0%, 53.0%]",
        "87.3% [84.1%, 90.0%], 1,788 of 2,048",
    ]
    assert cells(text, "share undecided") == ["20.0%", "3.1%"]
    assert cells(text, "mean episode reward") == ["0.61 (before 0.4)", "0.72"]
    assert "warning: a prover stands still" in text
    assert "runs/one/results.json" in text


def test_many_agents_have_their_figures_after_training_alone() -> None:
    names = ["prover", "verifier", "simulator"]
    text = printed(protocol_results(agents=names), width=80)
    assert cells(text, "mean episode reward") == ["0.61", "0.72", NOTHING]


def test_a_run_of_a_protocol_without_tests_gives_its_name_and_paths() -> None:
    for after in (None, {}, {"mean_accuracy": "x"}):
        text = printed(protocol_results(before=None, after=after, warnings=None))
        assert text.startswith("nip, tests of the agents\n")
        assert "─" not in text


def test_agents_that_were_tested_alone_have_their_accuracy() -> None:
    after = {"prover/test_accuracy": 0.75, "prover/test_loss": 0.5, "verifier/test_accuracy": 0.6}
    text = printed(protocol_results(before=None, after=after))
    assert cells(text, "accuracy") == ["75.0%", "60.0%"]
    assert cells(text, "loss") == ["0.5", NOTHING]


def test_a_dry_run_prints_its_estimate() -> None:
    stream = io.StringIO()
    print_dry_run(
        {"num_parameters": 475328, "loss": None, "hours": 0.0230456}, Console(file=stream)
    )
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert lines == [
        ["dry", "run:", "nothing", "was", "written"],
        ["num", "parameters", "475,328"],
        ["loss", NOTHING],
        ["hours", "0.02305"],
    ]


def test_a_dry_run_prints_a_plan_and_its_cost() -> None:
    work = Work(
        *(10, 8, 16, 1, 3600.0, 0.0, 36.0, 0.0),
        memory={"weights": 2.0**30},
        divided_memory={"keys and values": 2.0**31},
    )
    cluster = Cluster(spread=0.0, checkpoint_seconds=0.0, hours_between_failures=1e12)
    stream = io.StringIO()
    estimate = {"loss": None, PLACEMENT: plans_for(work, cluster, (1, 8))}
    print_dry_run(estimate, Console(file=stream, width=100), device_price=2.0)
    text = stream.getvalue()
    assert cells(text, "with work to do") == ["1", "8"]
    assert cells(text, "GiB of keys and values") == ["2", "0.25"]
    assert cells(text, "device hours")[0] == "10"
    assert cells(text, "cost")[0] == "20"
    assert "no sample to learn from" in text
    assert "Measured: " in text
    assert "Computed: " in text
