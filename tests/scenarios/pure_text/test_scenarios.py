from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.evaluation.run_results import read_results
from nip_astra.language_models.services.fine_tuning import OpenAIFineTuning
from nip_astra.parameters.content import content_root
from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.scenarios.code_validation import CodeValidationScenario
from nip_astra.scenarios.pure_text_base import PureTextScenarioInstance
from nip_astra.scenarios.secret_word import TEST_WORDS, TRAIN_WORDS, SecretWordScenario
from tests.kit.experiments import run_in

SCRIPTED = '{_type: scripted, answers: ["Decision: accept"]}'
CODE = content_root() / "scenarios" / "code_validation"


def _prepare(scenario: str, *overrides: str) -> PureTextScenarioInstance:
    resolved = resolve_experiment(
        trainer="pure_text_ei",
        scenario=scenario,
        overrides=[f"{scenario}.agents.default.model={SCRIPTED}", *overrides],
    )
    instance = prepare_experiment(resolved, progress=False).scenario_instance
    assert isinstance(instance, PureTextScenarioInstance)
    return instance


def test_claims_are_true_and_false_alike_and_tests_have_other_words() -> None:
    parameters = SecretWordScenario.Parameters()
    datasets = SecretWordScenario.build_datasets(parameters, seed=3, scenario_dir=None)
    for data, words in zip(datasets, (TRAIN_WORDS, TEST_WORDS), strict=True):
        assert sorted(Counter(data["y"].tolist()).values()) == [len(data) // 2] * 2
        assert ((data["word"] == data["claim"]) == data["y"].astype(bool)).all()
        assert set(data["word"].tolist()) <= set(words)
    assert not set(TRAIN_WORDS) & set(TEST_WORDS)
    again = SecretWordScenario.build_datasets(parameters, seed=3, scenario_dir=None)
    assert again == datasets
    assert SecretWordScenario.build_datasets(parameters, seed=4, scenario_dir=None) != datasets


def code_data(folder: Path = CODE, **values: Any) -> Any:
    parameters = CodeValidationScenario.Parameters(**values)
    return CodeValidationScenario.build_datasets(parameters, seed=0, scenario_dir=folder)


def test_code_has_as_many_right_as_wrong_solutions_and_no_problem_in_both_splits() -> None:
    train, test = code_data(num_wrong_solutions=2)
    for data in (train, test):
        assert data["y"].mean() == 0.5
        assert all((mutation == "") == y for mutation, y in zip(data["mutation"], data["y"]))  # noqa: B905
    assert not set(train["name"].tolist()) & set(test["name"].tolist())
    assert set(train["level"].tolist()) == {1, 2, 3}
    assert set(code_data(levels=[1]).train["level"].tolist()) == {1}


PROBLEM = {"name": "x", "level": 1, "question": "q", "solutions": []}


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("{", "line 1 of"),
        (json.dumps(PROBLEM), "solutions"),
        (json.dumps(PROBLEM | {"level": "1"}), "level"),
    ],
)
def test_a_broken_problem_is_reported_with_its_line(line: str, fact: str, tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text(line)
    for options, expected in (({}, fact), ({"problems": "none"}, "none")):
        with pytest.raises(DataError, match=expected):
            code_data(tmp_path, **options)
    (tmp_path / "problems.jsonl").write_text(f"\n\n{line}")
    with pytest.raises(DataError, match="line 3 of"):
        code_data(tmp_path)


def test_texts_of_problems_may_contain_any_line_separator(tmp_path: Path) -> None:
    question = "one\u2028two\x85three"
    solutions = [{"code": "a", "is_correct": True}, {"code": "b", "is_correct": False}]
    rows = [PROBLEM | {"name": name, "question": question, "solutions": solutions} for name in "xy"]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "problems.jsonl").write_text(lines, encoding="utf-8-sig")
    assert set(code_data(tmp_path).train["question"].tolist()) == {question}


@pytest.mark.parametrize("scenario", ["secret_word", "code_validation"])
@pytest.mark.parametrize("protocol", list(InteractionProtocolType))
def test_a_scenario_has_prompts_for_every_protocol(scenario: str, protocol: str) -> None:
    instance = _prepare(scenario, f"interaction_protocol={protocol}")
    game = instance.game
    row = {name: array[0] for name, array in instance.train_data.items()}
    seen = set()
    rounds = range(game.protocol.max_message_rounds)
    # With either seed, since Merlin and Arthur's protocol lets a single prover speak.
    for number, seed in product(rounds, (0, 1)):
        at = replace(game.start(0, row | {"y": 1}, seed), round=number)
        for turn in game.turns(at):
            messages = game.messages(at, turn)
            assert messages[-1]["role"] == "user"
            assert all(message["content"] for message in messages)
            seen.add(turn.agent)
            if "word" in row and turn.agent == "verifier" and row["claim"] != row["word"]:
                assert row["word"] not in str(messages), "the verifier does not know the word"
            assert not row.get("mutation") or row["mutation"] not in str(messages)
            usable = game.template_values(at, turn)["datapoint"]
            assert not {"y", *instance.hidden_columns} & set(usable)
    assert seen == set(game.protocol.agent_names)


def test_agents_are_grouped_and_an_unknown_agent_is_reported() -> None:
    assert list(_prepare("secret_word").shared_model_groups) == ["players"]
    apart = _prepare("secret_word", "secret_word.agents.verifier.shared_model_group=judges")
    assert sorted(apart.shared_model_groups) == ["judges", "players"]
    with pytest.raises(ConfigurationError, match="Did you mean 'prover'"):
        _prepare("secret_word", "secret_word.agents.provers.top_p=0.5")


def test_jobs_have_the_limits_of_their_chat_model() -> None:
    pytest.importorskip("openai")
    chat = "{_type: openai, model: m, base_url: 'http://127.0.0.1:9/v1', limits: {num_retries: 1}}"
    groups = _prepare("secret_word", f"secret_word.agents.default.model={chat}").shared_model_groups
    service = groups["players"].service
    assert isinstance(service, OpenAIFineTuning)
    assert service.parameters.limits.num_retries == 1


def test_a_scripted_game_runs_to_its_report(tmp_path: Path) -> None:
    agents = (f"model={SCRIPTED}", "freeze_agent=true")
    resolved = resolve_experiment(
        trainer="pure_text_ei",
        overrides=[
            *(f"secret_word.agents.default.{override}" for override in agents),
            *("text_rl.num_iterations=1", "secret_word.num_test=10"),
        ],
    )
    run = run_in(tmp_path, resolved)
    # The verifier accepts at once, and half of the claims are true.
    assert read_results(run).results["after"]["mean_accuracy"] == 0.5
    assert "Requests to models" in (run / "report.html").read_text(encoding="utf-8")
