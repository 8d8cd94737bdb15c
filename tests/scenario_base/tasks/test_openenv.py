"""OpenEnv environments, in this process and at a server."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nip_astra import resolve_experiment, run_experiment
from nip_astra.errors import (
    ConfigurationError,
    MissingDependencyError,
    ParameterError,
    ServiceBusyError,
    ServiceUnreachableError,
    TaskError,
)
from nip_astra.scenario_base.tasks.base import opening_of, reaction_of
from nip_astra.scorers.base import Message
from tests.scenario_base.tasks.test_tasks import task_of

HAS_OPENENV = importlib.util.find_spec("openenv") is not None

SOURCE = """
from typing import Annotated
import random
from pydantic import BaseModel, StringConstraints

class Action(BaseModel):
    model_config = {"title": "Guess"}
    metadata: dict = {}
    text: Annotated[str, StringConstraints(max_length=5)]

class TwoTexts(Action):
    more: str

class Observation(BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict = {}
    hint: str = ""
    turns: int = 0

class Wide(Observation):
    other: str | None = None

class Guess:
    closed = 0

    def __init__(self, most=3):
        self.most = most

    def reset(self, seed=None):
        self.hidden = random.Random(seed).randrange(self.most)
        self.turns = 0
        return Observation(hint=f"0 to {self.most - 1}")

    def step(self, action: Action) -> Observation:
        self.turns += 1
        is_right = action.text.strip() == str(self.hidden)
        reward = 1.0 if is_right else -0.25 if self.turns > 1 else None
        return Observation(hint="no", reward=reward, done=is_right or self.turns == 3)

    @property
    def state(self):
        return {"turns": self.turns}

    def close(self):
        Guess.closed += 1

class Unseeded(Guess):
    def reset(self):
        return super().reset(0)

class Two(Guess):
    def step(self, action: TwoTexts) -> Observation:
        return Observation()

class Broad(Guess):
    def step(self, action: Action) -> Wide:
        return Wide(hint="a", other="b", done=False)

class Bare(Guess):
    def step(self, action):
        return Observation()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own_openenv.py"
    path.write_text(SOURCE)
    return path


def test_an_environment_in_this_process_sums_its_rewards(file: Path) -> None:
    task = task_of("openenv", environment=f"{file}:Guess", arguments={"most": 2})
    environment: Any = task.environment("train", 0)
    assert opening_of(environment) == [Message("user", "0 to 1")]
    hidden = environment._session._environment.hidden
    for _ in range(2):
        wrong = reaction_of(environment, str(1 - hidden))
        assert wrong == ([Message("user", "no")], None, False)
    assert reaction_of(environment, str(hidden)) == ([], 0.75, True)
    guess = type(environment._session._environment)
    environment.close()
    assert guess.closed == 1
    # An action that violates the schema receives an answer.
    opening_of(environment)
    (message,), reward, is_over = reaction_of(environment, "much too long")
    assert message.text.startswith("Error: ")
    assert (reward, is_over, environment.figures["rejected_actions"]) == (None, False, 1)
    seeds = {task.environment("train", n).columns for n in range(20)}
    assert len(seeds) == 20
    assert not seeds & {task.environment("test", n).columns for n in range(20)}
    assert opening_of(task_of("openenv", environment=f"{file}:Unseeded").environment("test", 0))


@pytest.mark.parametrize(
    ("name", "options", "fact"),
    [
        ("Two", {}, "text, more"),
        ("Guess", {"action_field": "metadata"}, "text"),
        ("Broad", {}, "hint, other"),
        ("Guess", {"observation_field": "turns"}, "hint"),
        ("Bare", {}, "step of"),
    ],
)
def test_environments_without_a_single_text_are_refused(
    file: Path, name: str, options: dict[str, Any], fact: str
) -> None:
    with pytest.raises(ConfigurationError, match=fact):
        task_of("openenv", environment=f"{file}:{name}", **options)


def test_fields_are_chosen_by_name(file: Path) -> None:
    task = task_of("openenv", environment=f"{file}:Broad", observation_field="other")
    environment = task.environment("train", 0)
    with pytest.raises(TaskError, match="other"):
        opening_of(environment)
    with pytest.raises((ParameterError, ValueError), match="address"):
        task_of("openenv")


def test_a_policy_trains_in_it(file: Path, tmp_path: Path) -> None:
    resolved = resolve_experiment(
        trainer="self_hosted_grpo",
        scenario="openenv",
        overrides=[
            "task.task.address=null",
            f"task.task.environment={file}:Guess",
            "task.task.num_test=4",
            "task.policy.max_new_tokens=2",
            "training.num_iterations=2",
            "training.num_episodes_per_experience=4",
        ],
    )
    result = run_experiment(resolved, runs_dir=str(tmp_path / "runs"), run_id="o", progress=False)
    assert 0 < result.results["after"]["num_answers"] <= 4
    assert result.results["after"]["environment/rejected_actions"] == 0
    metrics = (tmp_path / "runs/o/metrics.jsonl").read_text().splitlines()
    assert -0.5 <= json.loads(metrics[0])["rollout/reward_mean"] <= 1


def test_an_address_needs_the_package_and_an_environment() -> None:
    kind = ServiceUnreachableError if HAS_OPENENV else MissingDependencyError
    with pytest.raises(kind, match="127"):
        task_of("openenv", address="http://127.0.0.1:9")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """The echo environment of OpenEnv's template, served with two sessions."""
    import openenv.cli
    import uvicorn

    template = Path(openenv.cli.__file__).parent / "templates" / "openenv_env"
    names = {"NAME": "echo_env", "CLASS_NAME": "Echo", "TITLE_NAME": "Echo"}
    folder = tmp_path_factory.mktemp("server") / "echo_env"
    for path in template.rglob("*.py"):
        text = path.read_text()
        where = str(path.relative_to(template))
        for name, value in names.items():
            text = text.replace(f"__ENV_{name}__", value)
            where = where.replace(f"__ENV_{name}__", value)
        (folder / where).parent.mkdir(parents=True, exist_ok=True)
        (folder / where).write_text(text.replace("max_concurrent_envs=1", "max_concurrent_envs=2"))
    sys.path.insert(0, str(folder.parent))
    module = importlib.import_module("echo_env.server.app")
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(module.app, log_level="error"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]})
    thread.start()
    while not running.started:
        thread.join(0.05)
    address = f"http://127.0.0.1:{sock.getsockname()[1]}"

    def stop() -> None:
        running.force_exit = running.should_exit = True
        thread.join(30)

    yield address, stop
    stop()
    sys.path.remove(str(folder.parent))


@pytest.mark.slow
@pytest.mark.skipif(
    not HAS_OPENENV or importlib.util.find_spec("verifiers") is None,
    reason="openenv-core and verifiers are not installed together",
)
def test_the_taskset_openenv_of_verifiers_plays(server: tuple[str, Any]) -> None:
    address, _ = server
    task = task_of(
        "verifiers",
        taskset="openenv",
        options={"base_url": address, "resets": [{}, {}, {}]},
        num_test=1,
        num_dev=1,
    )
    environment = task.environment("train", 0)
    (opening,) = opening_of(environment)
    assert "Echo environment ready!" in opening.text
    (answer,) = reaction_of(environment, "hello").messages
    assert '"echoed_message": "hello"' in answer.text
    environment.close()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_OPENENV, reason="openenv-core is not installed")
def test_a_server_plays_as_many_sessions_as_it_allows(
    server: tuple[str, Any], tmp_path: Path
) -> None:
    address, stop = server
    with pytest.raises(ConfigurationError, match="schema"):
        task_of("openenv", address=f"{address}/docs")
    overrides = [
        f"task.task.address={address}",
        "task.task.concurrency=2",
        "task.task.num_test=3",
        "task.max_turns=2",
        "task.policy.max_new_tokens=2",
        "training.num_iterations=1",
        "training.num_episodes_per_experience=2",
        "self_hosted_grpo.group_size=3",
    ]
    resolved = resolve_experiment(
        trainer="self_hosted_grpo", scenario="openenv", overrides=overrides
    )
    result = run_experiment(resolved, runs_dir=str(tmp_path / "runs"), run_id="o", progress=False)
    # The echo never ends an episode.
    assert result.results["after"]["mean_reward"] == 0
    assert result.results["after"]["environment/lost"] == 0
    task = task_of("openenv", address=address, concurrency=9, timeout_seconds=5)
    three = [task.environment("train", n) for n in range(3)]
    assert opening_of(three[0])[0].text == "Echo environment ready!"
    assert reaction_of(three[0], "hello") == ([Message("user", "hello")], None, False)
    assert three[0]._return == pytest.approx(0.5)  # type: ignore[attr-defined]
    opening_of(three[1])
    with pytest.raises(ServiceBusyError, match="concurrency"):
        opening_of(three[2])
    three[1].close()
    stop()
    lost = reaction_of(three[0], "hello")
    assert (lost.reward, lost.is_over, three[0].figures["lost"]) == (None, True, 1)
    with pytest.raises(ServiceUnreachableError, match="127"):
        opening_of(three[1])
