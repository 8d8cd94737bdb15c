"""Ray actors, on this machine or others, that run calls with copies of models.

An actor gets a model once, and updated weights at most once a rollout, through Ray's object store.
"""

from __future__ import annotations

import io
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

MAX_RESTARTS = 3
"""Maximum replacements of a dead actor; its call is repeated."""
SECONDS_BETWEEN_CHECKS = 2.0
"""Period of the check that Ray is still running."""

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class KeptName(NamedTuple):
    """Identifies an object cached in actors, or a part of it."""

    number: int
    kind: str = ""
    path: str = ""


class WeightVersion(NamedTuple):
    """A version of the trained weights of a cached module."""

    version: int
    reference: Any


class CallWriter:
    """Pickles calls; objects cached in actors are replaced by their names."""

    def __init__(self, put: Callable[[object], Any]) -> None:
        self._put = put
        self.references: list[Any] = []
        self._kept: list[object] = []
        self._names: dict[int, KeptName] = {}
        self._marks: dict[int, tuple[Any, ...]] = {}
        self._weights: dict[int, WeightVersion] = {}

    def keep(self, parts: Sequence[object]) -> None:
        """Send objects to be cached in actors; later ones may refer to earlier ones.

        An object with a method `to_send` is replaced by its result.
        """
        for part in parts:
            if id(part) in self._names:
                continue
            index = len(self._kept)
            to_send = getattr(part, "to_send", lambda part=part: part)
            self.references.append(self._put(self.dumps(to_send())))
            # A reference, so that no other object gets its id.
            self._kept.append(part)
            if isinstance(part, torch.nn.Module):
                for kind, named_members in (
                    ("submodule", part.named_modules()),
                    ("parameter", part.named_parameters(remove_duplicate=False)),
                    ("buffer", part.named_buffers(remove_duplicate=False)),
                ):
                    for path, member in named_members:
                        self._names.setdefault(id(member), KeptName(index, kind, path))
            else:
                self._names[id(part)] = KeptName(index)

    def weights(self) -> dict[int, WeightVersion]:
        """Return the trained weights of cached modules, stored again if they changed."""
        for index, module in enumerate(self._kept):
            trained = trainable_parameters(module)
            if not trained:
                continue
            # Writes through `.data` do not raise the version, but change the sum.
            mark = tuple(
                (weight._version, float(weight.detach().double().sum())) for weight in trained
            )
            if self._marks.get(index) != mark:
                version = self._weights[index].version + 1 if index in self._weights else 0
                values = [weight.detach().cpu() for weight in trained]
                self._weights[index] = WeightVersion(version, self._put(values))
                self._marks[index] = mark
        return dict(self._weights)

    def dumps(self, value: object) -> bytes:
        """Pickle a value for an actor."""
        # Needed with Ray only, and installed with tensordict too.
        import cloudpickle

        names = self._names

        class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
            def persistent_id(self, obj: object) -> KeptName | None:
                return names.get(id(obj))

        stream = io.BytesIO()
        Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return stream.getvalue()


class CallReader(pickle.Unpickler):
    """Unpickles calls of a `CallWriter` of the same run."""

    def __init__(self, pickled: bytes, cached: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._cached = cached

    def persistent_load(self, name: KeptName) -> Any:
        part = self._cached[name.number]
        if not name.kind:
            return part
        # Of a module: get_submodule, get_parameter or get_buffer.
        return getattr(part, f"get_{name.kind}")(name.path)


def trainable_parameters(module: object) -> list[torch.nn.Parameter]:
    """Return the parameters of a cached object that training may change."""
    if not isinstance(module, torch.nn.Module):
        return []
    return [weight for weight in module.parameters() if weight.requires_grad]


class ActorOptions(NamedTuple):
    """Number and resources of actors."""

    num_actors: int
    address: str | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    num_threads: int = 1


def actor_options(
    settings: ExperimentSettings, num_parameters: int = SMALL_MODEL_PARAMETERS
) -> ActorOptions:
    """Return the actor settings for models of a size; small models use one thread."""
    refuse_actors_without_device(settings)
    return ActorOptions(
        settings.num_actors,
        settings.ray_address,
        num_cpus=settings.actor_cpus,
        num_gpus=settings.actor_gpus,
        num_threads=choose_num_threads(num_parameters, max(1, int(settings.actor_cpus))),
    )


def refuse_actors_without_device(settings: ExperimentSettings) -> None:
    """Raise if actors have no GPU (`actor_gpus` 0) but models are on one."""
    if not settings.num_actors or settings.actor_gpus or settings.device == "cpu":
        return
    device = resolve_device(settings.device)
    if device.type != "cpu":
        raise ConfigurationError(
            f"actor_gpus is 0, but models are on {str(device)!r}. Set it to 1, or to a fraction "
            "that actors share, or use --device cpu."
        )


class _Actor:
    """Ray actor that caches models and runs calls."""

    def __init__(self, num_threads: int, plugins: Sequence[str]) -> None:
        # Tokenizers would take threads of the other actors.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        keep_freed_memory()
        torch.set_num_threads(num_threads)
        for spec in plugins:
            load_plugin(spec)
        self._kept: list[Any] = []
        self._versions: dict[int, int] = {}

    def run(
        self, references: list[Any], weights: dict[int, WeightVersion], call: bytes, has_grad: bool
    ) -> Any:
        """Run a call with the given versions of the weights."""
        import ray

        for reference in references[len(self._kept) :]:
            self._kept.append(CallReader(ray.get(reference), self._kept).load())
        for index, trained in weights.items():
            if self._versions.get(index) == trained.version:
                continue
            with torch.no_grad():
                weights_here = trainable_parameters(self._kept[index])
                new_values = ray.get(trained.reference)
                for weight, value in zip(weights_here, new_values, strict=True):
                    weight.copy_(value)
            self._versions[index] = trained.version
        with torch.set_grad_enabled(has_grad):
            return CallReader(call, self._kept).load()()


class Actors:
    """Pool of Ray actors that cache models and run calls."""

    def __init__(self, options: ActorOptions) -> None:
        cores = options.num_actors * options.num_cpus
        self._ray = open_ray(options.address, num_cpus=cores)
        self._writer = CallWriter(self._ray.put)
        there = self._ray.cluster_resources().get("CPU", 0)
        if there < cores:
            logger.warning(
                "%d actors of %g cores each do not fit the cluster's %g cores: some wait until it "
                "grows",
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
        """Run each call in the next free actor and return the results in order.

        An actor that dies is replaced, and its call repeated. Actors keep `parts`, such as modules.
        """
        return self._prepared(calls, parts)()

    def begin(
        self, calls: Sequence[Callable[[], Result]], parts: Sequence[object]
    ) -> Callable[[], list[Result]]:
        """Start calls with the current weights; return a function that waits for their results."""
        run = self._prepared(calls, parts)
        results: Future[list[Result]] = Future()

        def work() -> None:
            try:
                results.set_result(run())
            except BaseException as error:
                results.set_exception(error)

        # Nothing waits for the thread if the run ends meanwhile.
        threading.Thread(target=work, name="calls-of-actors", daemon=True).start()
        return results.result

    def _prepared(
        self, calls: Sequence[Callable[[], Result]], parts: Sequence[object]
    ) -> Callable[[], list[Result]]:
        """Pickle calls and store weights; return a function that submits the calls."""
        from ray.util import ActorPool

        check_ray_lives(self._ray)
        try:
            self._writer.keep(parts)
            pickled_calls = [self._writer.dumps(call) for call in calls]
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise WorkerProcessError(
                f"work for actors cannot be pickled: {error}. Run with --settings num_actors=0."
            ) from error
        weights, references = self._writer.weights(), list(self._writer.references)
        has_grad = torch.is_grad_enabled()
        pool = ActorPool(self._actors)

        def run() -> list[Result]:
            results: list[Result] = []
            with _typed_errors(self._ray):
                for pickled_call in pickled_calls:
                    pool.submit(
                        lambda actor, call: actor.run.remote(references, weights, call, has_grad),
                        pickled_call,
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

        return run

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            self._ray.kill(actor)


def results_of(ray: Any, references: Sequence[Any]) -> list[Any]:
    """Return the results of actor calls, in order."""
    with _typed_errors(ray):
        while True:
            check_ray_lives(ray)
            with suppress(ray.exceptions.GetTimeoutError):
                return list(ray.get(list(references), timeout=SECONDS_BETWEEN_CHECKS))


@contextmanager
def _typed_errors(ray: Any) -> Iterator[None]:
    """Re-raise this package's errors from actors unchanged, and others typed."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, NipAstraError):
            error.cause.add_note(f"raised in an actor:\n{error}")
            raise error.cause from None
        # Ray may raise an error of the cause's class, without Ray's attributes.
        raise WorkerProcessError(f"an actor failed:\n{error}") from error
    except ray.exceptions.RayError as error:
        raise WorkerProcessError(
            f"an actor died {MAX_RESTARTS + 1} times: {error}. Check the memory, or use fewer "
            "actors."
        ) from error


_options: ActorOptions | None = None
_open: Actors | None = None


@contextmanager
def using_actors(options: ActorOptions) -> Iterator[None]:
    """Allow actors within the block; they start on first use."""
    global _options, _open
    before = _options, _open
    _options, _open = (options if options.num_actors else None), None
    try:
        yield
    finally:
        if _open is not None:
            _open.close()
        _options, _open = before


def are_actors_used() -> bool:
    """Return whether actors are allowed."""
    return _options is not None


def get_actors() -> Actors | None:
    """Return the actors of the current block; None if there are none."""
    global _open
    if _open is None and _options is not None:
        _open = Actors(_options)
    return _open


def forget_kept_models() -> None:
    """Stop the actors and drop their cached models; new actors start on the next use."""
    global _open
    if _open is not None:
        _open.close()
    _open = None


def actors_for(device: torch.device) -> Actors | None:
    """Return the actors that have such a device; None if there are none."""
    if _options is None or (device.type != "cpu" and not _options.num_gpus):
        return None
    return get_actors()
