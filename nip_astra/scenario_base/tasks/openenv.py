"""OpenEnv environments, on a server or in this process."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from pydantic import BaseModel, Field, JsonValue, ValidationError, model_validator

from nip_astra.errors import (
    ConfigurationError,
    ServiceBusyError,
    ServiceUnreachableError,
    TaskError,
)
from nip_astra.lazy import import_extra
from nip_astra.parameters.conditions import where, where_given
from nip_astra.parameters.parameters_base import CheckedName, PlainText
from nip_astra.parameters.types import TaskType
from nip_astra.rollouts.messages import Turn
from nip_astra.scenario_base.tasks.base import (
    Environment,
    Episode,
    Reaction,
    SeededTask,
    Split,
    register_task,
)
from nip_astra.scorers.python import find_function
from nip_astra.utils.background_loop import BackgroundLoop

_RESULTS = ("done", "reward", "metadata")
_OF_TOOLS = ("CallToolAction", "ListToolsAction")
"""Titles of actions of environments that are called through MCP; or Action, without a text."""


class Fields(NamedTuple):
    """Fields of actions and observations that hold the texts."""

    action: str
    observation: str


class Result(NamedTuple):
    """An observation of the environment."""

    observation: Mapping[str, Any]
    reward: float | None
    is_over: bool


class RejectedActionError(ValueError):
    """The action does not match the environment's schema."""


class _LocalSession:
    """An environment in this process, called as its server would call it."""

    def __init__(self, make: Callable[[], Any], action_class: type[BaseModel]) -> None:
        self._environment, self._action_class = make(), action_class

    def reset(self, seed: int) -> Result:
        accepted = inspect.signature(self._environment.reset).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in accepted.values())
        given = {"seed": seed} if "seed" in accepted or takes_all else {}
        return self._result(self._environment.reset(**given))

    def step(self, action: dict[str, Any]) -> Result:
        try:
            valid = self._action_class.model_validate(action)
        except ValidationError as error:
            raise RejectedActionError(error.errors()[0]["msg"]) from error
        return self._result(self._environment.step(valid))

    def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            close()

    @staticmethod
    def _result(observation: Any) -> Result:
        plain = observation.model_dump()
        return Result(plain, plain.pop("reward", None), bool(plain.pop("done", False)))


class _RemoteSession:
    """A session on a server."""

    def __init__(self, address: str, timeout: float, loop: BackgroundLoop) -> None:
        from openenv import GenericEnvClient

        self._address, self._loop = address, loop
        self._client = GenericEnvClient(
            base_url=address, connect_timeout_s=timeout, message_timeout_s=timeout
        )

    def reset(self, seed: int) -> Result:
        try:
            return self._result("reset", seed=seed)
        except TaskError as error:
            if "CAPACITY" not in str(error):
                raise
            raise self._busy() from error
        except ServiceUnreachableError as error:
            if isinstance(error.__cause__, OSError):
                raise
            # A server without a free session closes the connection.
            raise self._busy() from error

    def step(self, action: dict[str, Any]) -> Result:
        return self._result("step", action)

    def close(self) -> None:
        self._loop.run(self._answer("close"))

    async def _answer(self, method: str, *given: Any, **named: Any) -> Any:
        # Newer clients answer at once where no loop runs.
        return await getattr(self._client, method)(*given, **named)

    def _result(self, method: str, *given: Any, **named: Any) -> Result:
        from websockets.exceptions import WebSocketException

        try:
            found = self._loop.run(self._answer(method, *given, **named))
        except (TimeoutError, OSError, WebSocketException) as error:
            raise ServiceUnreachableError(
                f"the environment at {self._address} does not answer: {error}. Start it, then "
                "resume the run."
            ) from error
        except RuntimeError as error:
            if "VALIDATION_ERROR" in str(error):
                raise RejectedActionError(str(error)) from error
            raise TaskError(f"the environment at {self._address} failed: {error}.") from error
        return Result(found.observation, found.reward, bool(found.done))

    def _busy(self) -> ServiceBusyError:
        return ServiceBusyError(
            f"the environment at {self._address} has no free session. Lower task.task.concurrency, "
            "or raise max_concurrent_envs of the server."
        )


class OpenEnvEnvironment(Environment):
    """One episode; the reward is the sum of those of its steps.

    An action that the environment rejects is answered with the error. If the session is lost, the
    episode has no reward.
    """

    figures: Counter[str]

    def __init__(
        self, open_session: Callable[[], Any], fields: Fields, seed: int, num_open: int | None
    ) -> None:
        self._open, self._fields, self._seed = open_session, fields, seed
        self.max_open = num_open
        self.concurrency = num_open or 1
        self.columns = (("seed", seed),)
        self.figures = Counter(rejected_actions=0, lost=0)
        self._session: Any = None
        self._return: float | None = None

    def reset(self) -> Sequence[Turn]:
        self._session, self._return = self._open(), None
        return [self._message(self._session.reset(self._seed))]

    def step(self, message: str) -> Reaction:
        try:
            result = self._session.step({self._fields.action: message})
        except RejectedActionError as error:
            self.figures["rejected_actions"] += 1
            return Reaction([Turn("user", f"Error: {error}"[:300])], is_over=False)
        except ServiceUnreachableError:
            self.figures["lost"] += 1
            return Reaction()
        if result.reward is not None:
            self._return = (self._return or 0.0) + float(result.reward)
        if result.is_over:
            return Reaction(reward=self._return)
        return Reaction([self._message(result)], is_over=False)

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _message(self, result: Result) -> Turn:
        text = result.observation.get(self._fields.observation)
        if not isinstance(text, str):
            raise TaskError(
                f"the observation has no text {self._fields.observation!r}, but "
                f"{str(dict(result.observation))[:80]}. Set task.task.observation_field."
            )
        return Turn("user", text)


@register_task(TaskType.OPENENV)
class OpenEnvTask(SeededTask):
    """Episodes of an environment of OpenEnv (`reset`, `step`, `state`).

    The policy's message is a text field of the action, and it reads a text field of the
    observation. Tools (MCP) and images are rejected. Each problem is a seed.
    """

    reads_state = False

    class Parameters(SeededTask.Parameters):
        """Environment and its fields."""

        address: PlainText | None = None
        """Address of a server, for instance http://127.0.0.1:8000."""
        environment: CheckedName | None = None
        """`path/to/file.py:Class` or `package.module:Class` of an environment for this process, in
        place of an address. The module is imported, which executes it."""
        arguments: Annotated[dict[str, JsonValue], where("address", None)] = {}
        """Keyword arguments of the class."""
        action_field: PlainText | None = None
        """Field of the action that holds the policy's message; null for the only required one."""
        observation_field: PlainText | None = None
        """Field of the observation that the policy reads; null for the only text."""
        concurrency: Annotated[int, where_given("address")] = Field(default=1, ge=1)
        """Sessions of a server that are open at once, per process; more episodes are played one
        after the other."""
        timeout_seconds: Annotated[float, where_given("address")] = Field(default=60.0, gt=0)
        """Time limit of each request to a server."""

        @model_validator(mode="after")
        def _has_one_place(self) -> Any:
            if (self.address is None) is (self.environment is None):
                raise ValueError("needs either an address or an environment")
            return self

    def __init__(self, parameters: Any, **given: Any) -> None:
        super().__init__(parameters, **given)
        self._loop = BackgroundLoop()
        if parameters.address is not None:
            schemas = _schemas_at(parameters.address, parameters.timeout_seconds)
        else:
            self._class = find_function(parameters.environment, self.scenario_dir)[1]
            self._action_class, schemas = _schemas_of(self._class, parameters.environment)
        place = parameters.address or parameters.environment
        self._fields = _fields_of(*schemas, parameters, place)

    def environment(self, split: Split, index: int) -> OpenEnvEnvironment:
        is_remote = self.parameters.address is not None
        return OpenEnvEnvironment(
            self._remote if is_remote else self._local,
            self._fields,
            self.seed_of(split, index),
            self.parameters.concurrency if is_remote else None,
        )

    def _remote(self) -> _RemoteSession:
        options = self.parameters
        return _RemoteSession(options.address, options.timeout_seconds, self._loop)

    def _local(self) -> _LocalSession:
        return _LocalSession(lambda: self._class(**self.parameters.arguments), self._action_class)

    def rate(self, episodes: Sequence[Episode]) -> None:
        """Leave episodes with a lost session, or without any reward, unrated."""


def _schemas_at(address: str, timeout: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a server's schemas of actions and observations."""
    import_extra("openenv", f"the environment {address}", "openenv")
    url = f"{address.rstrip('/')}/schema"
    try:
        with urlopen(url, timeout=timeout) as answer:
            found = json.load(answer)
        return found["action"], found["observation"]
    except (HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{url} gives no schema of an OpenEnv environment ({error}). Check task.task.address."
        ) from error
    except (URLError, OSError) as error:
        raise ServiceUnreachableError(
            f"no environment answers at {url} ({error}). Start it, or check task.task.address."
        ) from error


def _schemas_of(
    environment_class: Any, name: str
) -> tuple[type[BaseModel], tuple[dict[str, Any], dict[str, Any]]]:
    """Return the class of an environment's actions, and schemas of actions and observations."""
    try:
        hints = get_type_hints(environment_class.step)
        action, observation = hints["action"], hints["return"]
        return action, (action.model_json_schema(), observation.model_json_schema())
    except (AttributeError, KeyError, NameError, TypeError) as error:
        raise ConfigurationError(
            f"step of {name} has no types of action and observation ({error}). Annotate it as "
            "OpenEnv's template does."
        ) from error


def _fields_of(
    action: Mapping[str, Any], observation: Mapping[str, Any], parameters: Any, place: str
) -> Fields:
    texts = _texts(action)
    if action.get("title") in _OF_TOOLS or (action.get("title") == "Action" and not texts):
        raise ConfigurationError(
            f"the environment {place} is called through tools (MCP), which is not supported. "
            "Choose one whose action has a text field."
        )
    required = [name for name in action.get("required", ()) if name not in _RESULTS]
    chosen = parameters.action_field or (required or texts or [None])[0]
    if chosen not in texts or set(required) - {chosen}:
        raise ConfigurationError(
            f"the action of {place} needs {', '.join(required) or 'no field'}; its texts: "
            f"{', '.join(texts) or 'none'}. An action must need one text only; name it as "
            "task.task.action_field."
        )
    seen = _texts(observation)
    read = parameters.observation_field or (seen[0] if len(seen) == 1 else None)
    if read not in seen:
        raise ConfigurationError(
            f"the observation of {place} has the texts {', '.join(seen) or 'none'}. Name one as "
            "task.task.observation_field."
        )
    return Fields(chosen, read)


def _texts(schema: Mapping[str, Any]) -> list[str]:
    """Return the fields that hold texts."""
    found = []
    for name, field in schema.get("properties", {}).items():
        kinds = [one.get("type") for one in (field, *field.get("anyOf", ()))]
        if "string" in kinds and name not in _RESULTS:
            found.append(name)
    return found
