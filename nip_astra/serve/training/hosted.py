"""A model that a service trains for a client, and what can be asked of it.

Shape suffixes: `B` row, `C` context position, `T` continuation position.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nip_astra.errors import NipAstraError
from nip_astra.language_models.base import SamplingOptions, TokenCount
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.language_models.services.training_wire import pack_folder, unpack_folder
from nip_astra.serve.api_errors import wrong
from nip_astra.serve.training.bases import Base

MAX_WEIGHT_DECAY = 100.0
Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""`(context_BC, context_mask_BC, ids_BT, mask_BT)`, as `LanguageModel.logprobs` takes them."""


@dataclass
class HostedModel:
    """A model in training.

    Attributes
    ----------
    key : str
        Of the request that made it.
    """

    name: str
    base: Base
    service: LocalTrainingService
    key: str = ""

    @property
    def policy(self) -> HuggingFaceLanguageModel:
        """What learns."""
        policy = self.service.model
        assert isinstance(policy, HuggingFaceLanguageModel)
        return policy

    def do(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an operation, and count the tokens that it took.

        Raises
        ------
        ApiError
            When it is none, or is refused.
        """
        operations: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "logprobs": self._logprobs,
            "backward": self._backward,
            "optim_step": self._optim_step,
            "sample": self._sample,
            "save_state": self._save_state,
            "load_state": self._load_state,
            "load_weights": self._load_weights,
            "save_weights_for_sampler": self._save_weights_for_sampler,
        }
        kind = str(message.get("kind"))
        if kind not in operations:
            raise wrong(
                f"the operation {kind[:100]!r} was asked for, but a model knows "
                f"{', '.join(operations)}. Use a client of this version."
            )
        with self.policy.counting() as spent:
            try:
                result = operations[kind](message)
            except NipAstraError:
                raise
            except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
                raise wrong(
                    f"the operation {kind} was asked for with what it cannot take: "
                    f"{type(error).__name__}: {str(error)[:300]}. Use a client of this version."
                ) from error
        return {**result, "tokens": _counted(spent)}

    # ---- operations

    def _logprobs(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"logprobs": self.service.compute_logprobs(*self._rows(message["rows"]))}

    def _backward(self, message: Mapping[str, Any]) -> dict[str, Any]:
        pieces = [(self._rows(piece["rows"]), piece["gradient"]) for piece in message["pieces"]]
        for rows, gradient_BT in pieces:
            if gradient_BT.shape != rows[2].shape:
                raise wrong(
                    f"gradients of the shape {list(gradient_BT.shape)} were sent for tokens of the "
                    f"shape {list(rows[2].shape)}. Send one a token."
                )
        with self.gradients_or_none():
            for rows, gradient_BT in pieces:
                logprobs_BT = self.service.logprobs(*rows)
                (logprobs_BT * gradient_BT.to(logprobs_BT)).sum().backward()  # type: ignore[no-untyped-call]
        return {}

    def _optim_step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        bound = message["max_grad_norm"]
        figures = self.service.optim_step(
            lr=float(message["lr"]), max_grad_norm=None if bound is None else float(bound)
        )
        return asdict(figures)

    def _sample(self, message: Mapping[str, Any]) -> dict[str, Any]:
        given = message["options"]
        if not isinstance(given, dict) or any(isinstance(one, Tensor) for one in given.values()):
            raise wrong("sampling options are no dictionary of numbers. Send one.")
        end_ids = tuple(operator.index(token) for token in given.get("end_ids", ()))
        options = SamplingOptions(**{**given, "end_ids": end_ids})
        contexts = [[operator.index(token) for token in one] for one in message["contexts"]]
        uniforms_BT = message["uniforms"]
        count = int(message["rows_per_context"])
        is_uniform = (
            uniforms_BT.is_floating_point() and ((uniforms_BT >= 0) & (uniforms_BT <= 1)).all()
        )
        if not contexts or count < 1 or not is_uniform:
            raise wrong(
                f"{count} answers to {len(contexts)} contexts were asked for. Send at least one "
                "context, rows_per_context from 1, and random numbers from 0 to 1."
            )
        if list(uniforms_BT.shape) != [len(contexts) * count, options.max_new_tokens]:
            raise wrong(
                f"{len(contexts) * count} answers of {options.max_new_tokens} tokens were to be "
                f"drawn with random numbers of the shape {list(uniforms_BT.shape)}. Send one a "
                "token."
            )
        for context in contexts:
            self.check_ids(torch.tensor(context), len(context) + options.max_new_tokens)
        found = self.service.sample(contexts, count, uniforms_BT, options)
        return {"ids": found.ids_BT, "mask": found.mask_BT, "logprobs": found.logprobs_BT}

    def _save_state(self, message: Mapping[str, Any]) -> dict[str, Any]:
        with _folder() as folder:
            self.service.save_state(folder)
            return {"files": pack_folder(folder)}

    def _load_state(self, message: Mapping[str, Any]) -> dict[str, Any]:
        with _folder() as folder:
            unpack_folder(message["files"], folder)
            self.service.load_state(folder)
        self.service.optimizer.zero_grad(set_to_none=True)
        return {}

    def _load_weights(self, message: Mapping[str, Any]) -> dict[str, Any]:
        with _folder() as folder:
            unpack_folder(message["files"], folder)
            self.policy.restore(folder)
        return {}

    def _save_weights_for_sampler(self, message: Mapping[str, Any]) -> dict[str, Any]:
        with _folder() as folder:
            self.service.save_weights_for_sampler(folder)
            return {"files": pack_folder(folder)}

    # ---- checks

    @contextmanager
    def gradients_or_none(self) -> Iterator[None]:
        """A block that adds its gradients as a whole; where it fails they are as before."""
        before = [one.grad.clone() if one.grad is not None else None for one in self.learned]
        try:
            yield
        except BaseException:
            for one, gradient in zip(self.learned, before, strict=True):
                one.grad = gradient
            raise

    @property
    def learned(self) -> list[torch.nn.Parameter]:
        """What gradients are taken of."""
        return self.service.learned

    def check_ids(self, ids: Tensor, length: int) -> None:
        """Refuse tokens that the model has not, and more than its window holds."""
        if ids.numel() == 0:
            raise wrong("tokens were to be read, but there are none. Send at least one.")
        if ids.dtype != torch.int64:
            raise wrong(f"tokens were sent as {ids.dtype}. Send them as int64.")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.base.vocab_size:
            raise wrong(
                f"the token {low if low < 0 else high} was to be read, but the model "
                f"{self.base.name!r} has those from 0 to {self.base.vocab_size - 1}. Encode texts "
                "by its tokenizer."
            )
        if length > self.policy.context_window:
            raise wrong(
                f"{length} tokens were to be read, but the window of the model {self.base.name!r} "
                f"is {self.policy.context_window}. Send shorter texts."
            )

    def _rows(self, rows: Any) -> Rows:
        context_BC, context_mask_BC, ids_BT, mask_BT = rows
        masks = context_mask_BC, mask_BT
        is_right = all(mask.dtype == torch.bool and mask.ndim == 2 for mask in masks) and (
            context_BC.shape == context_mask_BC.shape
            and ids_BT.shape == mask_BT.shape
            and len(context_BC) == len(ids_BT)
        )
        if not is_right:
            raise wrong(
                "rows to score were sent whose parts do not fit each other. Send contexts and "
                "continuations of as many rows, each with a boolean mask of its shape."
            )
        length = context_mask_BC.sum(dim=1) + mask_BT.sum(dim=1)
        for ids in (context_BC, ids_BT):
            self.check_ids(ids, int(length.max()))
        return context_BC, context_mask_BC, ids_BT, mask_BT


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nip-astra-state-") as folder:
        yield Path(folder)


def _counted(spent: TokenCount) -> dict[str, int]:
    return {name: value for name, value in asdict(spent).items() if value}
