"""One set of weights that answers requests of many threads, and its clients in an event loop."""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from nip_astra.errors import NipAstraError
from nip_astra.language_models.batch_engine import BatchEngine, EngineLimits, failed_progress
from nip_astra.language_models.sampling import find_banned_ids, find_end_ids
from nip_astra.language_models.sequences import GenerationRequest, Listener, Progress
from nip_astra.language_models.tree_engine.decoder import Decoder
from nip_astra.language_models.tree_engine.weights import Weights

logger = logging.getLogger(__name__)

_CLOSED = "the service is shutting down"


class Engine:
    """A `BatchEngine` in a thread of its own.

    Parameters
    ----------
    weights : Weights
        Must not change.
    generation_config
        Names the tokens that end a turn, in addition to the tokenizer's.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        tokenizer: Any,
        generation_config: Any,
        *,
        vocab_size: int,
        context_window: int,
        num_parameters: int,
        limits: EngineLimits,
    ) -> None:
        self.tokenizer = tokenizer
        self.context_window, self.vocab_size = context_window, vocab_size
        self.dtype, self.num_parameters = weights.dtype, num_parameters
        self.end_ids = find_end_ids(generation_config, tokenizer)
        self._batch = BatchEngine(
            decoder,
            weights,
            # A tokenizer may be used by one thread at a time.
            copy.deepcopy(tokenizer),
            end_ids=self.end_ids,
            banned_ids=find_banned_ids(tokenizer, self.end_ids, vocab_size),
            limits=limits,
        )
        self._new: deque[GenerationRequest] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="text engine", daemon=True)
        self._thread.start()

    # ---- called from any thread

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        with self._changed:
            if not self._is_closed:
                self._new.append(request)
                self._changed.notify()
                return
        self._report(
            [failed_progress(request, index, _CLOSED) for index in range(request.num_samples)]
        )

    def cancel(self, request: GenerationRequest) -> None:
        """Free what a request holds, at the next step; nothing more is reported of it."""
        with self._changed:
            request.is_cancelled = True
            self._changed.notify()

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return len(self._new) + len(self._batch.waiting)

    @property
    def num_rows(self) -> int:
        """Answers that are being generated."""
        return len(self._batch.rows)

    def answer(self, **options: Any) -> list[Progress]:
        """Answer one request and wait for it: the last progress of each of its answers."""
        finished: dict[int, Progress] = {}
        done: Future[None] = Future()
        count = options.get("num_samples", 1)

        def listen(progress: Sequence[Progress]) -> None:
            finished.update({one.index: one for one in progress if one.finish_reason})
            if len(finished) == count:
                done.set_result(None)

        self.submit(GenerationRequest(listener=listen, **options))
        done.result()
        return [finished[index] for index in range(count)]

    def close(self) -> None:
        """End the thread; unfinished answers fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    # ---- the engine's thread

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    while not (self._new or self._batch.is_busy or self._is_closed):
                        self._changed.wait()
                    self._batch.waiting.extend(self._new)
                    self._new.clear()
                    if self._is_closed:
                        break
                try:
                    for progress in self._batch.step():
                        self._report(progress)
                except Exception as error:
                    # Only the requests of this batch fail, whatever the error.
                    is_known = isinstance(error, NipAstraError)
                    level = logging.WARNING if is_known else logging.ERROR
                    logger.log(level, "the batch failed: %s", error, exc_info=not is_known)
                    self._report(self._batch.fail(str(error) or type(error).__name__))
            self._report(self._batch.fail(_CLOSED, also_waiting=True))

    @staticmethod
    def _report(progress: Sequence[Progress]) -> None:
        groups: dict[Listener, list[Progress]] = {}
        for one in progress:
            if one.request.listener is not None and not one.request.is_cancelled:
                groups.setdefault(one.request.listener, []).append(one)
        for listener, those in groups.items():
            try:
                listener(those)
            except RuntimeError:
                logger.debug("the listener's event loop is closed", exc_info=True)
