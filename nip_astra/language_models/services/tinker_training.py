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
        policy, options, optimizer = request.policy, request.parameters, request.training.optimizer
        self.policy, self.options = policy, options
        self.weight_decay = request.training.weight_decay
        self._leaves = LogprobLeaves(policy)
        self._sampling: Any = None
        shape = tinker_shape(policy)
        model = request.remote_model()
        if optimizer != "adamw":
            raise ConfigurationError(
                f"Tinker's protocol has no optimizer {optimizer!r}. Set training.optimizer to "
                "adamw."
            )
        os.environ.setdefault("TINKER_TELEMETRY", "0")
        key = read_key(options.token_variable, "train_service.token_variable")
        if key is None and not read_variable("TINKER_API_KEY"):
            key = DEFAULT_KEY
        self._await_service()
        self._key = key
        self._open_session()
        self._training = self._await(
            lambda: self._client.create_lora_training_client(
                model, seed=request.seed % (1 << 62), **shape
            )
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
            data.extend(self._data(rows, -gradient_BT))

        found = self._leaves.mean_loss(batches, loss, send)
        self._await(lambda: self._training.forward_backward(data, "cross_entropy"))
        return found

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
        self._sampling = None
        try:
            found = self._await(lambda: self._training.optim_step(params))
        except ServiceRequestError as error:
            if "not finite" in str(error):
                return OptimizerFigures(float("nan"), was_taken=False)
            raise
        metrics = found.metrics or {}
        # Tinker's own service does not report it.
        return OptimizerFigures(metrics.get("grad_norm:mean", float("nan")), was_taken=True)

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        rows = (context_BC, context_mask_BC, ids_BT, mask_BT)
        _, _, ids_BT, mask_BT = on_cpu = tuple(one.cpu() for one in rows)
        logprobs_BT = torch.zeros(ids_BT.shape)
        if bool(mask_BT.any()):
            data = self._data(on_cpu, torch.zeros(ids_BT.shape))
            output = self._await(lambda: self._training.forward(data, "cross_entropy"))
            places = mask_BT.any(dim=1).nonzero().squeeze(1).tolist()
            for row, one in zip(places, output.loss_fn_outputs, strict=True):
                length = int(mask_BT[row].sum())
                logprobs_BT[row, :length] = one["logprobs"].to_torch().float()[-length:]
        return self._leaves.leaf(on_cpu, logprobs_BT)

    def _data(self, rows: tuple[Tensor, ...], weights_BT: Tensor) -> list[Any]:
        """Convert rows with tokens to score to the SDK's format."""
        data = []
        for context, context_mask, ids, mask, weights in zip(*rows, weights_BT, strict=True):
            answer = ids[mask]
            if len(answer) == 0:
                continue
            tokens = torch.cat([context[context_mask], answer])
            before = torch.zeros(len(tokens) - 1 - len(answer))
            inputs = {
                "target_tokens": tokens[1:],
                "weights": torch.cat([before, weights[mask].float()]),
            }
            data.append(
                self._tinker.Datum(
                    model_input=self._tinker.ModelInput.from_ints(tokens[:-1].tolist()),
                    loss_fn_inputs=inputs,
                )
            )
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
        ends = sorted({*self.policy.end_ids, *options.end_ids})
        futures = []
        for place, context in enumerate(contexts):
            first = uniforms_BT[place * rows_per_context].double()
            params = self._tinker.SamplingParams(
                max_tokens=options.max_new_tokens,
                # Each uniform number adds bits, so that seeds rarely coincide.
                seed=int((first[:4].sum() / 4) * (1 << 53)) % (1 << 53),
                stop=ends,
                temperature=options.temperature,
                top_k=-1 if options.top_k is None else options.top_k,
                top_p=options.top_p,
            )
            prompt = self._tinker.ModelInput.from_ints(list(context))
            futures.append(self._call(self._sampling.sample, prompt, rows_per_context, params))
        answers = [self._result(one) for one in futures]
        return self._generation([one for answer in answers for one in answer.sequences], options)

    def _generation(self, sequences: Sequence[Any], options: SamplingOptions) -> Generation:
        width = options.max_new_tokens
        ids = [torch.tensor(list(one.tokens), dtype=torch.long) for one in sequences]
        logprobs = [torch.tensor(list(one.logprobs), dtype=torch.float32) for one in sequences]
        lengths = torch.tensor([len(one) for one in ids])
        self.policy.token_count.generated += int(lengths.sum())

        def padded(rows: list[Tensor]) -> Tensor:
            found = pad_sequence(rows, batch_first=True)
            return torch.nn.functional.pad(found, (0, width - found.shape[1]))

        mask_BT = torch.arange(width) < lengths[:, None]
        return Generation(padded(ids), mask_BT, padded(logprobs))

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
                url = str(self._client.holder._base_url)
                if not isinstance(error.__cause__, TimeoutError) or _fault_of(url) is not None:
                    raise

    def _await_service(self) -> None:
        """Wait at most `retry_timeout_seconds` for the service; the SDK would retry for minutes."""
        url = self.options.base_url or read_variable(ADDRESS_VARIABLE)
        if url:
            check_address(url, "the training service")
        deadline = time.monotonic() + self.options.retry_timeout_seconds
        with waiting_for(f"the training service {url}, which does not answer"):
            while url and (fault := _fault_of(url)) is not None:
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
            raise self._error(error)(f"the service refused a request: {error}") from error
        except (ValueError, RuntimeError) as error:
            raise ServiceError(f"Tinker's SDK abandoned a request: {error}") from error

    def _error(self, error: Exception) -> type[ServiceError]:
        sdk = self._tinker
        for text, kind in ERROR_KINDS.items():
            if text in str(error):
                return kind
        if isinstance(error, sdk.NotFoundError):
            return ServiceModelError
        if isinstance(error, sdk.RateLimitError):
            return ServiceBusyError
        if isinstance(error, sdk.RequestFailedError | sdk.BadRequestError):
            return ServiceRequestError
        return ServiceError


def tinker_shape(policy: LanguageModel) -> dict[str, Any]:
    """Return size and target layers of a policy's adapter, in the terms of Tinker's protocol."""
    is_remote = isinstance(policy, RemoteLanguageModel)
    config: Any = getattr(policy, "lora", None) if is_remote else adapter_config(policy)
    alpha = None if config is None else config.alpha if is_remote else config.lora_alpha
    if alpha != LORA_ALPHA:
        raise ConfigurationError(
            f"Tinker's protocol trains adapters of lora.alpha {LORA_ALPHA:g}; the policy has "
            f"{'none' if alpha is None else f'lora.alpha {alpha:g}'}. Set its language_model.lora "
            f"to {{rank: 32, alpha: {LORA_ALPHA:g}}}."
        )
    if is_remote:
        if config.target_modules != "all-linear":
            raise ConfigurationError(
                f"the adapter's layers {config.target_modules} are unknown here. Set "
                "lora.target_modules to all-linear."
            )
        parts_of_all = {"train_attn": True, "train_mlp": True, "train_unembed": False}
        return {"rank": config.rank, **parts_of_all}
    module: Any = getattr(policy, "module", None)
    head = module.get_base_model().get_output_embeddings()
    parts: dict[str, set[bool]] = {"train_attn": set(), "train_mlp": set(), "train_unembed": set()}
    for name, layer in module.get_base_model().named_modules():
        is_adapted = hasattr(layer, "lora_A")
        if not (is_adapted or isinstance(layer, torch.nn.Linear)) or "lora_" in name:
            continue
        if name.endswith("base_layer"):
            continue
        is_attention = "attn" in name or "attention" in name
        part = "train_attn" if is_attention else "train_mlp"
        parts["train_unembed" if layer is head else part].add(is_adapted)
    mixed = [part for part, found in parts.items() if len(found) > 1]
    if mixed:
        raise ConfigurationError(
            "Tinker's protocol adapts all attention, all MLPs or the head; the adapter covers only "
            f"some layers of {', '.join(mixed)}. Set lora.target_modules to all-linear."
        )
    return {"rank": config.r, **{part: True in found for part, found in parts.items()}}


def _fault_of(url: str) -> str | None:
    """Return why a service does not answer; None if it does."""
    import httpx

    async def status_of() -> int:
        async with (
            asyncio.timeout(SECONDS_OF_A_CHECK),
            httpx.AsyncClient() as client,
            client.stream("GET", f"{url.rstrip('/')}/api/v1/healthz") as answer,
        ):
            return answer.status_code

    try:
        status = run_sync(status_of())
    except TimeoutError:
        return f"no answer in {SECONDS_OF_A_CHECK:g} s"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return f"status {status}" if status >= 500 else None


def _finish(client: Any) -> None:
    """End a client's session, and its reporting thread."""
    # Whatever fails here, the run has ended.
    with suppress(Exception):
        closed = client.close("success").future()
        wait([closed], SECONDS_TO_FINISH)
        # The SDK would repeat requests to a dead service for minutes.
        closed.cancel()


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
