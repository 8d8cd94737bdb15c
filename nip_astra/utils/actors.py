"""Work that is divided among actors of Ray, on this machine or others.

An actor keeps copies of models. What they learn reaches it once a rollout through Ray's object
store; calls name what it keeps, and bring the rest with them.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from nip_astra.errors import NipAstraError, WorkerProcessError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.plugins import load_plugin, loaded_plugins
from nip_astra.utils.processor import (
    SMALL_MODEL_PARAMETERS,
    choose_num_threads,
    keep_freed_memory,
)
from nip_astra.utils.ray_cluster import open_ray

MAX_RESTARTS = 3
"""How often an actor that died is replaced; what it was doing is done again."""

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
    """What the settings ask for, for models with so many parameters; small ones take a thread."""
    return ActorOptions(
        settings.num_actors,
        settings.ray_address,
        num_cpus=settings.actor_cpus,
        num_gpus=settings.actor_gpus,
        num_threads=choose_num_threads(num_parameters, max(1, int(settings.actor_cpus))),
    )


class _Kept(NamedTuple):
    """Names something that an actor keeps: which one, and what of it."""

    place: int
    kind: str = ""
    path: str = ""


class _Weights(NamedTuple):
    """What a kept module has learnt."""

    version: int
    reference: Any


class _Sender:
    """Knows what actors keep, and writes calls that name it."""

    def __init__(self, put: Callable[[object], Any]) -> None:
        self._put = put
        self.references: list[Any] = []
        self._kept: list[object] = []
        self._names: dict[int, _Kept] = {}
        self._marks: dict[int, tuple[Any, ...]] = {}
        self._weights: dict[int, _Weights] = {}

    def keep(self, parts: Sequence[object]) -> None:
        """Have actors keep these; later ones may be made of earlier ones.

        What has a method `to_send` is written as what that gives.
        """
        for part in parts:
            if id(part) in self._names:
                continue
            index = len(self._kept)
            to_send = getattr(part, "to_send", lambda part=part: part)
            self.references.append(self._put(self.written(to_send())))
            # It is held here, so that no other object gets its id.
            self._kept.append(part)
            if isinstance(part, torch.nn.Module):
                for path, module in part.named_modules():
                    self._names.setdefault(id(module), _Kept(index, "module", path))
                for path, parameter in part.named_parameters(remove_duplicate=False):
                    self._names.setdefault(id(parameter), _Kept(index, "parameter", path))
                for path, buffer in part.named_buffers(remove_duplicate=False):
                    self._names.setdefault(id(buffer), _Kept(index, "buffer", path))
            else:
                self._names[id(part)] = _Kept(index)

    def weights(self) -> dict[int, _Weights]:
        """Where actors find what kept modules have learnt; put anew where that has changed."""
        for index, module in enumerate(self._kept):
            learnt = _learnt(module)
            if not learnt:
                continue
            # Writes through `.data` count no version up, but change the sums.
            mark = tuple((one._version, float(one.detach().double().sum())) for one in learnt)
            if self._marks.get(index) != mark:
                version = self._weights[index].version + 1 if index in self._weights else 0
                values = [one.detach().cpu() for one in learnt]
                self._weights[index] = _Weights(version, self._put(values))
                self._marks[index] = mark
        return dict(self._weights)

    def written(self, value: object) -> bytes:
        """A value that an actor can read."""
        # Needed with Ray only, and installed with tensordict too.
        import cloudpickle

        names = self._names

        class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
            def persistent_id(self, one: object) -> _Kept | None:
                return names.get(id(one))

        stream = io.BytesIO()
        Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return stream.getvalue()


class _Reader(pickle.Unpickler):
    """Reads what a `_Sender` of the same run wrote."""

    def __init__(self, written: bytes, kept: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(written))
        self._kept = kept

    def persistent_load(self, name: _Kept) -> Any:
        one = self._kept[name.place]
        if name.kind == "module":
            return one.get_submodule(name.path)
        if name.kind == "parameter":
            return one.get_parameter(name.path)
        return one.get_buffer(name.path) if name.kind == "buffer" else one


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
        self, references: list[Any], weights: dict[int, _Weights], call: bytes, has_grad: bool
    ) -> Any:
        """Make a call with the weights of now."""
        import ray

        for reference in references[len(self._kept) :]:
            self._kept.append(_Reader(ray.get(reference), self._kept).load())
        for index, learnt in weights.items():
            if self._versions.get(index) == learnt.version:
                continue
            with torch.no_grad():
                for one, value in zip(
                    _learnt(self._kept[index]), ray.get(learnt.reference), strict=True
                ):
                    one.copy_(value)
            self._versions[index] = learnt.version
        with torch.set_grad_enabled(has_grad):
            return _Reader(call, self._kept).load()()

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
        self._sender = _Sender(self._ray.put)
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
        from ray.util import ActorPool

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
        with _typed_errors(self._ray):
            return list(
                pool.map(
                    lambda actor, call: actor.make.remote(references, weights, call, has_grad),
                    written,
                )
            )

    def process_ids(self) -> list[int]:
        """The numbers of the actors' processes."""
        ids: list[int] = self._ray.get([actor.process_id.remote() for actor in self._actors])
        return ids

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            self._ray.kill(actor)


def results_of(ray: Any, references: Sequence[Any]) -> list[Any]:
    """The results of calls of actors, in order.

    Raises
    ------
    WorkerProcessError
        When an actor failed, or died again and again.
    """
    with _typed_errors(ray):
        return list(ray.get(list(references)))


@contextmanager
def _typed_errors(ray: Any) -> Iterator[None]:
    """Raise an error of ours that an actor raised as what it is, and others typed."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, NipAstraError):
            error.cause.add_note(f"raised in an actor:\n{error.traceback_str}")
            raise error.cause from None
        raise WorkerProcessError(f"an actor failed:\n{error.traceback_str}") from error
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


def actors_for(device: torch.device) -> Actors | None:
    """The actors that have such a device; None where there are none."""
    if _asked is None or (device.type != "cpu" and not _asked.num_gpus):
        return None
    return get_actors()


def _learnt(module: object) -> list[torch.nn.Parameter]:
    """What training may change of something that is kept."""
    if not isinstance(module, torch.nn.Module):
        return []
    return [one for one in module.parameters() if one.requires_grad]
