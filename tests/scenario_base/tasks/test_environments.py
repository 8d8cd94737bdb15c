"""Environments with Gymnasium's and OpenEnv's interfaces, in this process and at a server."""

from __future__ import annotations

import importlib.util
import json
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from nip_astra import resolve_experiment
from nip_astra.errors import (
    ConfigurationError,
    MissingDependencyError,
    NipAstraError,
    ParameterError,
    ServiceBusyError,
    ServiceUnreachableError,
    TaskError,
)
from nip_astra.evaluation.run_results import read_results
from nip_astra.scenario_base.tasks import openenv
from nip_astra.scenario_base.tasks.base import Task, opening_of, reaction_of
from nip_astra.scorers.base import Message
from tests.kit.experiments import metrics_of, run_in
from tests.kit.misbehaving import misbehaving, reply
from tests.kit.openenv_servers import (
    FRAMES,
    LAST_FRAME,
    LONG_FRAME,
    RIGHT_FRAME,
    SCHEMA,
    SCHEMAS,
    StandInClient,
    install_stand_in,
    serving_frames,
)
from tests.kit.recording import record_calls
from tests.kit.tiny import make_byte_tokenizer, make_language_model
from tests.scenario_base.tasks.test_tasks import SPLITS, task_of

HAS_OPENENV = importlib.util.find_spec("openenv") is not None

GAME = """
import random
from typing import Annotated
from pydantic import BaseModel, StringConstraints

class Game:
    closed = 0

    def __init__(self, most=3):
        self.most = most

    def begin(self, seed):
        self.hidden, self.turns = random.Random(seed).randrange(self.most), 0
        return f"0 to {self.most - 1}"

    def rated(self, text):
        self.turns += 1
        is_correct = text.strip() == str(self.hidden)
        return 1.0 if is_correct else -0.25 if self.turns > 1 else None, is_correct

    def close(self):
        type(self).closed += 1
"""
GYMNASIUM = (
    GAME
    + """
class Guess(Game):
    def reset(self, *, seed=None, options=None):
        return self.begin(seed), {}

    def step(self, action):
        reward, is_correct = self.rated(action)
        return "no", reward or 0.0, is_correct, self.turns == 3, {}

class Pixels(Guess):
    def reset(self, *, seed=None):
        return [0, 1], {}

class Old(Guess):
    def step(self, action):
        return "no", 0.0, True, {}

class Box(Guess):
    observation_space = object()

class Broken(Guess):
    def __init__(self):
        raise OSError("no words")
"""
)
OPENENV = (
    GAME
    + """
class Action(BaseModel):
    metadata: dict = {}
    text: Annotated[str, StringConstraints(max_length=5)]

class TwoTexts(Action):
    more: str

class Base(BaseModel):
    model_config = {"title": "Action"}
    metadata: dict = {}

class Call(Action):
    model_config = {"title": "CallToolAction"}

class Observation(BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict = {}
    hint: str = ""
    turns: int = 0

class Wide(Observation):
    other: str | None = None

class Guess(Game):
    def reset(self, seed=None):
        return Observation(hint=self.begin(seed))

    def step(self, action: Action) -> Observation:
        reward, is_correct = self.rated(action.text)
        return Observation(hint="no", reward=reward, done=is_correct or self.turns == 3)

    @property
    def state(self):
        return {"turns": self.turns}

class Unseeded(Guess):
    def reset(self):
        return super().reset(0)

class Two(Guess):
    def step(self, action: TwoTexts) -> Observation:
        return Observation()

class Broad(Guess):
    def step(self, action: Action) -> Wide:
        return Wide(hint="a", other="b", done=False)

class Tools(Guess):
    def step(self, action: Base) -> Observation:
        return Observation()

class Calls(Guess):
    def step(self, action: Call) -> Observation:
        return Observation()

class Bare(Guess):
    def step(self, action):
        return Observation()
"""
)
SOURCES = {"gymnasium": GYMNASIUM, "openenv": OPENENV}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write the environments of a kind into a file."""

    def write_source(kind: str) -> Path:
        path = tmp_path / f"own_{kind}.py"
        path.write_text(SOURCES[kind])
        return path

    return write_source


@pytest.mark.parametrize("kind", SOURCES)
def test_the_return_of_an_episode_is_its_reward(kind: str, write: Callable[[str], Path]) -> None:
    task = task_of(kind, environment=f"{write(kind)}:Guess", arguments={"most": 2})
    environment = task.environment("train", 0)
    assert opening_of(environment) == [Message("user", "0 to 1")]
    guess: Any = getattr(environment, "_session", environment)._environment
    for _ in range(2):
        wrong = reaction_of(environment, str(1 - guess.hidden))
        assert wrong == ([Message("user", "no")], None, False)
    assert reaction_of(environment, f" {guess.hidden} ") == ([], 0.75, True)
    # Gymnasium's spaces are read from an environment of its own, which is closed.
    assert type(guess).closed == (kind == "gymnasium")
    environment.close()
    assert type(guess).closed == 1 + (kind == "gymnasium")
    opening_of(environment)
    assert [reaction_of(environment, "x").is_over for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("kind", SOURCES)
def test_problems_are_seeds_that_no_split_shares(kind: str, write: Callable[[str], Path]) -> None:
    name = f"{write(kind)}:Guess"
    task = task_of(kind, environment=name)
    seeds = {s: {task.environment(s, n).columns for n in range(50)} for s in SPLITS}
    assert all(len(distinct) == 50 for distinct in seeds.values())
    assert not seeds["train"] & seeds["test"] | seeds["dev"] & seeds["test"]
    other = task_of(kind, environment=name, seed=1)
    assert other.environment("test", 3).columns == task.environment("test", 3).columns
    assert other.environment("train", 3).columns != task.environment("train", 3).columns
    assert task.num_problems("train") is None


@pytest.mark.parametrize(
    ("kind", "name", "options", "error", "fact"),
    [
        ("gymnasium", "Nothing", {}, ConfigurationError, "Nothing"),
        ("gymnasium", "Guess", {"arguments": {"least": 1}}, ConfigurationError, "Guess"),
        ("gymnasium", "Box", {}, ConfigurationError, "Box"),
        ("gymnasium", "Broken", {}, ConfigurationError, "Broken .*no words"),
        ("gymnasium", "Pixels", {}, TaskError, "reset of Pixels"),
        ("gymnasium", "Old", {}, TaskError, "step of Old"),
        ("openenv", "Two", {}, ConfigurationError, "text, more"),
        ("openenv", "Guess", {"action_field": "metadata"}, ConfigurationError, "text"),
        ("openenv", "Broad", {}, ConfigurationError, "hint, other"),
        ("openenv", "Broad", {"observation_field": "other"}, TaskError, "other"),
        ("openenv", "Guess", {"observation_field": "turns"}, ConfigurationError, "hint"),
        ("openenv", "Bare", {}, ConfigurationError, "step of"),
        ("openenv", "Tools", {}, ConfigurationError, "MCP"),
        ("openenv", "Calls", {}, ConfigurationError, "MCP"),
    ],
)
def test_environments_that_fail_or_have_no_single_text_are_refused(
    kind: str,
    name: str,
    options: dict[str, Any],
    error: type[Exception],
    fact: str,
    write: Callable[[str], Path],
) -> None:
    def first_turn(task: Task) -> None:
        environment = task.environment("train", 0)
        reaction_of(environment, opening_of(environment)[0].text)

    with pytest.raises(error, match=fact):
        first_turn(task_of(kind, environment=f"{write(kind)}:{name}", **options))


@pytest.mark.parametrize(
    ("kind", "more"), [("gymnasium", ()), ("openenv", ("task.task.address=null",))]
)
def test_a_policy_trains_in_it(
    kind: str, more: tuple[str, ...], write: Callable[[str], Path], tmp_path: Path
) -> None:
    overrides = [
        *more,
        f"task.task.environment={write(kind)}:Guess",
        *("task.task.num_test=4", "task.policy.max_new_tokens=2"),
        *("training.num_iterations=2", "training.num_episodes_per_experience=4"),
    ]
    resolved = resolve_experiment(trainer="self_hosted_grpo", scenario=kind, overrides=overrides)
    run = run_in(tmp_path, resolved)
    after = read_results(run).results["after"]
    assert 0 < after["num_answers"] <= 4
    assert after.get("environment/rejected_actions", 0) == 0
    assert -0.5 <= metrics_of(run)[0]["rollout/reward_mean"] <= 1


# ---- Gymnasium


def test_an_id_is_made_by_gymnasium() -> None:
    gymnasium = pytest.importorskip("gymnasium")

    class Echo(gymnasium.Env[str, str]):
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
        results: list[Any] = [opening_of(environment)]
        for guess in range(1, 21):
            between()
            results.append(reaction_of(environment, f"[{guess}]"))
            if results[-1].is_over:
                break
        return results

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
    overrides = [
        "task.task.environment=textarena:FrozenLake-v0",
        f"task.policy.language_model.model={model}",
        *("task.task.num_test=2", "task.policy.max_new_tokens=4"),
        *("training.num_iterations=1", "training.num_episodes_per_experience=2"),
    ]
    resolved = resolve_experiment(
        trainer="self_hosted_grpo", scenario="gymnasium", overrides=overrides
    )
    assert read_results(run_in(tmp_path, resolved)).results["after"]["num_answers"] == 2


# ---- OpenEnv


def test_a_rejected_action_is_answered_and_counted(write: Callable[[str], Path]) -> None:
    file = write("openenv")
    environment: Any = task_of("openenv", environment=f"{file}:Guess").environment("train", 0)
    opening_of(environment)
    (message,), reward, is_over = reaction_of(environment, "much too long")
    assert message.text.startswith("Error: ")
    assert (reward, is_over, environment.figures["rejected_actions"]) == (None, False, 1)
    assert opening_of(task_of("openenv", environment=f"{file}:Unseeded").environment("test", 0))
    with pytest.raises((ParameterError, ValueError), match="address"):
        task_of("openenv")


@pytest.mark.parametrize(
    ("place", "option"),
    [
        ("environment=own.py:Guess", "concurrency=2"),
        ("environment=own.py:Guess", "timeout_seconds=2"),
        ("address=http://127.0.0.1:1", "arguments={most: 2}"),
    ],
)
def test_options_of_a_server_or_a_class_are_refused_for_the_other(place: str, option: str) -> None:
    overrides = [f"task.task.{one}" for one in ("address=null", place, option)]
    with pytest.raises(ParameterError, match=f"{option.split('=')[0]}: is read only where"):
        resolve_experiment(trainer="self_hosted_grpo", scenario="openenv", overrides=overrides)


def test_an_address_needs_the_package_and_an_environment() -> None:
    kind = ServiceUnreachableError if HAS_OPENENV else MissingDependencyError
    with pytest.raises(kind, match="127"):
        task_of("openenv", address="http://127.0.0.1:9")


LIMIT = 0.3
"""Time limit of a request in seconds, for servers that do not answer."""


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_is_none_ends_the_start_with_a_typed_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stand_in(monkeypatch)
    send, error = SCHEMAS[name]
    limit = LIMIT if error == "ServiceUnreachableError" else 10.0
    with misbehaving(send) as server, pytest.raises(NipAstraError) as caught:
        task_of("openenv", address=server.address, timeout_seconds=limit)
    assert type(caught.value).__name__ == error
    assert server.address in str(caught.value)


@pytest.mark.parametrize("name", FRAMES)
def test_a_malformed_step_ends_its_episode_without_a_reward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = install_stand_in(monkeypatch)
    frame, figure = FRAMES[name]
    client.frames = {"reset": RIGHT_FRAME, "step": frame}
    with misbehaving(reply(json.dumps(SCHEMA))) as server:
        check_step(server.address, figure)


def check_step(address: str, figure: str) -> None:
    """Check the figure that counts an episode after its first step."""
    task = task_of("openenv", address=address, timeout_seconds=LIMIT if figure == "lost" else 10.0)
    environment: Any = task.environment("train", 0)
    assert opening_of(environment)[0].text == "go on"
    reaction = reaction_of(environment, "hello")
    assert (reaction.reward, reaction.is_over) == (None, bool(figure))
    counts = {"rejected_actions": 0, "lost": 0, "malformed": 0}
    assert environment.figures == counts | ({figure: 1} if figure else {})
    environment.close()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "reward NaN" else pytest.mark.slow)
        for name, (_, figure) in FRAMES.items()
        if figure
    ],
)
def test_a_run_goes_on_where_every_third_step_is_malformed(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = install_stand_in(monkeypatch)
    frame, figure = FRAMES[name]
    client.frames = {"reset": RIGHT_FRAME, "right": LAST_FRAME, "wrong": frame}
    numbers = count(1)

    async def step(self: StandInClient, action: dict[str, Any]) -> Any:
        return self._result("right" if next(numbers) % 3 else "wrong")

    monkeypatch.setattr(client, "step", step)
    with misbehaving(reply(json.dumps(SCHEMA))) as server:
        overrides = [
            *(f"task.task.address={server.address}", "task.task.num_test=6"),
            *("task.policy.max_new_tokens=2", "training.num_iterations=1"),
            *("training.num_episodes_per_experience=2", "self_hosted_grpo.group_size=3"),
        ]
        resolved = resolve_experiment(
            trainer="self_hosted_grpo", scenario="openenv", overrides=overrides
        )
        after = read_results(run_in(tmp_path, resolved)).results["after"]
    assert (after["num_without_reward"], after["mean_reward"]) == (2, pytest.approx(1.0))
    assert after[f"environment/{figure}"] == pytest.approx(2 / 6)


@pytest.mark.parametrize("name", [name for name, (_, figure) in FRAMES.items() if figure])
def test_a_malformed_reset_ends_the_run_with_a_typed_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = install_stand_in(monkeypatch)
    frame, figure = FRAMES[name]
    client.frames = {"reset": frame}
    with misbehaving(reply(json.dumps(SCHEMA))) as server:
        task = task_of("openenv", address=server.address)
    error = ServiceUnreachableError if figure == "lost" else TaskError
    with pytest.raises(error):
        opening_of(task.environment("train", 0))


def test_the_bar_shows_the_environment_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    client = install_stand_in(monkeypatch)
    client.frames = {"reset": RIGHT_FRAME, "step": None}
    waits = record_calls(monkeypatch, openenv, "waiting_for")
    with misbehaving(reply(json.dumps(SCHEMA))) as server:
        check_step(server.address, "lost")
    assert len(waits) == 3, "the schema, a reset and a step"
    assert all(server.address in call.arguments[0] for call in waits)
    assert all(call.options["after"] <= 10 for call in waits)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_OPENENV, reason="openenv is not installed")
@pytest.mark.parametrize(("frame", "figure"), [*FRAMES.values(), (LONG_FRAME, "lost")])
def test_a_malformed_step_of_a_server_ends_its_episode(
    frame: str | bytes | None, figure: str
) -> None:
    """With the package's own client."""
    with serving_frames(frame) as address:
        check_step(address, figure)


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
    options = {"base_url": address, "resets": [{}, {}, {}]}
    task = task_of("verifiers", taskset="openenv", options=options, num_test=1, num_dev=1)
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
        *(f"task.task.address={address}", "task.task.concurrency=2", "task.task.num_test=3"),
        *("task.max_turns=2", "task.policy.max_new_tokens=2", "training.num_iterations=1"),
        *("training.num_episodes_per_experience=2", "self_hosted_grpo.group_size=3"),
    ]
    resolved = resolve_experiment(
        trainer="self_hosted_grpo", scenario="openenv", overrides=overrides
    )
    after = read_results(run_in(tmp_path, resolved)).results["after"]
    # The echo never ends an episode.
    assert (after["mean_reward"], after["environment/lost"]) == (0, 0)
    task = task_of("openenv", address=address, concurrency=9, timeout_seconds=5)
    three = [task.environment("train", n) for n in range(3)]
    assert opening_of(three[0])[0].text == "Echo environment ready!"
    assert reaction_of(three[0], "hello") == ([Message("user", "hello")], None, False)
    assert three[0]._return == pytest.approx(0.5)
    opening_of(three[1])
    with pytest.raises(ServiceBusyError, match="concurrency"):
        opening_of(three[2])
    three[1].close()
    stop()
    lost = reaction_of(three[0], "hello")
    assert (lost.reward, lost.is_over, three[0].figures["lost"]) == (None, True, 1)
    with pytest.raises(ServiceUnreachableError, match="127"):
        opening_of(three[1])
