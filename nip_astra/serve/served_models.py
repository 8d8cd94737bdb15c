"""The models offered by a service, by name; each set of weights has its engine."""

from __future__ import annotations

import copy
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from nip_astra.errors import ConfigurationError, ModelLoadError, NipAstraError
from nip_astra.language_models.batch_engine import BatchEngine, EngineLimits, failed_progress
from nip_astra.language_models.message_format import MessageFormat, detect_format
from nip_astra.language_models.sampling import find_banned_ids, find_end_ids
from nip_astra.language_models.sequences import GenerationRequest, Listener, Progress
from nip_astra.language_models.services.chat import render_chat
from nip_astra.language_models.sources import (
    computing_dtype,
    converted_gguf,
    find_tokenizer,
    load_model,
    round_weights,
)
from nip_astra.language_models.structured import Grammars
from nip_astra.language_models.tree_engine.decoder import FAMILY, Decoder, why_unsupported
from nip_astra.language_models.tree_engine.routed_weights import Adapter, read_adapter
from nip_astra.language_models.tree_engine.weights import frozen_weights
from nip_astra.parameters.content import resolve_reference
from nip_astra.serve.requests import bad_request, not_found

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Valid names of models."""
MAX_CACHED_PROMPTS = 256
"""Number of recent conversations of each model whose tokens are kept."""
MAX_MARK_TOKENS = 64
"""Tokens of a prompt's end that may be the mark of a thought."""


class Engine:
    """A `BatchEngine` in its own thread, over the frozen weights of a model of transformers."""

    def __init__(
        self, module: Any, tokenizer: Any, dtype: torch.dtype, limits: EngineLimits
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = int(module.config.vocab_size)
        self.context_window = int(getattr(module.config, "max_position_embeddings", 1 << 20))
        self.dtype, self.num_parameters = dtype, int(module.num_parameters())
        self.end_ids = find_end_ids(module.generation_config, tokenizer)
        decoder = Decoder(module)
        self._batch = BatchEngine(
            decoder,
            frozen_weights(module, dtype, use_adapter=False, release=True),
            # A tokenizer may be used by one thread at a time.
            copy.deepcopy(tokenizer),
            end_ids=self.end_ids,
            banned_ids=find_banned_ids(tokenizer, self.end_ids, self.vocab_size),
            limits=limits,
        )
        self._new: deque[GenerationRequest] = deque()
        # Guards `_new` and `_closed`; the batch belongs to the engine's thread alone.
        self._changed = threading.Condition()
        self._closed: str | None = None
        self._thread = threading.Thread(target=self._run, name="text engine", daemon=True)
        self._thread.start()

    # ---- called from any thread

    def submit(self, request: GenerationRequest) -> None:
        with self._changed:
            if self._closed is None:
                self._new.append(request)
                self._changed.notify()
                return
        # Reported outside the lock, which the listener may need for its next request.
        failures = [
            failed_progress(request, index, self._closed) for index in range(request.num_samples)
        ]
        self._report(failures)

    def cancel(self, request: GenerationRequest) -> None:
        """Free a request's resources at the next step, without further reports."""
        # A flag that the engine's thread reads between steps, so no lock is needed.
        request.is_cancelled = True

    @property
    def grammars(self) -> Grammars:
        """Return the grammars of its vocabulary; raises as `Grammars`."""
        return self._batch.grammars

    @cached_property
    def message_format(self) -> MessageFormat:
        """Return the format of its messages."""
        return detect_format(self.tokenizer)

    def begins_in_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether the answer to a prompt begins within a thought."""
        if self.message_format.thought is None:
            return False
        last_ids = list(prompt[-MAX_MARK_TOKENS:])
        end = self.tokenizer.decode(last_ids, skip_special_tokens=False)
        return self.message_format.begins_in_thought(end)

    @cached_property
    def cached_prompt(self) -> Callable[[str], tuple[int, ...]]:
        """Return `encode_chat` with a cache: samplers send the same conversation many times."""
        return lru_cache(MAX_CACHED_PROMPTS)(partial(encode_chat, self.tokenizer))

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not started."""
        return len(self._new) + len(self._batch.waiting)

    def close(self, reason: str = "the service is shutting down") -> None:
        """End the thread; unfinished answers fail with the reason."""
        with self._changed:
            self._closed = reason
            self._changed.notify()
        self._thread.join()

    # ---- the engine's thread

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    while not (self._new or self._batch.is_busy or self._closed):
                        self._changed.wait()
                    self._batch.waiting.extend(self._new)
                    self._new.clear()
                    if self._closed is not None:
                        break
                # A step is long: it runs without the lock, so that requests can be submitted.
                try:
                    self._report(self._batch.step())
                except Exception as error:
                    # Only the requests of this batch fail, whatever the error.
                    is_known = isinstance(error, NipAstraError)
                    level = logging.WARNING if is_known else logging.ERROR
                    logger.log(level, "the batch failed: %s", error, exc_info=not is_known)
                    self._report(self._batch.fail(str(error) or type(error).__name__))
            self._report(self._batch.fail(self._closed, also_waiting=True))

    @staticmethod
    def _report(progress: Sequence[Progress]) -> None:
        # One call per listener and step: each call wakes an event loop, which is slow.
        by_listener: dict[Listener, list[Progress]] = {}
        for answer in progress:
            if answer.request.listener is not None and not answer.request.is_cancelled:
                by_listener.setdefault(answer.request.listener, []).append(answer)
        for listener, answers in by_listener.items():
            try:
                listener(answers)
            except RuntimeError:
                logger.debug("the listener's event loop is closed", exc_info=True)


@dataclass(frozen=True)
class ServedModel:
    """A model under its name; a job's model has a `base`, and an adapter in `folder`."""

    name: str
    engine: Engine
    source: str
    adapter: Adapter | None = None
    base: str | None = None
    folder: Path | None = None
    """Folder of its weights or adapter, if a job trained it."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "nip_astra" if self.base is None else "user",
            # As in vLLM, so that clients refuse prompts that do not fit.
            "max_model_len": self.engine.context_window,
        }


class ServedModels:
    """Loads models, each set of weights once.

    Parameters
    ----------
    conversions : Path, optional
        Folder in which converted GGUF files are kept; without one they are converted each time.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: str = "float32",
        limits: EngineLimits,
        conversions: Path | None = None,
    ) -> None:
        self.conversions = conversions
        self.device, self.dtype, self.limits = device, dtype, limits
        self._models: dict[str, ServedModel] = {}
        self._engines: dict[str, Engine] = {}
        self._lock = threading.Lock()

    def add_all(self, models: Mapping[str, str]) -> None:
        """Load models by name; raise `ConfigurationError` for an invalid name."""
        for name, path in models.items():
            if not NAME.fullmatch(name):
                raise ConfigurationError(
                    f"invalid name {name!r} of a model. Use at most 100 letters, digits, dots, "
                    "dashes and underscores: --model NAME=PATH."
                )
            self.add(name, path)

    def add(self, name: str, path: str, *, base: str | None = None) -> ServedModel:
        path = find_model(path)
        with self._lock:
            if path not in self._engines:
                self._engines[path] = load_engine(
                    loadable_path(path, self.conversions),
                    device=self.device,
                    dtype=self.dtype,
                    limits=self.limits,
                )
            folder = None if base is None else Path(path)
            served = ServedModel(name, self._engines[path], path, base=base, folder=folder)
            self._models[name] = served
            return served

    def add_adapter(self, name: str, base: str, folder: Path) -> ServedModel:
        """Serve an adapter on the weights of another model."""
        base_model = self.get(base)
        adapter = read_adapter(folder, base_model.engine.dtype, self.device)
        with self._lock:
            served = ServedModel(name, base_model.engine, base_model.source, adapter, base, folder)
            self._models[name] = served
            return served

    def get(self, name: str) -> ServedModel:
        served = self._models.get(name)
        if served is None:
            raise not_found("model", name, "model")
        return served

    def remove(self, served: ServedModel) -> None:
        """Stop serving a model; its unfinished answers fail if it has its own weights."""
        with self._lock:
            self._models.pop(served.name, None)
            engines_in_use = [model.engine for model in self._models.values()]
            engine = None
            if served.engine not in engines_in_use:
                engine = self._engines.pop(served.source, None)
        # It waits for the engine's thread: other models are added meanwhile.
        if engine is not None:
            engine.close("the model was deleted")

    def all(self) -> list[ServedModel]:
        return list(self._models.values())

    def close(self) -> None:
        with self._lock:
            engines = list(self._engines.values())
            self._engines = {}
            self._models = {}
        for engine in engines:
            engine.close()


def load_engine(
    path: str, *, device: torch.device, dtype: str = "float32", limits: EngineLimits
) -> Engine:
    """Load a model and start its engine; raise `ModelLoadError` for an unsupported architecture."""
    module = load_model(path, None, None).to(device)
    reason = why_unsupported(module)
    if reason is not None:
        raise ModelLoadError(
            f"cannot serve the model {path!r}: {reason}. Serve one of: {', '.join(FAMILY)}."
        )
    precision = computing_dtype(module, dtype, device, trainable=False)
    round_weights(module, precision)
    return Engine(module, find_tokenizer(path, None, None), precision, limits)


def encode_chat(tokenizer: Any, conversation: str) -> tuple[int, ...]:
    """Return the tokens before the assistant's next message, by the tokenizer's template.

    Parameters
    ----------
    conversation : str
        Messages and tools as JSON: one hashable value, by which prompts are cached.

    Raises
    ------
    ApiError
        400 without a chat template, and for a conversation that the template refuses.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise bad_request(
            "this model's tokenizer has no chat template. Use /v1/completions, or serve a chat "
            "model.",
            "messages",
            "no_chat_template",
        )
    messages, tools = json.loads(conversation)
    try:
        text = render_chat(tokenizer, messages, opens_answer=True, tools=tools)
    except ModelLoadError as error:
        raise bad_request(str(error), "messages", "refused_by_template") from error
    # The template writes the special tokens itself.
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def loadable_path(source: str, conversions: Path | None) -> str:
    """Return the path to load a model from: for a GGUF file that of its conversion."""
    if conversions is None or not source.endswith(".gguf"):
        return source
    return str(converted_gguf(Path(source), conversions))


def find_model(path: str) -> str:
    """Return the absolute path of a folder, `.gguf` file, `scenario://name/folder`, or a hub id."""
    reference = resolve_reference(path)
    # A relative path that does not exist may be the id of a model on the hub.
    if isinstance(reference, Path) and (reference.exists() or reference.is_absolute()):
        return str(reference.resolve())
    return path
