"""Work that is divided among actors of Ray, on this machine or others.

An actor keeps copies of models. What they learn reaches it once a rollout through Ray's object
store; calls name what it keeps, and bring the rest with them.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch

from nip_astra.errors import ConfigurationError, NipAstraError, WorkerProcessError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.plugins import load_plugin, loaded_plugins
from nip_astra.utils.devices import resolve_device
from nip_astra.utils.processor import (
    SMALL_MODEL_PARAMETERS,
    choose_num_threads,
    keep_freed_memory,
)
from nip_astra.utils.ray_cluster import check_ray_lives, open_ray
from nip_astra.utils.sending import Reader, Sender, Weights, learnt_of

MAX_RESTARTS = 3
"""How often an actor that died is replaced; what it was doing is done again."""
SECONDS_BETWEEN_CHECKS = 2.0
"""How often it is seen whether Ray still runs while results are waited for."""

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class ActorOptions(NamedTuple):
    """What actors are asked of Ray.

    Attributes
    ----------
    num_actors : int
        How many; 0 for none.
    address : str or None
        Of the cluster; see `open_ray`.
    num_cpus, num_gpus : float
        What each takes of a machine.
    num_threads : int
        Threads of torch of each.
    """

    num_actors: int
    address: str | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    num_threads: int = 1


def actor_options(
    settings: ExperimentSettings, num_parameters: int = SMALL_MODEL_PARAMETERS
) -> ActorOptions:
    """What the settings ask for, for models with so many parameters; small ones take a thread.

    Raises
    ------
    ConfigurationError
        See `refuse_actors_without_device`.
    """
    refuse_actors_without_device(settings)
    return ActorOptions(
        settings.num_actors,
        settings.ray_address,
        num_cpus=settings.actor_cpus,
        num_gpus=settings.actor_gpus,
        num_threads=choose_num_threads(num_parameters, max(1, int(settings.actor_cpus))),
    )


def refuse_actors_without_device(settings: ExperimentSettings) -> None:
    """Refuse actors that would get copies of models on a GPU, and have none.

    Raises
    ------
    ConfigurationError
        When they are asked for.
    """
    if not settings.num_actors or settings.actor_gpus or settings.device == "cpu":
        return
    device = resolve_device(settings.device)
    if device.type != "cpu":
        raise ConfigurationError(
            f"{settings.num_actors} actors were to hold copies of models on the device "
            f"{str(device)!r}, but they are given no GPU (actor_gpus 0). Set actor_gpus to 1, or "
            "to a part of one that several share, or run with --device cpu."
        )


class _Actor:
    """Runs in a process of Ray's: keeps copies of models, and makes calls."""

    def __init__(self, num_threads: int, plugins: Sequence[str]) -> None:
        # Tokenizers would take threads that belong to the other actors.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        keep_freed_memory()
        torch.set_num_threads(num_threads)
        for spec in plugins:
            load_plugin(spec)
        self._kept: list[Any] = []
        self._versions: dict[int, int] = {}

    def make(
        self, references: list[Any], weights: dict[int, Weights], call: bytes, has_grad: bool
    ) -> Any:
        """Make a call with the weights of now."""
        import ray

        for reference in references[len(self._kept) :]:
            self._kept.append(Reader(ray.get(reference), self._kept).load())
        for index, learnt in weights.items():
            if self._versions.get(index) == learnt.version:
                continue
            with torch.no_grad():
                for one, value in zip(
                    learnt_of(self._kept[index]), ray.get(learnt.reference), strict=True
                ):
                    one.copy_(value)
            self._versions[index] = learnt.version
        with torch.set_grad_enabled(has_grad):
            return Reader(call, self._kept).load()()

    def process_id(self) -> int:
        """The number of its process."""
        return os.getpid()


class Actors:
    """Actors that keep copies of models and make calls with them.

    Raises
    ------
    MissingDependencyError
        When Ray is not installed.
    ConfigurationError
        When the cluster cannot be reached.
    """

    def __init__(self, options: ActorOptions) -> None:
        cores = options.num_actors * options.num_cpus
        self._ray = open_ray(options.address, num_cpus=cores)
        self._sender = Sender(self._ray.put)
        there = self._ray.cluster_resources().get("CPU", 0)
        if there < cores:
            logger.warning(
                "%d actors of %g cores each were asked for, and the cluster has %g cores: some "
                "wait until it grows",
                options.num_actors,
                options.num_cpus,
                there,
            )
        kind = self._ray.remote(
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            max_restarts=MAX_RESTARTS,
            max_task_retries=MAX_RESTARTS,
        )(_Actor)
        plugins = [plugin.spec for plugin in loaded_plugins()]
        self._actors = [
            kind.remote(options.num_threads, plugins) for _ in range(options.num_actors)
        ]

    def call(self, calls: Sequence[Callable[[], Result]], parts: Sequence[object]) -> list[Result]:
        """Make calls, each by the next actor that is free, and give their results in order.

        An actor that dies is replaced, and its call made again.

        Parameters
        ----------
        parts : Sequence[object]
            What the calls hold that actors are to keep, such as modules.

        Raises
        ------
        WorkerProcessError
            When an actor dies again and again, or something cannot be sent.
        """
        return self._prepared(calls, parts)()

    def begin(
        self, calls: Sequence[Callable[[], Result]], parts: Sequence[object]
    ) -> Callable[[], list[Result]]:
        """Begin calls as `call` would make them now; what it gives waits for their results.

        Whatever this process changes meanwhile, the calls are made with what holds now.
        """
        make = self._prepared(calls, parts)
        made: Future[list[Result]] = Future()

        def work() -> None:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)

        # It only hands calls out. Where a run ends in between, nobody waits for it.
        threading.Thread(target=work, name="calls-of-actors", daemon=True).start()
        return made.result

    def _prepared(
        self, calls: Sequence[Callable[[], Result]], parts: Sequence[object]
    ) -> Callable[[], list[Result]]:
        """All that calls need is written and put; what is left is to hand them out."""
        from ray.util import ActorPool

        check_ray_lives(self._ray)
        try:
            self._sender.keep(parts)
            written = [self._sender.written(call) for call in calls]
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise WorkerProcessError(
                f"work was to be sent to actors, but it cannot be: {error}. Run with --settings "
                "num_actors=0."
            ) from error
        weights, references = self._sender.weights(), list(self._sender.references)
        has_grad = torch.is_grad_enabled()
        pool = ActorPool(self._actors)

        def make() -> list[Result]:
            results: list[Result] = []
            with _typed_errors(self._ray):
                for one in written:
                    pool.submit(
                        lambda actor, call: actor.make.remote(references, weights, call, has_grad),
                        one,
                    )
                while pool.has_next():
                    check_ray_lives(self._ray)
                    try:
                        results.append(pool.get_next(timeout=SECONDS_BETWEEN_CHECKS))
                    except TimeoutError as error:
                        # A call may raise one too.
                        if isinstance(error, self._ray.exceptions.RayTaskError):
                            raise
            return results

        return make

    def process_ids(self) -> list[int]:
        """The numbers of the actors' processes."""
        return results_of(self._ray, [actor.process_id.remote() for actor in self._actors])

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            self._ray.kill(actor)


def results_of(ray: Any, references: Sequence[Any]) -> list[Any]:
    """The results of calls of actors, in order.

    Raises
    ------
    WorkerProcessError
        When an actor failed, or died again and again, or Ray itself has ended.
    """
    with _typed_errors(ray):
        while True:
            check_ray_lives(ray)
            with suppress(ray.exceptions.GetTimeoutError):
                return list(ray.get(list(references), timeout=SECONDS_BETWEEN_CHECKS))


@contextmanager
def _typed_errors(ray: Any) -> Iterator[None]:
    """Raise an error of ours that an actor raised as what it is, and others typed."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, NipAstraError):
            error.cause.add_note(f"raised in an actor:\n{error}")
            raise error.cause from None
        # Ray may give the error the class of its cause, which has no attributes of Ray's.
        raise WorkerProcessError(f"an actor failed:\n{error}") from error
    except ray.exceptions.RayError as error:
        raise WorkerProcessError(
            f"an actor died, and those that took its place too: {error}. Look for what ends "
            "them, for instance memory, or use fewer actors."
        ) from error


_asked: ActorOptions | None = None
_open: Actors | None = None


@contextmanager
def using_actors(options: ActorOptions) -> Iterator[None]:
    """Let what can be divided use actors within the block; they begin when first needed."""
    global _asked, _open
    before = _asked, _open
    _asked, _open = (options if options.num_actors else None), None
    try:
        yield
    finally:
        if _open is not None:
            _open.close()
        _asked, _open = before


def are_actors_used() -> bool:
    """Say whether work is divided among actors."""
    return _asked is not None


def get_actors() -> Actors | None:
    """The actors that work is divided among; None where there are none."""
    global _open
    if _open is None and _asked is not None:
        _open = Actors(_asked)
    return _open


def forget_kept_models() -> None:
    """End the actors that are open, and with them the models that they keep.

    Others begin when they are next needed.
    """
    global _open
    if _open is not None:
        _open.close()
    _open = None


def actors_for(device: torch.device) -> Actors | None:
    """The actors that have such a device; None where there are none."""
    if _asked is None or (device.type != "cpu" and not _asked.num_gpus):
        return None
    return get_actors()
