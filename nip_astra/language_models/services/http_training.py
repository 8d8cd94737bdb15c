"""A training service of ours in another process or on another machine.

Shape suffixes: `B` row, `C` context position, `T` continuation position.
"""

from __future__ import annotations

import tempfile
import threading
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.errors import CheckpointError
from nip_astra.language_models.base import (
    Generation,
    LanguageModel,
    SamplingOptions,
    TokenCount,
)
from nip_astra.language_models.services.adapter_shapes import plain_adapter
from nip_astra.language_models.services.handed_out import HandedOut, mean_loss
from nip_astra.language_models.services.training import Loss, OptimizerFigures, TrainingService
from nip_astra.language_models.services.training_connection import TrainingConnection
from nip_astra.language_models.services.training_wire import (
    ROUTE,
    pack_folder,
    unpack_folder,
    vocabulary_digest,
    weights_digest,
)

SECONDS_BETWEEN_REPORTS = 20.0
"""By which a service knows a client that computes by itself from one that is dead."""


@dataclass(frozen=True)
class HttpTrainingOptions:
    """What a service is to train, and how.

    Attributes
    ----------
    model : str
        Name of the model at the service.
    optimizer, weight_decay
        As in `TrainingConfiguration`.
    seed : int
        Of an adapter's first weights, where the policy brings none.
    """

    model: str
    optimizer: str
    weight_decay: float
    seed: int
    role: str = "policy"


class HttpTrainingService(TrainingService):
    """Trains at a service that `nip-astra serve --train` runs.

    Log-probabilities come from the service, and the gradients of the loss by them go back. Numbers
    are those of `LocalTrainingService`, and so is what `save_state` writes.

    Parameters
    ----------
    policy : LanguageModel
        Whose tokenizer and adapter the service's model must have. A loss must not differentiate it.

    Raises
    ------
    ServiceModelError
        When the service has no such model.
    ServiceRequestError
        When its model is another one.
    """

    def __init__(
        self, policy: LanguageModel, connection: TrainingConnection, options: HttpTrainingOptions
    ) -> None:
        self.policy, self.connection, self.options = policy, connection, options
        self._handed_out = HandedOut(policy)
        self._number = 0
        self._client = uuid.uuid4().hex
        module = getattr(policy, "module", None)
        lora = plain_adapter(policy)
        body = {
            "base_model": options.model,
            "lora": lora,
            "seed": options.seed,
            "optimizer": options.optimizer,
            "weight_decay": options.weight_decay,
            "role": options.role,
            "vocabulary": vocabulary_digest(policy.tokenizer),
            "weights": None if module is None else weights_digest(module),
        }
        made = connection.post_json(ROUTE, body, key=f"{self._client}:model")
        if not isinstance(made.get("id"), str):
            raise connection.misunderstood("it names no model")
        self.model_id = made["id"]
        # A run that ends, however it ends, leaves nothing behind at the service.
        path = f"{ROUTE}/{self.model_id}"
        ended = threading.Event()
        self._forget = weakref.finalize(self, _leave, connection, path, ended)
        threading.Thread(
            target=_report, args=(connection, path, ended), name="training report", daemon=True
        ).start()
        if module is not None and lora is not None:
            with tempfile.TemporaryDirectory() as folder:
                policy.save(Path(folder))
                self._do("load_weights", files=pack_folder(Path(folder)))

    def forward_backward(self, batches: Sequence[TensorDict], loss: Loss) -> dict[str, float]:
        pieces: list[dict[str, Any]] = []

        def send(asked: tuple[Tensor, ...], gradient_BT: Tensor) -> None:
            pieces.append({"rows": asked, "gradient": gradient_BT})

        found = mean_loss(batches, loss, self._handed_out, send)
        self._do("backward", pieces=pieces)
        return found

    def optim_step(self, *, lr: float, max_grad_norm: float | None = None) -> OptimizerFigures:
        found = self._do("optim_step", lr=lr, max_grad_norm=max_grad_norm)
        grad_norm, was_taken = found.get("grad_norm"), found.get("was_taken")
        if not isinstance(grad_norm, int | float) or not isinstance(was_taken, bool):
            raise self.connection.misunderstood("it lacks grad_norm or was_taken")
        return OptimizerFigures(grad_norm, was_taken=was_taken)

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        asked = tuple(one.cpu() for one in (context_BC, context_mask_BC, ids_BT, mask_BT))
        (found_BT,) = self._tensors("logprobs", self._do("logprobs", rows=asked))
        if found_BT.shape != ids_BT.shape:
            raise self.connection.misunderstood(
                f"its logprobs have the shape {tuple(found_BT.shape)}, not {tuple(ids_BT.shape)}"
            )
        return self._handed_out.leaf(asked, found_BT)

    def sample(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        found = self._do(
            "sample",
            contexts=[list(context) for context in contexts],
            rows_per_context=rows_per_context,
            uniforms=uniforms_BT,
            options=asdict(options),
        )
        ids_BT, mask_BT, logprobs_BT = self._tensors("ids mask logprobs", found)
        shapes = {one.shape for one in (ids_BT, mask_BT, logprobs_BT)}
        if len(shapes) > 1 or ids_BT.shape[:1] != (len(contexts) * rows_per_context,):
            raise self.connection.misunderstood(f"its answers have the shapes {sorted(shapes)}")
        return Generation(ids_BT, mask_BT, logprobs_BT)

    def save_state(self, directory: Path) -> None:
        self._write_files("save_state", directory)

    def load_state(self, directory: Path) -> None:
        self._do("load_state", files=pack_folder(directory))

    def save_weights_for_sampler(self, directory: Path) -> None:
        self._write_files("save_weights_for_sampler", directory)

    def close(self) -> None:
        """Let the service forget the model; this happens by itself when the run ends."""
        self._forget()

    def _do(self, kind: str, **arguments: Any) -> dict[str, Any]:
        """Have an operation carried out once, however often it must be asked for."""
        number = self._number + 1
        message = pack_state({"kind": kind, **arguments})
        path = f"{ROUTE}/{self.model_id}/operations/{number}"
        answer = self.connection.operate(path, message, key=f"{self._client}:{number}")
        # One that was refused had its turn as well.
        self._number = number
        content = answer.result()
        try:
            result: dict[str, Any] = unpack_state(content)
            self.policy.token_count.add(TokenCount(**result.pop("tokens", {})))
        except (CheckpointError, AttributeError, TypeError) as error:
            raise self.connection.misunderstood(f"{len(content)} bytes, {error}") from error
        return result

    def _tensors(self, names: str, found: Mapping[str, Any]) -> list[Tensor]:
        tensors = [found.get(name) for name in names.split()]
        if not all(isinstance(one, Tensor) for one in tensors):
            raise self.connection.misunderstood(f"it lacks one of the tensors {names}")
        return [one for one in tensors if one is not None]

    def _write_files(self, kind: str, directory: Path) -> None:
        files = self._do(kind).get("files")
        if not isinstance(files, dict):
            raise self.connection.misunderstood("it has no files")
        unpack_folder(files, directory)


def _report(connection: TrainingConnection, path: str, ended: threading.Event) -> None:
    connection.report(path)
    while not ended.wait(SECONDS_BETWEEN_REPORTS):
        connection.report(path)


def _leave(connection: TrainingConnection, path: str, ended: threading.Event) -> None:
    ended.set()
    connection.forget(path)
