"""Text environments with Gymnasium's interface."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nip_astra import resolve_experiment, run_experiment
from nip_astra.errors import ConfigurationError, TaskError
from nip_astra.scenario_base.tasks.base import opening_of, reaction_of
from nip_astra.scorers.base import Message
from tests.kit.tiny import make_byte_tokenizer, make_language_model
from tests.scenario_base.tasks.test_tasks import SPLITS, task_of

SOURCE = """
import random

class Guess:
    closed = 0

    def __init__(self, most=3):
        self.most = most

    def reset(self, *, seed=None, options=None):
        self.hidden = random.Random(seed).randrange(self.most)
        self.turns = 0
        return f"0 to {self.most - 1}", {}

    def step(self, action):
        self.turns += 1
        is_right = action.strip() == str(self.hidden)
        return "no", 1.0 if is_right else -0.25, is_right, self.turns == 3, {}

    def close(self):
        Guess.closed += 1

class Pixels(Guess):
    def reset(self, *, seed=None):
        return [0, 1], {}

class Old(Guess):
    def step(self, action):
        return "no", 0.0, True, {}

class Space:
    pass

class Box(Guess):
    observation_space = Space()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    return path


def test_the_return_of_an_episode_is_its_reward(file: Path) -> None:
    task = task_of("gymnasium", environment=f"{file}:Guess", arguments={"most": 2})
    environment = task.environment("train", 0)
    assert opening_of(environment) == [Message("user", "0 to 1")]
    hidden = environment._environment.hidden  # type: ignore[attr-defined]
    wrong = reaction_of(environment, str(1 - hidden))
    assert wrong == ([Message("user", "no")], None, False)
    assert reaction_of(environment, f" {hidden} ").reward == 0.75
    environment.close()
    assert environment._environment.closed == 1  # type: ignore[attr-defined]
    opening_of(environment)
    assert [reaction_of(environment, "x").is_over for _ in range(3)] == [False, False, True]


def test_problems_are_seeds_that_no_split_shares(file: Path) -> None:
    task = task_of("gymnasium", environment=f"{file}:Guess")
    seeds = {s: {task.environment(s, n).columns for n in range(50)} for s in SPLITS}
    assert all(len(one) == 50 for one in seeds.values())
    assert not seeds["train"] & seeds["test"] | seeds["dev"] & seeds["test"]
    other = task_of("gymnasium", environment=f"{file}:Guess", seed=1)
    assert other.environment("test", 3).columns == task.environment("test", 3).columns
    assert other.environment("train", 3).columns != task.environment("train", 3).columns
    assert task.num_problems("train") is None


@pytest.mark.parametrize(
    ("name", "options"),
    [("Nothing", {}), ("Guess", {"arguments": {"least": 1}}), ("Box", {})],
)
def test_environments_that_fail_or_have_no_texts_are_refused(
    file: Path, name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=name):
        task_of("gymnasium", environment=f"{file}:{name}", **options)


def test_wrong_returns_name_the_environment(file: Path) -> None:
    pixels = task_of("gymnasium", environment=f"{file}:Pixels").environment("train", 0)
    with pytest.raises(TaskError, match="reset of Pixels"):
        opening_of(pixels)
    old = task_of("gymnasium", environment=f"{file}:Old").environment("train", 0)
    opening_of(old)
    with pytest.raises(TaskError, match="step of Old"):
        reaction_of(old, "1")


def test_a_policy_trains_in_it(file: Path, tmp_path: Path) -> None:
    resolved = resolve_experiment(
        trainer="self_hosted_grpo",
        scenario="gymnasium",
        overrides=[
            f"task.task.environment={file}:Guess",
            "task.task.num_test=4",
            "task.policy.max_new_tokens=2",
            "training.num_iterations=2",
            "training.num_episodes_per_experience=4",
        ],
    )
    result = run_experiment(resolved, runs_dir=str(tmp_path / "runs"), run_id="g", progress=False)
    assert result.results["after"]["num_answers"] == 4
    metrics = (tmp_path / "runs/g/metrics.jsonl").read_text().splitlines()
    assert -0.75 <= json.loads(metrics[0])["rollout/reward_mean"] <= 1


def test_an_id_is_made_by_gymnasium() -> None:
    gymnasium = pytest.importorskip("gymnasium")

    class Echo(gymnasium.Env[str, str]):  # type: ignore[misc, name-defined]
        observation_space = gymnasium.spaces.Text(20)
        action_space = gymnasium.spaces.Text(20)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return str(int(self.np_random.integers(100))), {}

        def step(self, action: str) -> Any:
            return action, float(len(action)), True, False, {}

    gymnasium.register("nip_astra/Echo-v0", entry_point=Echo)
    environment = task_of("gymnasium", environment="nip_astra/Echo-v0").environment("train", 0)
    assert opening_of(environment)[0].text.isdigit()
    assert reaction_of(environment, "abc").reward == 3.0
    with pytest.raises(ConfigurationError, match="Box"):
        task_of("gymnasium", environment="CartPole-v1")
    with pytest.raises(ConfigurationError, match="Nothing"):
        task_of("gymnasium", environment="nip_astra/Nothing-v0")


@pytest.mark.slow
def test_games_of_textarena_are_played_by_one_player_from_a_seed(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    task = task_of("gymnasium", environment="textarena:GuessTheNumber-v0")
    state = random.getstate()

    def played(index: int, between: Callable[[], object]) -> list[Any]:
        environment = task.environment("train", index)
        said: list[Any] = [opening_of(environment)]
        for guess in range(1, 21):
            between()
            said.append(reaction_of(environment, f"[{guess}]"))
            if said[-1].is_over:
                break
        return said

    first = played(0, lambda: None)
    assert first == played(0, lambda: opening_of(task.environment("train", 1)))
    assert random.getstate() == state
    games = sorted((played(index, lambda: None) for index in range(8)), key=len)
    assert len(games[0]) < len(games[-1])
    (opening,), reaction, *_, last = games[-1]
    assert "between 1 and 20" in opening.text
    assert opening.text not in reaction.messages[0].text
    assert last.is_over
    assert 0.0 <= last.reward <= 1.0
    for name in ("Chess-v0", "Nothing-v0"):
        with pytest.raises(ConfigurationError, match=name):
            task_of("gymnasium", environment=f"textarena:{name}")
    model = make_language_model(tmp_path / "m", window=16384, tokenizer=make_byte_tokenizer())
    resolved = resolve_experiment(
        trainer="self_hosted_grpo",
        scenario="gymnasium",
        overrides=[
            "task.task.environment=textarena:FrozenLake-v0",
            f"task.policy.language_model.model={model}",
            "task.task.num_test=2",
            "task.policy.max_new_tokens=4",
            "training.num_iterations=1",
            "training.num_episodes_per_experience=2",
        ],
    )
    result = run_experiment(resolved, runs_dir=str(tmp_path), run_id="g", progress=False)
    assert result.results["after"]["num_answers"] == 2
