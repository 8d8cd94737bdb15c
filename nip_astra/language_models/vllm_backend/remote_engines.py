"""vLLM engines in Ray actors; each samples a part of the requests with the current weights.

Tested with vLLM for CPUs, two engines on one machine; not on GPUs yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import Tensor

from nip_astra.language_models.vllm_backend.engine import (
    EngineOptions,
    Reply,
    Request,
    SamplingEngine,
    VllmEngine,
    refuse_other_vocabulary,
    start_engine,
)
from nip_astra.utils.actors import MAX_RESTARTS, results_of
from nip_astra.utils.ray_cluster import open_ray


class _StoredVersion(NamedTuple):
    """Weights or adapter files in Ray's object store, and their number."""

    version: int
    reference: Any
    is_adapter: bool


class EngineActor:
    """An engine in a Ray process; current weights arrive with the first request that needs them.

    This also holds for an actor that replaces a dead one.
    """

    def __init__(self, name: str, options: EngineOptions) -> None:
        self._engine: VllmEngine = start_engine(name, options)
        self._engine.note_weights(0)

    def vocabulary(self) -> tuple[int, dict[str, int]]:
        """Return the size and tokens of the engine's vocabulary."""
        return self._engine.vocabulary()

    def generate(
        self, requests: Sequence[Request], arguments: dict[str, Any], stored: list[_StoredVersion]
    ) -> list[Reply]:
        """Sample a turn for each request."""
        adapter = None
        for version in stored:
            if version.is_adapter:
                adapter = self._load_adapter(version)
            else:
                self._load_weights(version)
        return self._engine.generate(requests, arguments, adapter=adapter)

    def sleep(self) -> None:
        """Release memory until the next request."""
        self._engine.sleep()

    def _load_weights(self, stored: _StoredVersion) -> None:
        import ray

        # Fetched only if this engine has another version.
        self._engine.hold_weights(stored.version, lambda: ray.get(stored.reference))

    def _load_adapter(self, stored: _StoredVersion) -> Any:
        import ray

        def write(folder: Path) -> None:
            for name, content in ray.get(stored.reference).items():
                (folder / name).write_bytes(content)

        return self._engine.hold_adapter(stored.version, write)


class RemoteEngines(SamplingEngine):
    """Engines of one model in Ray actors, used like one `VllmEngine`.

    Turns do not depend on the engine: each request has its own seed.
    """

    def __init__(self, ray: Any, actors: Sequence[Any], options: EngineOptions) -> None:
        super().__init__(options)
        self._ray = ray
        self._actors = list(actors)
        self._weights: _StoredVersion | None = None
        self._adapter: _StoredVersion | None = None
        self._weights_version: Hashable = None
        self._adapter_version: Hashable = None
        self._num_versions = 0

    def check_vocabulary(self, tokenizer: Any, vocab_size: int) -> None:
        calls = [actor.vocabulary.remote() for actor in self._actors]
        for size, vocabulary in results_of(self._ray, calls):
            refuse_other_vocabulary(size, vocabulary, tokenizer, vocab_size)

    def note_weights(self, version: Hashable) -> None:
        self._weights_version = version

    def hold_weights(
        self, version: Hashable, weights: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> None:
        if self._weights_version != version:
            content = [(name, weight.cpu()) for name, weight in weights()]
            self._weights = self._store(content, is_adapter=False)
            self._weights_version = version

    def hold_adapter(self, version: Hashable, write: Callable[[Path], None]) -> Any:
        if self._adapter_version != version:
            with TemporaryDirectory(prefix="nip_astra_adapter_") as folder:
                write(Path(folder))
                files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
            self._adapter = self._store(files, is_adapter=True)
            self._adapter_version = version
        return self._adapter

    def sleep(self) -> None:
        if self.options.can_sleep:
            results_of(self._ray, [actor.sleep.remote() for actor in self._actors])

    def generate(
        self, requests: Sequence[Request], arguments: dict[str, Any], *, adapter: Any = None
    ) -> list[Reply]:
        stored = [version for version in (self._weights, adapter) if version is not None]
        # Each engine gets neighbouring requests, which share prefixes.
        num_actors = len(self._actors)
        calls = []
        for index, actor in enumerate(self._actors):
            start = len(requests) * index // num_actors
            stop = len(requests) * (index + 1) // num_actors
            if stop > start:
                call = actor.generate.remote(list(requests[start:stop]), arguments, stored)
                calls.append(call)
        return [reply for replies in results_of(self._ray, calls) for reply in replies]

    def _store(self, content: object, *, is_adapter: bool) -> _StoredVersion:
        self._num_versions += 1
        return _StoredVersion(self._num_versions, self._ray.put(content), is_adapter)


def start_remote_engines(
    name: str, options: EngineOptions, *, num_engines: int, num_gpus: float
) -> RemoteEngines:
    """Load a model into several engines, each in a Ray actor."""
    ray = open_ray()
    as_actor = ray.remote(
        num_gpus=num_gpus, max_restarts=MAX_RESTARTS, max_task_retries=MAX_RESTARTS
    )
    actor_class = as_actor(EngineActor)
    actors = [actor_class.remote(name, options) for _ in range(num_engines)]
    return RemoteEngines(ray, actors, options)
