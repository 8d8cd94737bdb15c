"""Tinker, or a local server of its protocol, as a training service, through Tinker's own SDK.

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
    MissingDependencyError,
    ServiceBusyError,
    ServiceConflictError,
    ServiceError,
    ServiceModelError,
    ServiceRequestError,
    ServiceUnreachableError,
)
from nip_astra.language_models.base import Generation, SamplingOptions
from nip_astra.language_models.services.adapter_shapes import tinker_shape
from nip_astra.language_models.services.bounded_http import check_address
from nip_astra.language_models.services.logprob_leaves import LogprobLeaves, mean_loss
from nip_astra.language_models.services.run_sync import run_sync
from nip_astra.language_models.services.training import (
    Loss,
    OptimizerFigures,
    TrainingService,
    TrainingServiceRequest,
    check_step,
    register_training_service,
)
from nip_astra.parameters.types import TrainingServiceType
from nip_astra.progress import waiting_for
from nip_astra.trust import read_variable

ADDRESS = "tinker.json"
"""Name of the file that says where the service keeps what was saved."""
ADDRESS_VARIABLE = "TINKER_BASE_URL"
"""Environment variable from which the SDK takes an address that the parameters do not name."""
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_OF_A_LOOK = 10.0
SECONDS_TO_FORGET = 2.0
"""How long to wait for a service to confirm the end of a session."""
ERROR_KINDS: Mapping[str, type[ServiceError]] = {
    "service was restarted": ServiceModelError,
    "one client at a time": ServiceConflictError,
    "higher max_training_models": ServiceBusyError,
}
"""Texts of a local server's refusals for which the SDK has no error class."""
DEFAULT_KEY = "tml-local"
"""Sent when no key is named; a local server without a token needs none."""


@register_training_service(TrainingServiceType.TINKER)
class TinkerTrainingService(TrainingService):
    """Trains an adapter at a service of Tinker's protocol.

    Any loss of log-probabilities works: the service returns them, and receives the gradients as
    weights of its cross-entropy. A checkpoint holds the address of the state there.

    The service's model must have the policy's tokenizer; the policy's adapter gives the size of
    the service's.

    Raises
    ------
    ConfigurationError
        When the protocol cannot train it as requested.
    ServiceError
        When the service cannot be reached, or refuses the model.
    """

    def __init__(self, request: TrainingServiceRequest) -> None:
        self._tinker = _sdk()
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
        key = _key(options.token_variable)
        self._await_service()
        self._client = self._call(
            lambda: self._tinker.ServiceClient(base_url=options.base_url, api_key=key)
        )
        # A run leaves no model at the service, however it ends.
        self._forget = weakref.finalize(self, _finish, self._client)
        self._training = self._await(
            lambda: self._client.create_lora_training_client(
                model, seed=request.seed % (1 << 62), **shape
            )
        )

    @classmethod
    def open(cls, request: TrainingServiceRequest) -> TinkerTrainingService:
        return cls(request)

    # ---- training

    def forward_backward(self, batches: Sequence[TensorDict], loss: Loss) -> dict[str, float]:
        data: list[Any] = []

        def send(rows: tuple[Tensor, ...], gradient_BT: Tensor) -> None:
            # The service adds the gradient of -weights * logprobs.
            data.extend(self._data(rows, -gradient_BT))

        found = mean_loss(batches, loss, self._leaves, send)
        self._await(lambda: self._training.forward_backward(data, "cross_entropy"))
        return found

    def optim_step(self, *, lr: float, max_grad_norm: float | None = None) -> OptimizerFigures:
        check_step(lr, max_grad_norm)
        # The rest are torch's defaults, as of the local service.
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
        # Tinker's own service does not tell it.
        return OptimizerFigures(metrics.get("grad_norm:mean", float("nan")), was_taken=True)

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        rows = tuple(one.cpu() for one in (context_BC, context_mask_BC, ids_BT, mask_BT))
        logprobs_BT = torch.zeros(ids_BT.shape)
        if bool(rows[3].any()):
            data = self._data(rows, torch.zeros(ids_BT.shape))
            output = self._await(lambda: self._training.forward(data, "cross_entropy"))
            places = rows[3].any(dim=1).nonzero().squeeze(1).tolist()
            for row, one in zip(places, output.loss_fn_outputs, strict=True):
                length = int(rows[3][row].sum())
                logprobs_BT[row, :length] = one["logprobs"].to_torch().float()[-length:]
        return self._leaves.leaf(rows, logprobs_BT)

    def _data(self, rows: tuple[Tensor, ...], weights_BT: Tensor) -> list[Any]:
        """Rows with something to score, as the SDK takes them."""
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
                f"answers of at least {options.min_new_tokens} tokens were to be sampled through "
                "Tinker's protocol, which has no least length. Set the policy's min_new_tokens "
                "to 0."
            )
        if self._sampling is None:
            self._sampling = self._await(self._training.save_weights_and_get_sampling_client)
        ends = sorted({*self.policy.end_ids, *options.end_ids})
        futures = []
        for place, context in enumerate(contexts):
            first = uniforms_BT[place * rows_per_context].double()
            params = self._tinker.SamplingParams(
                max_tokens=options.max_new_tokens,
                # Each place of a uniform number adds bits, so that equal seeds are no accident.
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
        self._sampling = None
        self._training = self._await(
            lambda: self._client.create_training_client_from_state_with_optimizer(path)
        )

    def save_weights_for_sampler(self, directory: Path) -> None:
        """Write the tokenizer, and where the service keeps the adapter: it hands out no weights."""
        saved = self._await(lambda: self._training.save_weights_for_sampler(uuid.uuid4().hex))
        _write_address(directory, saved.path)
        self.policy.tokenizer.save_pretrained(directory)

    def close(self) -> None:
        """Have the service drop the model, as happens when the run ends."""
        self._forget()

    # ---- requests

    def _await(self, request: Callable[[], Any]) -> Any:
        """Send a request, and wait for its result."""
        return self._result(self._call(request))

    def _result(self, future: Any) -> Any:
        """The result of a request, awaited as long as the service answers at all."""
        while True:
            try:
                return self._call(future.result, self.options.patience_seconds)
            except ServiceUnreachableError as error:
                if not isinstance(error.__cause__, TimeoutError) or not self._is_alive():
                    raise

    def _is_alive(self) -> bool:
        return _fault_of(str(self._client.holder._base_url)) is None

    def _await_service(self) -> None:
        """Wait until the service answers, at most `patience_seconds`.

        The SDK itself would try an address that refuses for minutes.
        """
        url = self.options.base_url or read_variable(ADDRESS_VARIABLE)
        if url:
            check_address(url, "the training service")
        deadline = time.monotonic() + self.options.patience_seconds
        with waiting_for(f"the training service {url}, which does not answer"):
            while url and (fault := _fault_of(url)) is not None:
                if time.monotonic() + SECONDS_BETWEEN_LOOKS > deadline:
                    raise ServiceUnreachableError(
                        f"the training service {url} does not answer: {fault} (tried for "
                        f"{self.options.patience_seconds:.3g} s). Start it, or correct "
                        "train_service.base_url."
                    )
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def _call(self, request: Callable[..., Any], *arguments: Any) -> Any:
        """Call the SDK, and turn its errors into ours."""
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
            raise ServiceError(f"Tinker's SDK gave up a request: {error}") from error

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


def _fault_of(url: str) -> str | None:
    """Why a service does not answer; None if it does."""
    import httpx

    async def look() -> int:
        # Whatever it says, without its body.
        async with (
            asyncio.timeout(SECONDS_OF_A_LOOK),
            httpx.AsyncClient() as client,
            client.stream("GET", f"{url.rstrip('/')}/api/v1/healthz") as answer,
        ):
            return answer.status_code

    try:
        status = run_sync(look())
    except TimeoutError:
        return f"no answer in {SECONDS_OF_A_LOOK:g} s"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return f"status {status}" if status >= 500 else None


def _sdk() -> Any:
    try:
        import tinker
    except ImportError as error:
        raise MissingDependencyError(
            "a policy was to be trained through Tinker's protocol, and it needs the package "
            "tinker. Install it with: pip install 'nip_astra[tinker]'."
        ) from error
    return tinker


def _key(token_variable: str | None) -> str | None:
    if token_variable is None:
        return None if read_variable("TINKER_API_KEY") else DEFAULT_KEY
    key = read_variable(token_variable) or ""
    if not key:
        raise ConfigurationError(
            f"the API key of Tinker's protocol was to be taken from the environment variable "
            f"{token_variable}, which is not set or empty. Set it."
        )
    return key


def _finish(client: Any) -> None:
    """End a client's session, and the thread that tells the service that it is alive."""
    # Whatever fails here, the run is over.
    with suppress(Exception):
        closed = client.close("success").future()
        wait([closed], SECONDS_TO_FORGET)
        # The SDK would go on asking a service that is gone for minutes.
        closed.cancel()


def _write_address(directory: Path, path: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ADDRESS).write_text(json.dumps({"path": path}), encoding="utf-8")


def _read_address(directory: Path) -> str:
    try:
        return str(json.loads((directory / ADDRESS).read_text(encoding="utf-8"))["path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the state in {directory} was to be read, but it says nothing of where a service of "
            f"Tinker's protocol keeps it: {error}. Resume with the service that wrote it."
        ) from error
