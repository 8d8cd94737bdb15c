"""Training at Tinker, or a local server of its protocol, through Tinker's SDK.

Shape suffixes: `B` row, `C` context position, `T` continuation position.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.errors import (
    CheckpointError,
    ConfigurationError,
    ServiceBusyError,
    ServiceConflictError,
    ServiceError,
    ServiceModelError,
    ServiceRequestError,
    ServiceUnreachableError,
)
from nip_astra.language_models.base import (
    Generation,
    LanguageModel,
    SamplingOptions,
)
from nip_astra.language_models.remote import RemoteLanguageModel
from nip_astra.language_models.services.chat import run_sync
from nip_astra.language_models.services.http_client import check_address, read_key
from nip_astra.language_models.services.training import (
    LogprobLeaves,
    Loss,
    OptimizerFigures,
    TrainingService,
    TrainingServiceRequest,
    adapter_config,
    check_step,
    register_training_service,
)
from nip_astra.lazy import import_extra
from nip_astra.parameters.types import TrainingServiceType
from nip_astra.progress import waiting_for
from nip_astra.trust import read_variable

LORA_ALPHA = 32.0
"""LoRA alpha of all adapters in Tinker's protocol."""
ADDRESS = "tinker.json"
"""File with the path of a saved state at the service."""
ADDRESS_VARIABLE = "TINKER_BASE_URL"
"""Environment variable with the SDK's default address."""
SECONDS_BETWEEN_CHECKS = 0.2
SECONDS_OF_A_CHECK = 10.0
SECONDS_TO_FINISH = 2.0
"""Maximum wait for a service to confirm the end of a session."""
ERROR_KINDS: Mapping[str, type[ServiceError]] = {
    "service was restarted": ServiceModelError,
    "one client at a time": ServiceConflictError,
    "higher max_training_models": ServiceBusyError,
}
"""Parts of a local server's messages without an error class in the SDK, and their errors."""
DEFAULT_KEY = "tml-local"
"""Key sent if none is named; a local server without a token needs none."""


@register_training_service(TrainingServiceType.TINKER)
class TinkerTrainingService(TrainingService):
    """Trains an adapter at a service of Tinker's protocol.

    Any loss of log-probabilities works: the service returns them, and receives the gradients as
    weights of its cross-entropy. A checkpoint holds the path of the state there. The service's
    model must have the policy's tokenizer, and gets an adapter of the policy's size.
    """

    def __init__(self, request: TrainingServiceRequest) -> None:
        self._tinker = import_extra("tinker", "Tinker's protocol", "tinker")
        self.policy = request.policy
        self.options = request.parameters
        self.weight_decay = request.training.weight_decay
        self._leaves = LogprobLeaves(self.policy)
        self._sampling: Any = None
        shape = find_adapter_shape(self.policy)
        model = request.remote_model()
        optimizer = request.training.optimizer
        if optimizer != "adamw":
            raise ConfigurationError(
                f"Tinker's protocol has no optimizer {optimizer!r}. Set training.optimizer to "
                "adamw."
            )
        # The SDK sends no usage data, unless the user wants it to.
        os.environ.setdefault("TINKER_TELEMETRY", "0")
        self._key = read_key(self.options.token_variable, "train_service.token_variable")
        if self._key is None and not read_variable("TINKER_API_KEY"):
            self._key = DEFAULT_KEY
        self._await_service()
        self._open_session()
        # The protocol takes integers of 64 bits, with a sign.
        seed = request.seed % (1 << 62)
        self._training = self._await(
            lambda: self._client.create_lora_training_client(model, seed=seed, **shape)
        )

    @classmethod
    def open(cls, request: TrainingServiceRequest) -> TinkerTrainingService:
        return cls(request)

    def _open_session(self) -> None:
        self._client = self._call(
            lambda: self._tinker.ServiceClient(base_url=self.options.base_url, api_key=self._key)
        )
        # However a run ends, its model is deleted.
        self._finish = weakref.finalize(self, _finish, self._client)

    # ---- training

    def forward_backward(self, batches: Sequence[TensorDict], loss: Loss) -> dict[str, float]:
        data: list[Any] = []

        def send(rows: tuple[Tensor, ...], gradient_BT: Tensor) -> None:
            # The service adds the gradient of -weights * logprobs.
            data.extend(self._make_data(rows, -gradient_BT))

        figures = self._leaves.mean_loss(batches, loss, send)
        self._await(lambda: self._training.forward_backward(data, "cross_entropy"))
        return figures

    def optim_step(self, *, lr: float, max_grad_norm: float | None = None) -> OptimizerFigures:
        check_step(lr, max_grad_norm)
        # The others are torch's defaults, as in the local service.
        params = self._tinker.AdamParams(
            learning_rate=lr,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=self.weight_decay,
            grad_clip_norm=max_grad_norm or 0.0,
        )
        # It samples from the weights before the step.
        self._sampling = None
        try:
            output = self._await(lambda: self._training.optim_step(params))
        except ServiceRequestError as error:
            # A local server refuses such a step; the protocol has no field for it.
            if "not finite" in str(error):
                return OptimizerFigures(float("nan"), was_taken=False)
            raise
        metrics = output.metrics or {}
        # Tinker's own service does not report it.
        grad_norm = metrics.get("grad_norm:mean", float("nan"))
        return OptimizerFigures(grad_norm, was_taken=True)

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        ids_BT = ids_BT.cpu()
        mask_BT = mask_BT.cpu()
        rows = (context_BC.cpu(), context_mask_BC.cpu(), ids_BT, mask_BT)
        logprobs_BT = torch.zeros(ids_BT.shape)
        if bool(mask_BT.any()):
            no_weights_BT = torch.zeros(ids_BT.shape)
            data = self._make_data(rows, no_weights_BT)
            output = self._await(lambda: self._training.forward(data, "cross_entropy"))
            # Rows without tokens are not sent.
            sent_rows = mask_BT.any(dim=1).nonzero().squeeze(1).tolist()
            for row, datum_output in zip(sent_rows, output.loss_fn_outputs, strict=True):
                length = int(mask_BT[row].sum())
                # The first ones are those of the context.
                logprobs_T = datum_output["logprobs"].to_torch().float()[-length:]
                logprobs_BT[row, :length] = logprobs_T
        return self._leaves.leaf(rows, logprobs_BT)

    def _make_data(self, rows: tuple[Tensor, ...], weights_BT: Tensor) -> list[Any]:
        """Convert rows with tokens to score to the SDK's format."""
        data = []
        for context_C, context_mask_C, ids_T, mask_T, weights_T in zip(
            *rows, weights_BT, strict=True
        ):
            answer = ids_T[mask_T]
            if len(answer) == 0:
                continue
            tokens = torch.cat([context_C[context_mask_C], answer])
            # The context is read only: weight 0.
            context_weights = torch.zeros(len(tokens) - 1 - len(answer))
            inputs = {
                "target_tokens": tokens[1:],
                "weights": torch.cat([context_weights, weights_T[mask_T].float()]),
            }
            model_input = self._tinker.ModelInput.from_ints(tokens[:-1].tolist())
            data.append(self._tinker.Datum(model_input=model_input, loss_fn_inputs=inputs))
        return data

    # ---- sampling

    def sample(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        if options.min_new_tokens:
            raise ConfigurationError(
                f"Tinker's protocol does not support min_new_tokens={options.min_new_tokens}. Set "
                "it to 0 for the policy."
            )
        if self._sampling is None:
            self._sampling = self._await(self._training.save_weights_and_get_sampling_client)
        end_ids = sorted({*self.policy.end_ids, *options.end_ids})
        # All requests first, so that the service answers them in one batch.
        futures = []
        for number, context in enumerate(contexts):
            uniforms_T = uniforms_BT[number * rows_per_context].double()
            # The protocol takes a seed per request. The mean of several uniform numbers has more
            # bits than one, so that seeds rarely coincide.
            seed = int((uniforms_T[:4].sum() / 4) * (1 << 53)) % (1 << 53)
            params = self._tinker.SamplingParams(
                max_tokens=options.max_new_tokens,
                seed=seed,
                stop=end_ids,
                temperature=options.temperature,
                top_k=-1 if options.top_k is None else options.top_k,
                top_p=options.top_p,
            )
            prompt = self._tinker.ModelInput.from_ints(list(context))
            futures.append(self._call(self._sampling.sample, prompt, rows_per_context, params))
        sequences: list[Any] = []
        for future in futures:
            sequences += self._result(future).sequences
        return self._make_generation(sequences, options.max_new_tokens)

    def _make_generation(self, sequences: Sequence[Any], width: int) -> Generation:
        """Return the SDK's sequences as tensors of `width` positions."""
        ids = [torch.tensor(list(sequence.tokens), dtype=torch.long) for sequence in sequences]
        logprobs = [
            torch.tensor(list(sequence.logprobs), dtype=torch.float32) for sequence in sequences
        ]
        lengths = torch.tensor([len(row) for row in ids])
        self.policy.token_count.generated += int(lengths.sum())

        def pad(rows: list[Tensor]) -> Tensor:
            rows_BT = pad_sequence(rows, batch_first=True)
            return torch.nn.functional.pad(rows_BT, (0, width - rows_BT.shape[1]))

        mask_BT = torch.arange(width) < lengths[:, None]
        return Generation(pad(ids), mask_BT, pad(logprobs))

    # ---- saving

    def save_state(self, directory: Path) -> None:
        saved = self._await(lambda: self._training.save_state(uuid.uuid4().hex))
        _write_address(directory, saved.path)

    def load_state(self, directory: Path) -> None:
        path = _read_address(directory)
        # The model of the ended session makes room for the new one.
        self._finish()
        self._open_session()
        self._sampling = None
        self._training = self._await(
            lambda: self._client.create_training_client_from_state_with_optimizer(path)
        )

    def save_weights_for_sampler(self, directory: Path) -> None:
        """Write the tokenizer and the path of the adapter: the service returns no weights."""
        saved = self._await(lambda: self._training.save_weights_for_sampler(uuid.uuid4().hex))
        _write_address(directory, saved.path)
        self.policy.tokenizer.save_pretrained(directory)

    def close(self) -> None:
        self._finish()

    # ---- requests

    def _await(self, request: Callable[[], Any]) -> Any:
        return self._result(self._call(request))

    def _result(self, future: Any) -> Any:
        """Return the result of a request, waiting while the service is alive."""
        while True:
            try:
                return self._call(future.result, self.options.retry_timeout_seconds)
            except ServiceUnreachableError as error:
                # A service that answers but has no result yet is at work.
                url = str(self._client.holder._base_url)
                is_timeout = isinstance(error.__cause__, TimeoutError)
                if not is_timeout or _check_health(url) is not None:
                    raise

    def _await_service(self) -> None:
        """Wait at most `retry_timeout_seconds` for the service; the SDK would retry for minutes."""
        url = self.options.base_url or read_variable(ADDRESS_VARIABLE)
        if not url:
            # Tinker's own service.
            return
        check_address(url, "the training service")
        deadline = time.monotonic() + self.options.retry_timeout_seconds
        with waiting_for(f"the training service {url}, which does not answer"):
            while True:
                fault = _check_health(url)
                if fault is None:
                    return
                if time.monotonic() + SECONDS_BETWEEN_CHECKS > deadline:
                    raise ServiceUnreachableError(
                        f"the training service {url} does not answer: {fault} (tried for "
                        f"{self.options.retry_timeout_seconds:.3g} s). Start it, or correct "
                        "train_service.base_url."
                    )
                time.sleep(SECONDS_BETWEEN_CHECKS)

    def _call(self, request: Callable[..., Any], *arguments: Any) -> Any:
        """Call the SDK, and convert its errors to ours."""
        sdk = self._tinker
        try:
            return request(*arguments)
        except (TimeoutError, sdk.APIConnectionError) as error:
            raise ServiceUnreachableError(
                f"the service {self.options.base_url or 'of Tinker'} does not answer: "
                f"{str(error) or type(error).__name__}. Start it again, and continue from the last "
                "checkpoint with: nip-astra resume RUN."
            ) from error
        except sdk.TinkerError as error:
            error_class = self._find_error_class(error)
            raise error_class(f"the service refused a request: {error}") from error
        except (ValueError, RuntimeError) as error:
            raise ServiceError(f"Tinker's SDK abandoned a request: {error}") from error

    def _find_error_class(self, error: Exception) -> type[ServiceError]:
        sdk = self._tinker
        for text, error_class in ERROR_KINDS.items():
            if text in str(error):
                return error_class
        if isinstance(error, sdk.NotFoundError):
            return ServiceModelError
        if isinstance(error, sdk.RateLimitError):
            return ServiceBusyError
        if isinstance(error, sdk.RequestFailedError | sdk.BadRequestError):
            return ServiceRequestError
        return ServiceError


PARTS = ("train_attn", "train_mlp", "train_unembed")
"""Parts of a model that Tinker's protocol adapts as a whole, by the names of its fields."""


def find_part(name: str, layer: torch.nn.Module, head: torch.nn.Module | None) -> str:
    """Return the part, of `PARTS`, to which a linear layer belongs."""
    if layer is head:
        return "train_unembed"
    # transformers' models call them self_attn, attn or attention.
    is_attention = "attn" in name or "attention" in name
    return "train_attn" if is_attention else "train_mlp"


def find_adapter_shape(policy: LanguageModel) -> dict[str, Any]:
    """Return size and target layers of a policy's adapter, in the terms of Tinker's protocol."""
    if isinstance(policy, RemoteLanguageModel):
        return _find_remote_shape(policy)
    config = adapter_config(policy)
    _check_alpha(None if config is None else config.lora_alpha)
    module: Any = getattr(policy, "module", None)
    model = module.get_base_model()
    head = model.get_output_embeddings()
    is_adapted_by_part: dict[str, set[bool]] = {part: set() for part in PARTS}
    for name, layer in model.named_modules():
        is_adapted = hasattr(layer, "lora_A")
        is_linear = is_adapted or isinstance(layer, torch.nn.Linear)
        # PEFT wraps a layer, and holds it and the adapter's own linear layers within.
        is_within_adapted = "lora_" in name or name.endswith("base_layer")
        if is_linear and not is_within_adapted:
            is_adapted_by_part[find_part(name, layer, head)].add(is_adapted)
    mixed_parts = [part for part, values in is_adapted_by_part.items() if len(values) > 1]
    if mixed_parts:
        raise ConfigurationError(
            "Tinker's protocol adapts all attention, all MLPs or the head; the adapter covers only "
            f"some layers of {', '.join(mixed_parts)}. Set lora.target_modules to all-linear."
        )
    adapted_parts = {part: True in is_adapted for part, is_adapted in is_adapted_by_part.items()}
    return {"rank": config.r, **adapted_parts}


def _find_remote_shape(policy: RemoteLanguageModel) -> dict[str, Any]:
    lora = policy.lora
    _check_alpha(None if lora is None else lora.alpha)
    assert lora is not None, "it has an alpha"
    if lora.target_modules != "all-linear":
        raise ConfigurationError(
            f"the adapter's layers {lora.target_modules} are unknown here. Set "
            "lora.target_modules to all-linear."
        )
    # PEFT's "all-linear" leaves out the output head.
    return {"rank": lora.rank, "train_attn": True, "train_mlp": True, "train_unembed": False}


def _check_alpha(alpha: float | None) -> None:
    if alpha == LORA_ALPHA:
        return
    actual_alpha = "none" if alpha is None else f"lora.alpha {alpha:g}"
    raise ConfigurationError(
        f"Tinker's protocol trains adapters of lora.alpha {LORA_ALPHA:g}; the policy has "
        f"{actual_alpha}. Set its language_model.lora to {{rank: 32, alpha: {LORA_ALPHA:g}}}."
    )


def _check_health(url: str) -> str | None:
    """Return why a service does not answer; None if it does."""
    import httpx

    async def request_status() -> int:
        async with (
            # httpx's time limit is for each read, and a service may send a byte now and then.
            asyncio.timeout(SECONDS_OF_A_CHECK),
            httpx.AsyncClient() as client,
            client.stream("GET", f"{url.rstrip('/')}/api/v1/healthz") as response,
        ):
            return response.status_code

    try:
        status = run_sync(request_status())
    except TimeoutError:
        return f"no answer in {SECONDS_OF_A_CHECK:g} s"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return f"status {status}" if status >= 500 else None


def _finish(client: Any) -> None:
    """End a client's session, and its reporting thread."""
    # Whatever fails here, the run has ended.
    with suppress(Exception):
        closing = client.close("success").future()
        wait([closing], SECONDS_TO_FINISH)
        # The SDK would repeat requests to a dead service for minutes.
        closing.cancel()


def _write_address(directory: Path, path: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ADDRESS).write_text(json.dumps({"path": path}), encoding="utf-8")


def _read_address(directory: Path) -> str:
    try:
        return str(json.loads((directory / ADDRESS).read_text(encoding="utf-8"))["path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory / ADDRESS} does not name a state of Tinker's protocol: {error}. Resume "
            "with the service that wrote it."
        ) from error
