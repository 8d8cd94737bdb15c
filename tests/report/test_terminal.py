"""Terminal tables of a run's results and of a dry run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from nip_astra.distributed.placement import PLACEMENT, Cluster, Work, plan_for
from nip_astra.report.terminal import print_dry_run, print_results
from nip_astra.utils.formatting import NOTHING
from tests.kit.messages import says
from tests.report.runs import protocol_results

BEFORE: dict[str, Any] = {
    "failure_rate": 0.04, "failure_rate_interval": [0.02, 0.07], "num_episodes": 1256,
    "num_failed": 50, "num_known": 1256, "mean_score": 0.0171, "probe_nll": 0.9148,
    "distinct_share": 1.0, "num_successful_probes": 29, "target_queries": 3768,
    "plants_found": 3, "num_plants": 8,
}  # fmt: skip
AFTER: dict[str, Any] = BEFORE | {
    "failure_rate": 0.612, "failure_rate_interval": [0.55, 0.67], "mean_score": None,
    "num_failed": 615, "num_known": 1005, "distinct_share": 0.345, "num_distinct_probes": 10,
    "if_unknown_passed": 0.512, "if_unknown_failed": 0.701, "plants_found": 4,
}  # fmt: skip
RESULTS = {
    "before": BEFORE,
    "after": AFTER,
    "training": {"plants": {"late": 12000, "never": None, "soon": 12}, "target_queries": 13440},
    "random_search": {
        "target_queries": 17208, "failing_responses": 3, "plants_found": 2, "num_plants": 8,
        "plants": {"soon": 9, "late": 15000, "never": None},
    },
    "warnings": ["the attacker has [collapsed]"],
    "model_dir": "runs/one/model",
}  # fmt: skip


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
    rate = "61.2% [55.0%, 67.0%], 615 of 1,256, 251 unknown"
    for label, expected in {
        "episodes with a failure": ["4.0% [2.0%, 7.0%], 50 of 1,256", rate, NOTHING],
        "if missing verdicts were": [NOTHING, "51.2% / 70.1%", NOTHING],
        "mean score": ["0.0171", NOTHING, NOTHING],
        "probe NLL": ["0.915", "0.915", NOTHING],
        "distinct successful probes": ["100%, 29 of 29", "34%, 10 of 29", NOTHING],
        # On the same conversations; random search has a number for as many queries below.
        "planted failures found": ["3 of 8", "4 of 8", NOTHING],
        "planted failures met in training": [NOTHING, "2 of 8", "1 of 8"],
        "in target queries": [NOTHING, "13,440", "13,440"],
        "soon": ["12", "9"],
        "never": [NOTHING, NOTHING],
    }.items():
        assert cells(text, label) == expected
    lines = [line for line in text.splitlines() if line.startswith("│ ")]
    assert [line.split()[1] for line in lines][-3:] == ["soon", "late", "never"]
    # Results of an older version.
    after = AFTER | {"plants_found": 6, "plants_found_held_out": 4}
    older = printed(RESULTS | {"after": after})
    assert cells(older, "planted failures found") == ["3 of 8", "4 of 8", NOTHING]
    assert "ordinary turns" not in text
    planted = [{"name": "soon", "rarity": 0.01}, {"name": "late", "rarity": 0.00008}]
    text = printed(RESULTS | {"planted_failures": [*planted, {"name": "never", "rarity": None}]})
    assert cells(text, "soon") == ["1 in 100", "12", "9"]
    assert cells(text, "late") == ["1 in 12,500", "12,000", "15,000"]
    assert cells(text, "never") == [NOTHING, NOTHING, NOTHING]


def test_warnings_and_paths_are_printed_whole_and_missing_figures_leave_no_trace() -> None:
    for width in (120, 20):
        text = printed(RESULTS, width=width)
        assert says(text, "[collapsed]", "runs/one/model\n", "runs/one/results.json\n")
    plain = {name: value for name, value in BEFORE.items() if "plants" not in name}
    text = printed({"before": plain, "after": plain, "random_search": None})
    assert not {"random", "planted", "model"} & set(text.split())
    for results in ({"last": 4.5}, {"before": None, "after": None}):
        assert printed(results).split() == ["run", "runs/one", "results", "runs/one/results.json"]
    text = printed({"before": {"failure_rate": 0.5}, "after": {"failure_rate": None, "x": 1}})
    assert cells(text, "episodes with a failure") == ["50.0%", NOTHING]


def test_a_run_of_a_protocol_prints_decisions_and_the_figures_of_each_agent() -> None:
    text = printed(protocol_results(protocol="nip [new]"))
    assert says(text.partition("\n")[0], "nip [new]", "2,048")
    accuracy = ["49.8% [46.0%, 53.0%]", "87.3% [84.1%, 90.0%], 1,788 of 2,048"]
    assert cells(text, "mean accuracy") == accuracy
    assert cells(text, "share undecided") == ["20.0%", "3.1%"]
    assert cells(text, "mean episode reward") == ["0.61 (before 0.4)", "0.72"]
    assert "a prover stands still" in text
    # With more agents there is no room for values before training.
    text = printed(protocol_results(agents=["prover", "verifier", "simulator"]), width=80)
    assert cells(text, "mean episode reward") == ["0.61", "0.72", NOTHING]
    for after in (None, {"mean_accuracy": "x"}):
        assert "─" not in printed(protocol_results(before=None, after=after, warnings=None))
    after = {"prover/test_accuracy": 0.75, "prover/test_loss": 0.5, "verifier/test_accuracy": 0.6}
    text = printed(protocol_results(before=None, after=after))
    assert cells(text, "accuracy") == ["75.0%", "60.0%"]
    assert cells(text, "loss") == ["0.5", NOTHING]


def test_a_dry_run_prints_its_estimate_and_a_plan_with_its_cost() -> None:
    memory = {"memory": {"weights": 2.0**30}, "divided_memory": {"keys and values": 2.0**31}}
    work = Work(10, 8, 16, 1, 3600.0, 0.0, 36.0, 0.0, **memory)
    cluster = Cluster(spread=0.0, checkpoint_seconds=0.0, hours_between_failures=1e12)
    stream = io.StringIO()
    estimate = {"num_parameters": 475328, "loss": None, "hours": 0.0230456}
    estimate |= {PLACEMENT: [plan_for(work, count, cluster) for count in (1, 8)]}
    print_dry_run(estimate, Console(file=stream, width=100), device_price=2.0)
    text = stream.getvalue()
    lines = [line.split() for line in text.splitlines()]
    expected = (["num", "parameters", "475,328"], ["loss", NOTHING], ["hours", "0.02305"])
    assert all(line in lines for line in expected)
    assert cells(text, "with work to do") == ["1", "8"]
    assert cells(text, "GiB of keys and values") == ["2", "0.25"]
    assert cells(text, "device hours")[0] == "10"
    assert cells(text, "cost")[0] == "20"
    assert "no sample to learn from" in text
