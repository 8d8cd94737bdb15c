"""OpenEnv environments, on a server or in this process."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, get_type_hints

from pydantic import BaseModel, Field, JsonValue, ValidationError, model_validator

from nip_astra.call_outcomes import kept_outcome
from nip_astra.errors import (
    ConfigurationError,
    ServiceBusyError,
    ServiceError,
    ServiceUnreachableError,
    TaskError,
)
from nip_astra.language_models.services.http_client import MIB, fetch_json
from nip_astra.lazy import import_extra
from nip_astra.parameters.conditions import where, where_given
from nip_astra.parameters.parameters_base import CheckedName, PlainText
from nip_astra.parameters.types import TaskType
from nip_astra.progress import waiting_for
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

logger = logging.getLogger(__name__)

_RESULTS = ("done", "reward", "metadata")
LARGEST_SCHEMA = 4 * MIB
LARGEST_MESSAGE = 1 * MIB
"""Limits of a server's answers, in bytes. An observation is a text that a policy reads."""
SECONDS_TO_CLOSE = 1.0
"""Seconds to wait for the end of a session; the server may take longer."""
SECONDS_UNSHOWN = 10.0
"""Seconds after which the progress bar shows that the run waits for a server."""
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


class MalformedResultError(ValueError):
    """The environment's answer to a reset or a step is no result."""


_KEPT_ERRORS: Mapping[str, type[Exception]] = {
    "rejected": RejectedActionError,
    "malformed": MalformedResultError,
    "unreachable": ServiceUnreachableError,
}
"""Errors of a step that end or continue the episode, by the names under which they are kept."""


def _checked_result(observation: Any, reward: Any, done: Any) -> Result:
    """Return the parts of an environment's answer, of the types that OpenEnv documents."""
    if not isinstance(observation, Mapping):
        raise MalformedResultError(f"the observation {str(observation)[:80]!r} is no object")
    if not isinstance(done, bool | None):
        raise MalformedResultError(f"done is {str(done)[:80]!r}, not true or false")
    if reward is None:
        return Result(observation, None, bool(done))
    # A text is no reward, even if it can be converted to a number.
    is_number = isinstance(reward, int | float)
    try:
        number = float(reward) if is_number else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise MalformedResultError(f"the reward {str(reward)[:80]!r} is no finite number")
    return Result(observation, number, bool(done))


class _LocalSession:
    """An environment in this process, called as its server would call it."""

    def __init__(self, make: Callable[[], Any], action_class: type[BaseModel]) -> None:
        self._environment = make()
        self._action_class = action_class

    def reset(self, seed: int) -> Result:
        parameters = inspect.signature(self._environment.reset).parameters
        takes_any = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        # An environment need not take a seed.
        options = {"seed": seed} if "seed" in parameters or takes_any else {}
        return self._result(self._environment.reset(**options))

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
        return _checked_result(plain, plain.pop("reward", None), plain.pop("done", False))


class _RemoteSession:
    """A session on a server."""

    def __init__(self, address: str, timeout: float, loop: BackgroundLoop) -> None:
        from openenv import GenericEnvClient

        self._address, self._timeout, self._loop = address, timeout, loop
        self._client = GenericEnvClient(
            base_url=address,
            connect_timeout_s=timeout,
            message_timeout_s=timeout,
            max_message_size_mb=LARGEST_MESSAGE / MIB,
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
        self._loop.run(self._close())

    async def _close(self) -> None:
        """Close the session; a server that does not take part in it is not waited for."""
        ending = asyncio.create_task(self._answer("close"))
        # What fails here is of no consequence: the episode has ended.
        ending.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait({ending}, timeout=SECONDS_TO_CLOSE)

    async def _answer(self, method: str, *arguments: Any, **options: Any) -> Any:
        # Newer clients answer at once where no loop runs.
        return await getattr(self._client, method)(*arguments, **options)

    async def _answer_in_time(self, method: str, *arguments: Any, **options: Any) -> Any:
        # The client limits opening and each message; a reset does both.
        async with asyncio.timeout(2 * self._timeout):
            with waiting_for(f"the environment {self._address}", after=SECONDS_UNSHOWN):
                return await self._answer(method, *arguments, **options)

    def _result(self, method: str, *arguments: Any, **options: Any) -> Result:
        from websockets.exceptions import WebSocketException

        try:
            answer = self._loop.run(self._answer_in_time(method, *arguments, **options))
            return _checked_result(answer.observation, answer.reward, answer.done)
        except (TimeoutError, OSError, WebSocketException) as error:
            reason = str(error) or f"nothing in {self._timeout:g} s"
            raise ServiceUnreachableError(
                f"the environment at {self._address} does not answer: {reason}. Start it, then "
                "resume the run."
            ) from error
        except RecursionError as error:
            raise MalformedResultError("its answer is nested too deeply") from error
        except RuntimeError as error:
            if "VALIDATION_ERROR" in str(error):
                raise RejectedActionError(str(error)) from error
            raise TaskError(f"the environment at {self._address} failed: {error}.") from error
        except MalformedResultError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            # The client does not check what it reads.
            raise MalformedResultError(f"its answer is malformed ({error})") from error

    def _busy(self) -> ServiceBusyError:
        return ServiceBusyError(
            f"the environment at {self._address} has no free session. Lower task.task.concurrency, "
            "or raise max_concurrent_envs of the server."
        )


class OpenEnvEnvironment(Environment):
    """One episode; the reward is the sum of those of its steps.

    An action that the environment rejects is answered with the error. If the session is lost, or a
    step is answered with anything else than a result, the episode has no reward.
    """

    figures: Counter[str]

    def __init__(
        self, open_session: Callable[[], Any], fields: Fields, seed: int, num_open: int | None
    ) -> None:
        self._open, self._fields, self._seed = open_session, fields, seed
        self.max_open = num_open
        self.concurrency = num_open or 1
        self.columns = (("seed", seed),)
        self.figures = Counter(rejected_actions=0, lost=0, malformed=0)
        self._session: Any = None
        self._return: float | None = None
        self._unsent: list[str] = []

    def reset(self) -> Sequence[Turn]:
        self._session, self._return, self._unsent = self._open(), None, []
        try:
            return [self._message(self._session.reset(self._seed))]
        except MalformedResultError as error:
            raise TaskError(
                f"the environment's answer to reset is no result: {error}. Check that it is an "
                "environment of OpenEnv, and task.task.observation_field."
            ) from error

    def step(self, message: str) -> Reaction:
        try:
            result = self._kept_result(message)
        except RejectedActionError as error:
            self.figures["rejected_actions"] += 1
            return Reaction([Turn("user", f"Error: {error}"[:300])], is_over=False)
        except ServiceUnreachableError:
            self.figures["lost"] += 1
            return Reaction()
        except MalformedResultError as error:
            return self._end_malformed(error)
        if result.reward is not None:
            self._return = (self._return or 0.0) + result.reward
        if result.is_over:
            return Reaction(reward=self._return)
        try:
            return Reaction([self._message(result)], is_over=False)
        except MalformedResultError as error:
            return self._end_malformed(error)

    def _kept_result(self, message: str) -> Result:
        """Return the result of a step, in a resumed run that of before.

        The session then lags behind the episode, until a step follows that is not kept.
        """
        is_sent = False

        def send() -> list[Any]:
            nonlocal is_sent
            is_sent = True
            while self._unsent:
                with suppress(RejectedActionError, MalformedResultError):
                    self._session.step({self._fields.action: self._unsent.pop(0)})
            try:
                return ["result", *self._session.step({self._fields.action: message})]
            except tuple(_KEPT_ERRORS.values()) as error:
                kind = next(name for name, cls in _KEPT_ERRORS.items() if isinstance(error, cls))
                return [kind, str(error)]

        # Whether a server answers within `timeout_seconds` depends on its load.
        kind, *values = kept_outcome("environment", [self._seed, message], send)
        if not is_sent:
            self._unsent.append(message)
        if kind in _KEPT_ERRORS:
            raise _KEPT_ERRORS[kind](*values)
        return Result(*values)

    def _end_malformed(self, error: MalformedResultError) -> Reaction:
        """Count the episode, which ends without a reward."""
        self.figures["malformed"] += 1
        logger.warning("an episode ends without a reward: the environment's step: %s", error)
        return Reaction()

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _message(self, result: Result) -> Turn:
        text = result.observation.get(self._fields.observation)
        if not isinstance(text, str):
            raise MalformedResultError(
                f"the observation has no text {self._fields.observation!r}, but "
                f"{str(dict(result.observation))[:80]}"
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

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self._loop = BackgroundLoop()
        if parameters.address is not None:
            schemas = _schemas_at(parameters.address, parameters.timeout_seconds, self._loop)
        else:
            self._class = find_function(parameters.environment, self.scenario_dir)[1]
            self._action_class, schemas = _schemas_of(self._class, parameters.environment)
        action_schema, observation_schema = schemas
        source = parameters.address or parameters.environment
        self._fields = _choose_fields(action_schema, observation_schema, parameters, source)

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


def _schemas_at(
    address: str, timeout: float, loop: BackgroundLoop
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a server's schemas of actions and observations."""
    import_extra("openenv", f"the environment {address}", "openenv")
    url = f"{address.rstrip('/')}/schema"
    try:
        with waiting_for(f"the environment {address}", after=SECONDS_UNSHOWN):
            # What a server sends may be anything; it is checked below.
            schemas: Any = loop.run(
                fetch_json(url, "the environment", timeout=timeout, max_bytes=LARGEST_SCHEMA)
            )
        return _checked_schema(schemas["action"]), _checked_schema(schemas["observation"])
    except ServiceUnreachableError:
        raise
    except (ServiceError, ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(
            f"{url} gives no schema of an OpenEnv environment ({error}). Check task.task.address."
        ) from error


def _checked_schema(schema: Any) -> dict[str, Any]:
    """Return a JSON Schema of an object; raise `ValueError` for anything else."""
    if not isinstance(schema, dict):
        raise ValueError(f"the schema {str(schema)[:80]!r} is no object")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(
        isinstance(field, dict) for field in properties.values()
    ):
        raise ValueError("its properties are no objects")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError("its required fields are no names")
    for field in properties.values():
        kinds = field.get("anyOf", [])
        if not isinstance(kinds, list) or not all(isinstance(kind, dict) for kind in kinds):
            raise ValueError("its anyOf is no list of schemas")
    return schema


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


def _choose_fields(
    action: Mapping[str, Any], observation: Mapping[str, Any], parameters: Any, source: str
) -> Fields:
    """Return the fields for the policy's messages and for what it reads, from both schemas."""
    action_texts = _find_text_fields(action)
    title = action.get("title")
    if title in _OF_TOOLS or (title == "Action" and not action_texts):
        raise ConfigurationError(
            f"the environment {source} is called through tools (MCP), which is not supported. "
            "Choose one whose action has a text field."
        )
    required = [name for name in action.get("required", ()) if name not in _RESULTS]
    action_field = parameters.action_field
    if action_field is None:
        candidates = required or action_texts
        action_field = candidates[0] if candidates else None
    # No other field can be filled.
    has_further_fields = bool(set(required) - {action_field})
    if action_field not in action_texts or has_further_fields:
        raise ConfigurationError(
            f"the action of {source} needs {', '.join(required) or 'no field'}; its texts: "
            f"{', '.join(action_texts) or 'none'}. An action must need one text only; name it as "
            "task.task.action_field."
        )
    observation_texts = _find_text_fields(observation)
    observation_field = parameters.observation_field
    if observation_field is None and len(observation_texts) == 1:
        observation_field = observation_texts[0]
    if observation_field not in observation_texts:
        raise ConfigurationError(
            f"the observation of {source} has the texts {', '.join(observation_texts) or 'none'}. "
            "Name one as task.task.observation_field."
        )
    return Fields(action_field, observation_field)


def _find_text_fields(schema: Mapping[str, Any]) -> list[str]:
    """Return the fields that hold texts."""
    names = []
    for name, field in schema.get("properties", {}).items():
        # An optional text is any of a text and null.
        types = [alternative.get("type") for alternative in (field, *field.get("anyOf", ()))]
        if "string" in types and name not in _RESULTS:
            names.append(name)
    return names
