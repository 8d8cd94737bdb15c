"""Client of the training routes of `nip-astra serve --train`, and its message format.

Operations have consecutive numbers. They and their results are messages of
`checkpoints.tensors.pack_state`, which are bit-exact.

Shape suffixes: `B` row, `C` context position, `T` continuation position.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.errors import (
    AnswerTooLargeError,
    CheckpointError,
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
    TokenCount,
)
from nip_astra.language_models.remote import RemoteLanguageModel
from nip_astra.language_models.services.chat import PerLoop, run_sync
from nip_astra.language_models.services.http_client import MIB, bounded, check_address, read_key
from nip_astra.language_models.services.training import (
    LogprobLeaves,
    Loss,
    OptimizerFigures,
    TrainingService,
    TrainingServiceRequest,
    TrainServiceParameters,
    adapter_config,
    register_training_service,
)
from nip_astra.lazy import import_extra
from nip_astra.parameters.types import TrainingServiceType
from nip_astra.progress import waiting_for

if TYPE_CHECKING:
    import httpx

ROUTE = "/training/v1/models"
KEY_HEADER = "Idempotency-Key"
"""Header with a request's key; a retried request has the same key, and gets the same response."""
DONE_HEADER = "X-Operation"
"""Header of the response to an operation that ran, or was refused in its turn."""
MESSAGE = "application/octet-stream"
SECONDS_BETWEEN_REPORTS = 20.0
"""Period of the reports that show that a computing client is alive."""
SECONDS_WITHOUT_A_BYTE = 60.0
"""Maximum seconds without data; a working service answers within 20 seconds."""
SECONDS_OF_ONE_REQUEST = 600.0
"""Maximum seconds from the first byte of a request to the last byte of the response."""
SECONDS_BETWEEN_POLLS = 0.05
SECONDS_TO_NOTIFY = 2.0
ERROR_CLASSES: Mapping[int, type[ServiceError]] = {
    400: ServiceRequestError,
    404: ServiceModelError,
    409: ServiceConflictError,
    413: ServiceRequestError,
    422: ServiceRequestError,
    429: ServiceBusyError,
}
PASSING = (429, 502, 503, 504)
"""Statuses after which the same request may succeed: a full service, or one that is restarted
behind a proxy. Not 500 and 409, which here are final answers to an operation."""


@register_training_service(TrainingServiceType.HTTP)
class HttpTrainingService(TrainingService):
    """Trains at a service started by `nip-astra serve --train`.

    The service returns log-probabilities and receives the loss's gradients by them. Numbers and
    saved states equal those of `LocalTrainingService`. The service's model must be the policy's.
    """

    def __init__(self, request: TrainingServiceRequest) -> None:
        policy = request.policy
        self.policy = policy
        self.connection = TrainingConnection(request.parameters)
        self._leaves = LogprobLeaves(policy)
        self._number = 0
        self._client = uuid.uuid4().hex
        module = getattr(policy, "module", None)
        lora = describe_adapter(policy)
        body = {
            "base_model": request.remote_model(),
            "lora": lora,
            "seed": request.seed,
            "optimizer": request.training.optimizer,
            "weight_decay": request.training.weight_decay,
            "role": request.role,
            "vocabulary": vocabulary_digest(policy.tokenizer),
            "weights": None if module is None else weights_digest(module),
        }
        created = self.connection.post_json(ROUTE, body, key=f"{self._client}:model")
        if not isinstance(created.get("id"), str):
            raise self.connection.unreadable("it names no model")
        self.model_id: str = created["id"]
        path = f"{ROUTE}/{self.model_id}"
        ended = threading.Event()
        # However a run ends, its model is deleted. Neither this nor the thread refers to `self`,
        # which would keep it alive.
        self._delete = weakref.finalize(self, _delete_model, self.connection, path, ended)
        threading.Thread(
            target=_report_alive,
            args=(self.connection, path, ended),
            name="training report",
            daemon=True,
        ).start()
        if module is not None and lora is not None:
            # The service draws an adapter of its own; the run continues with the policy's.
            with tempfile.TemporaryDirectory() as folder:
                policy.save(Path(folder))
                self._operate("load_weights", files=pack_folder(Path(folder)))

    @classmethod
    def open(cls, request: TrainingServiceRequest) -> HttpTrainingService:
        return cls(request)

    def forward_backward(self, batches: Sequence[TensorDict], loss: Loss) -> dict[str, float]:
        pieces: list[dict[str, Any]] = []

        def send(rows: tuple[Tensor, ...], gradient_BT: Tensor) -> None:
            pieces.append({"rows": rows, "gradient": gradient_BT})

        figures = self._leaves.mean_loss(batches, loss, send)
        self._operate("backward", pieces=pieces)
        return figures

    def optim_step(self, *, lr: float, max_grad_norm: float | None = None) -> OptimizerFigures:
        result = self._operate("optim_step", lr=lr, max_grad_norm=max_grad_norm)
        grad_norm = result.get("grad_norm")
        was_taken = result.get("was_taken")
        if not isinstance(grad_norm, int | float) or not isinstance(was_taken, bool):
            raise self.connection.unreadable("it lacks grad_norm or was_taken")
        return OptimizerFigures(grad_norm, was_taken=was_taken)

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        rows = (context_BC.cpu(), context_mask_BC.cpu(), ids_BT.cpu(), mask_BT.cpu())
        result = self._operate("logprobs", rows=rows)
        logprobs_BT = self._read_tensor(result, "logprobs")
        if logprobs_BT.shape != ids_BT.shape:
            raise self.connection.unreadable(
                f"its logprobs have the shape {tuple(logprobs_BT.shape)}, not {tuple(ids_BT.shape)}"
            )
        return self._leaves.leaf(rows, logprobs_BT)

    def sample(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        result = self._operate(
            "sample",
            contexts=[list(context) for context in contexts],
            rows_per_context=rows_per_context,
            uniforms=uniforms_BT,
            options=asdict(options),
        )
        ids_BT = self._read_tensor(result, "ids")
        mask_BT = self._read_tensor(result, "mask")
        logprobs_BT = self._read_tensor(result, "logprobs")
        num_rows = len(contexts) * rows_per_context
        shapes = {ids_BT.shape, mask_BT.shape, logprobs_BT.shape}
        if len(shapes) > 1 or ids_BT.shape[:1] != (num_rows,):
            raise self.connection.unreadable(f"its answers have the shapes {sorted(shapes)}")
        return Generation(ids_BT, mask_BT, logprobs_BT)

    def save_state(self, directory: Path) -> None:
        self._write_files("save_state", directory)

    def load_state(self, directory: Path) -> None:
        self._operate("load_state", files=pack_folder(directory))

    def save_weights_for_sampler(self, directory: Path) -> None:
        self._write_files("save_weights_for_sampler", directory)

    def close(self) -> None:
        self._delete()

    def _operate(self, kind: str, **arguments: Any) -> dict[str, Any]:
        """Execute an operation exactly once, with retries."""
        number = self._number + 1
        message = pack_state({"kind": kind, **arguments})
        path = f"{ROUTE}/{self.model_id}/operations/{number}"
        response = self.connection.operate(path, message, key=f"{self._client}:{number}")
        # Only now: an operation that never ran, for which `operate` raises, does not use up its
        # number. One that ran and failed does.
        self._number = number
        if response.status_code != 200:
            raise self.connection.error(response)
        content = response.content
        try:
            result: dict[str, Any] = unpack_state(content)
            self.policy.token_count.add(TokenCount(**result.pop("tokens", {})))
        except (CheckpointError, AttributeError, TypeError) as error:
            raise self.connection.unreadable(f"{len(content)} bytes, {error}") from error
        return result

    def _read_tensor(self, result: Mapping[str, Any], name: str) -> Tensor:
        tensor = result.get(name)
        if not isinstance(tensor, Tensor):
            raise self.connection.unreadable(f"it lacks the tensor {name}")
        return tensor

    def _write_files(self, kind: str, directory: Path) -> None:
        files = self._operate(kind).get("files")
        if not isinstance(files, dict):
            raise self.connection.unreadable("it has no files")
        unpack_folder(files, directory)


def _report_alive(connection: TrainingConnection, path: str, ended: threading.Event) -> None:
    connection.notify("GET", path)
    while not ended.wait(SECONDS_BETWEEN_REPORTS):
        connection.notify("GET", path)


def _delete_model(connection: TrainingConnection, path: str, ended: threading.Event) -> None:
    ended.set()
    connection.notify("DELETE", path)


def describe_adapter(policy: LanguageModel) -> dict[str, Any] | None:
    """Return size and target layers of a policy's adapter; None if all its weights are trained."""
    if isinstance(policy, RemoteLanguageModel):
        return None if policy.lora is None else policy.lora.model_dump()
    config = adapter_config(policy)
    if config is None:
        return None
    targets = config.target_modules
    if config.use_rslora or config.use_dora or config.lora_dropout:
        raise ServiceRequestError(
            "services train no adapters with dropout, DoRA or rank scaling. Set a plain lora."
        )
    return {
        "rank": config.r,
        "alpha": float(config.lora_alpha),
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
    }


# ---- requests


class TrainingConnection:
    """Requests to one service."""

    def __init__(self, options: TrainServiceParameters) -> None:
        httpx = import_extra("httpx", "train_service.backend http", "http")
        assert options.base_url is not None, "validated"
        check_address(options.base_url, "the training service")
        self._httpx = httpx
        self.options = options
        self.base_url = options.base_url.rstrip("/")
        token = read_key(options.token_variable, "train_service.token_variable")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._clients = PerLoop(self._open)

    def post_json(self, path: str, body: Mapping[str, Any], *, key: str) -> dict[str, Any]:
        """Send JSON, and return the JSON object of the response."""
        content = {"json": dict(body)}
        response = run_sync(self._request_and_poll(path, content, key, poll_method="POST"))
        if response.status_code != 200:
            raise self.error(response)
        try:
            reply = response.json()
        except (ValueError, RecursionError) as error:
            raise self.unreadable(f"it is not JSON ({error})") from error
        if not isinstance(reply, dict):
            raise self.unreadable("it is not a JSON object")
        return reply

    def operate(self, path: str, message: bytes, *, key: str) -> httpx.Response:
        """Execute an operation exactly once, and return its result or refusal."""
        content = {"content": message, "headers": {"Content-Type": MESSAGE}}
        # Polled without the message, which may have gigabytes.
        response = run_sync(self._request_and_poll(path, content, key, poll_method="GET"))
        if response.status_code == 200 or DONE_HEADER in response.headers:
            return response
        raise self.error(response)

    def notify(self, method: str, path: str) -> None:
        """Send a short request; ignore failures and the body of the response."""
        sender = threading.Thread(target=self._send_note, args=(method, path), daemon=True)
        try:
            sender.start()
        except RuntimeError:
            # At interpreter exit there are no new threads, and the event loop takes no more work.
            self._send_note(method, path)
        else:
            # Headers may arrive byte by byte, for as long as the service likes.
            sender.join(SECONDS_TO_NOTIFY)

    def _send_note(self, method: str, path: str) -> None:
        with (
            suppress(self._httpx.HTTPError),
            self._httpx.stream(
                method, f"{self.base_url}{path}", headers=self._headers, timeout=SECONDS_TO_NOTIFY
            ),
        ):
            pass

    def unreadable(self, problem: str) -> ServiceError:
        """Return the error for a response that violates the protocol."""
        return ServiceError(
            f"unreadable response of the training service {self.base_url}: {problem}. Check that "
            "base_url is the address of `nip-astra serve --train`, of this version."
        )

    async def _request_and_poll(
        self, path: str, content: Mapping[str, Any], key: str, *, poll_method: str
    ) -> httpx.Response:
        """Send a request, and poll while the service works on it."""
        poll_content = content if poll_method == "POST" else {}
        with waiting_for(f"the training service {self.base_url}", after=10.0):
            try:
                async with asyncio.timeout(self.options.operation_timeout):
                    response = await self._request_with_retries("POST", path, key, content)
                    while response.status_code == 202:
                        # The service has waited for the result already.
                        await asyncio.sleep(SECONDS_BETWEEN_POLLS)
                        response = await self._request_with_retries(
                            poll_method, path, key, poll_content
                        )
                    return response
            except TimeoutError as error:
                raise ServiceUnreachableError(
                    f"the training service {self.base_url} has not finished an operation in "
                    f"{self.options.operation_timeout:g} s. Check the service or raise "
                    "train_service.operation_timeout, then continue with: nip-astra resume RUN."
                ) from error

    async def _request_with_retries(
        self, method: str, path: str, key: str, content: Mapping[str, Any]
    ) -> httpx.Response:
        """Retry a request while the service does not answer or is full."""
        deadline = time.monotonic() + self.options.retry_timeout_seconds
        # The same key each time, by which the service recognises a repeated request.
        headers = {**content.get("headers", {}), KEY_HEADER: key}
        arguments = {**content, "headers": headers}
        pause = 0.05
        while True:
            fault: Exception | None = None
            try:
                async with asyncio.timeout(SECONDS_OF_ONE_REQUEST):
                    response = await self._clients.get().request(method, path, **arguments)
                if response.status_code not in PASSING or DONE_HEADER in response.headers:
                    return response
                problem = f"status {response.status_code}"
            except AnswerTooLargeError as error:
                raise AnswerTooLargeError(
                    f"the training service {self.base_url}: {error}. Check the service, or raise "
                    "train_service.max_answer_mib."
                ) from error
            except TimeoutError as error:
                fault = error
                problem = f"its answer is not complete after {SECONDS_OF_ONE_REQUEST:g} s"
            except self._httpx.RequestError as error:
                fault = error
                problem = str(error) or type(error).__name__
            if time.monotonic() + pause > deadline:
                if fault is None:
                    # The last refusal: its message is the best that can be reported.
                    return response
                raise ServiceUnreachableError(
                    f"the training service {self.base_url} does not answer: {problem} (tried for "
                    f"{self.options.retry_timeout_seconds:.3g} s). Start it again, then continue "
                    "with: nip-astra resume RUN."
                ) from fault
            with waiting_for(f"the training service {self.base_url}: {problem}", after=0.5):
                await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _open(self) -> httpx.AsyncClient:
        max_bytes = int(self.options.max_answer_mib * MIB)
        client_class = bounded(self._httpx.AsyncClient, max_bytes)
        return client_class(
            base_url=self.base_url, headers=self._headers, timeout=SECONDS_WITHOUT_A_BYTE
        )

    def error(self, response: httpx.Response) -> ServiceError:
        """Return the error for a response that refuses a request."""
        try:
            reason = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            # A proxy's page, for instance.
            reason = response.text[:300] or f"status {response.status_code}"
        error_class = ERROR_CLASSES.get(response.status_code, ServiceError)
        return error_class(f"the training service {self.base_url} refused a request: {reason}")


# ---- messages


def pack_folder(folder: Path) -> dict[str, Tensor]:
    """Return the files of a folder as bytes, by relative path."""
    files = {}
    for path in sorted(folder.rglob("*")):
        # torch makes no tensor of an empty buffer.
        if path.is_file() and path.stat().st_size > 0:
            content = bytearray(path.read_bytes())
            name = path.relative_to(folder).as_posix()
            files[name] = torch.frombuffer(content, dtype=torch.uint8)
    return files


def unpack_folder(files: Mapping[str, Tensor], folder: Path) -> None:
    """Write the result of `pack_folder`, only inside the folder."""
    root = folder.resolve()
    for name, content in files.items():
        path = (root / name).resolve()
        is_bytes = isinstance(content, Tensor) and content.dtype == torch.uint8
        if not path.is_relative_to(root) or not is_bytes:
            raise CheckpointError(
                f"invalid file {name!r} of a saved state. Send the files of pack_folder."
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.numpy().tobytes())
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written: {error}. Free space or change the permissions."
            ) from error


def weights_digest(module: Any) -> str:
    """Return a digest of a model's weights, without adapters."""
    digests = []
    for name, parameter in module.named_parameters():
        if "lora_" not in name:
            weights = parameter.detach().to("cpu", torch.float32).contiguous().numpy()
            digests.append(hashlib.sha256(weights.tobytes()).hexdigest())
    # Without names, which PEFT changes.
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def vocabulary_digest(tokenizer: Any) -> str:
    """Return a digest of a vocabulary."""
    tokens = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(repr(tokens).encode()).hexdigest()
