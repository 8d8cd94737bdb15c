"""All metrics of an evaluation together, with their warnings and tables."""

from __future__ import annotations

import copy
import re
from itertools import product
from typing import Any

import pytest
import torch

from nip_astra.evaluation import clusters
from nip_astra.evaluation.playing import EvaluationOptions
from nip_astra.evaluation.storage import Episode
from nip_astra.evaluation.summary import summarise, warnings_about
from nip_astra.evaluation.tables import as_text, evaluation_tables, matrix_tables, model_label
from nip_astra.language_models.embeddings import EmbedderParameters, build_embedder
from tests.evaluation.rows_by_hand import THRESHOLD, episode
from tests.kit.messages import says

EMBED = build_embedder(EmbedderParameters(), device=torch.device("cpu")).embed
OPTIONS = EvaluationOptions(
    split="test",
    seed=0,
    num_episodes=40,
    num_probability_episodes=200,
    use_importance_sampling=True,
    num_turns=2,
    failure_threshold=THRESHOLD,
    num_bootstrap_resamples=200,
)


def attacker(**columns: Any) -> list[Episode]:
    return [
        episode(i, [0.9 if i % 2 else 0.1, 0.2], prompt=f"prompt {i}", **columns) for i in range(40)
    ]


def ordinary(proposal: str = "reference", *, failing: int = 20, **columns: Any) -> list[Episode]:
    both = {"attacker_sampled_logprob": -5.0, "reference_sampled_logprob": -5.0}
    return [
        episode(
            i, [0.9 if i < failing else 0.1, 0.1], prompt=f"prompt {i}", proposal=proposal,
            reference_logprob=-3.0 - 0.01 * i, **(both | columns),
        )
        for i in range(200)
    ]  # fmt: skip


def figures(
    episodes: list[Episode], chances: list[Episode] | None = None, **changes: Any
) -> dict[str, Any]:
    result = summarise(episodes, chances or [], OPTIONS, embed=EMBED, **changes)
    return {"attacker": "a", "target": "t", "scorer": "s", **result}


def test_the_probability_of_failure_has_both_estimates_which_are_censored() -> None:
    late, early = ordinary(failing=20), ordinary(failing=120)
    for unknown in late[100:180]:
        unknown[1]["response_score"] = None
    for unknown in early[:100]:
        unknown[0] |= {"response_score": None, "is_error": True}
    # Attacker and reference are equal: every weight is 1, with the same product of hazards.
    for chances, value, num_known in ((ordinary(), 0.1, 200), (late, 0.1, 120), (early, 0.2, 100)):
        result = figures(attacker(), chances)["probability_of_failure"]
        assert result["horizon"] == 2
        for estimate in (result["monte_carlo"], result["importance_sampling"]):
            assert estimate["value"] == pytest.approx(value)
            assert (estimate["num_episodes"], estimate["num_known"]) == (200, num_known)
        assert result["monte_carlo"]["num_failures"] == 20
        assert result["importance_sampling"]["mean_weight"] == pytest.approx(1.0)


def test_importance_sampling_is_refused_or_has_a_caution() -> None:
    truncated = figures(attacker(), ordinary(), why_not_weighed="top_p 0.9")
    weighed = truncated["probability_of_failure"]["importance_sampling"]
    assert (weighed["is_refused"], weighed["reason"], weighed["value"]) == (True, "top_p 0.9", None)
    assert any(text.endswith("top_p 0.9") for text in truncated["warnings"])
    unknown = figures(attacker(), ordinary(attacker_sampled_logprob=None))
    assert unknown["probability_of_failure"]["importance_sampling"]["is_refused"]
    few = figures(attacker(), ordinary(failing=2))
    weighed = few["probability_of_failure"]["importance_sampling"]
    assert weighed["value"] == pytest.approx(0.01)
    text = as_text(evaluation_tables(few))
    assert cell_of(text, "  importance sampling").startswith("1.0% [")
    assert any(text.endswith(weighed["caution"]) for text in few["warnings"])
    many = figures(attacker(), ordinary())
    assert many["probability_of_failure"]["importance_sampling"]["caution"] is None
    assert len(many["warnings"]) < len(few["warnings"])


def test_fluency_is_compared_with_the_reference_or_has_a_reason() -> None:
    fluent = figures(attacker(reference_logprob=-4.0), ordinary())
    assert fluent["fluency"]["share_below"] == 0.0
    odd = figures(attacker(reference_logprob=[-4.0, -30.0]), ordinary())
    assert (odd["fluency"]["share_below"], odd["why_no_fluency"]) == (0.5, None)
    assert "50%" in " ".join(odd["warnings"])
    for chances, options, needed in (
        (ordinary()[:100], {}, "300"),
        (ordinary()[:100], {"why_not_weighed": "top_p 0.9"}, "150"),
    ):
        few = figures(attacker(), chances, **options)
        assert few["fluency"] is None
        assert says(few["why_no_fluency"], "--probability-episodes", needed)
        assert few["why_no_fluency"] in " ".join(few["warnings"])
    unknown = figures(attacker(reference_logprob=None), ordinary())
    assert unknown["why_no_fluency"] is not None


def test_missing_verdicts_and_few_prompts_are_warned_of() -> None:
    # Five of the ten conversations had failed before.
    text = " ".join(figures(with_unknown())["warnings"])
    assert says(text, "5 of 40", "10 turns", "0 scorer errors", "50.0%", "62.5%")
    few = [episode(i, [0.9], prompt=f"prompt {i % 5}") for i in range(40)]
    assert says(" ".join(figures(few)["warnings"]), "5 opening prompts")
    result = figures(attacker(), ordinary())
    assert warnings_about(copy.deepcopy(result)) == result["warnings"]


def test_failing_probes_beyond_those_that_are_clustered_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clusters, "MAX_CLUSTERED", 2)
    result = figures([episode(i, [0.9], probe=f"probe {min(i, 4)}") for i in range(40)])
    assert result["num_unclustered_probes"] == 3
    assert sum(one["num_distinct"] for one in result["clusters"]) == 2
    assert "3 distinct failing probes" in " ".join(result["warnings"])


def test_the_most_likely_failure_is_that_of_the_whole_conversation_if_there_is_one() -> None:
    result = figures([episode(i, [0.1], prompt=f"prompt {i}") for i in range(40)])
    expected = {"diversity": None, "clusters": [], "most_likely_failure": None}
    assert result.items() >= expected.items()
    # 0 of 40: (1 - 0.088)^40 is 2.5 %.
    assert "0.0% [0.0%, 8.8%]" in as_text(evaluation_tables(result))
    episodes = [
        episode(0, [0.1, 0.9], reference_logprob=[-9.0, -1.0]),
        episode(1, [0.9, 0.9], reference_logprob=[-4.0, -1.0]),
    ]
    result = figures(episodes)["most_likely_failure"]
    assert (result["episode"], result["depth"], result["conversation_logprob"]) == (1, 0, -4.0)


def with_unknown() -> list[Episode]:
    """Twenty episodes fail at their first turn, five are censored at their second."""
    episodes = attacker(probe="[bold]cat[/bold]", response="[/red] yes")
    for unknown in episodes[:10]:
        unknown[1]["response_score"] = None
    return episodes


def cell_of(text: str, label: str) -> str:
    (line,) = [line for line in text.splitlines() if label in line]
    return line.strip("│ ").split("│")[-1].strip()


def test_every_share_has_its_counts_and_markup_is_text() -> None:
    text = as_text(evaluation_tables(figures(with_unknown(), ordinary())))
    for markup in ("[bold]cat[/bold]", "[/red] yes", "effective sample size 200"):
        assert markup in text
    for label, cell in {
        "episodes with a failure": "20 of 40, 5 unknown",
        "if missing verdicts were passes / failures": "50.0% / 62.5%",
        "turns with a failure": "20 of 70",
        "without failure through turn": "50.0% (40), 50.0% (15)",
        "successful probes: distinct": ", 1 of 20",
        "1 - self-BLEU": ", of 20",
        "1 - mean cosine": ", of 20",
        "Vendi score": ", of 20",
    }.items():
        assert cell_of(text, label).endswith(cell), label
    assert re.search(r", \d+ of 80$", cell_of(text, "less likely per token than 99 %"))
    assert "20 of 200" in cell_of(text, "Monte Carlo")
    several = [episode(i, [0.9 if i < 8 else 0.1], prompt=f"{i % 20}") for i in range(40)]
    result = figures([*several, episode(40, [0.1], prompt="once")])
    assert cell_of(as_text(evaluation_tables(result)), "hit@1, 2") == "19.0% of 21, 40.0% of 20"


def test_a_matrix_has_a_row_for_each_attacker_and_the_warnings_of_each_cell() -> None:
    same = [episode(i, [0.9, 0.9], prompt=f"prompt {i}", probe="my cat sits") for i in range(40)]
    collapsed = figures(same)
    assert collapsed["diversity"]["distinct_share"] == pytest.approx(1 / 80)
    assert collapsed["diversity"]["vendi"] == pytest.approx(1.0)
    fluent = figures(attacker(reference_logprob=-4.0), ordinary())
    cells = [
        (collapsed if pair == ("a", "x") else fluent)
        | dict(zip(("attacker", "target"), pair, strict=True))
        for pair in product("ab", "xy")
    ]
    text = " ".join(as_text(matrix_tables(cells)).split())
    assert text.count("50.0%") == 3
    assert says(text, *(f"a against x: {' '.join(item.split())}" for item in collapsed["warnings"]))
    assert "a against y:" not in text
    assert "collapsed" in text
    assert model_label("/home/one/runs/talks/jobs/job-1/model") == "job-1/model"
    assert model_label("org/name-135m") == "org/name-135m"
