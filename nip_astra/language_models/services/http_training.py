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
from nip_astra.language_models.services.chat import run_sync
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
KINDS: Mapping[int, type[ServiceError]] = {
    400: ServiceRequestError,
    404: ServiceModelError,
    409: ServiceConflictError,
    413: ServiceRequestError,
    422: ServiceRequestError,
    429: ServiceBusyError,
}
PASSING = (429, 502, 503, 504)
"""Statuses after which the same request may succeed."""


@register_training_service(TrainingServiceType.HTTP)
class HttpTrainingService(TrainingService):
    """Trains at a service started by `nip-astra serve --train`.

    The service returns log-probabilities and receives the loss's gradients by them. Numbers and
    saved states equal those of `LocalTrainingService`. The service's model must be the policy's.
    """

    def __init__(self, request: TrainingServiceRequest) -> None:
        options, policy = request.parameters, request.policy
        self.policy = policy
        self.connection = connection = TrainingConnection(options)
        self._leaves = LogprobLeaves(policy)
        self._number = 0
        self._client = uuid.uuid4().hex
        module = getattr(policy, "module", None)
        lora = adapter_of(policy)
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
        made = connection.post_json(ROUTE, body, key=f"{self._client}:model")
        if not isinstance(made.get("id"), str):
            raise connection.unreadable("it names no model")
        self.model_id = made["id"]
        # However a run ends, its model is deleted.
        path = f"{ROUTE}/{self.model_id}"
        ended = threading.Event()
        self._delete = weakref.finalize(self, _delete, connection, path, ended)
        threading.Thread(
            target=_report, args=(connection, path, ended), name="training report", daemon=True
        ).start()
        if module is not None and lora is not None:
            with tempfile.TemporaryDirectory() as folder:
                policy.save(Path(folder))
                self._do("load_weights", files=pack_folder(Path(folder)))

    @classmethod
    def open(cls, request: TrainingServiceRequest) -> HttpTrainingService:
        return cls(request)

    def forward_backward(self, batches: Sequence[TensorDict], loss: Loss) -> dict[str, float]:
        pieces: list[dict[str, Any]] = []

        def send(rows: tuple[Tensor, ...], gradient_BT: Tensor) -> None:
            pieces.append({"rows": rows, "gradient": gradient_BT})

        found = self._leaves.mean_loss(batches, loss, send)
        self._do("backward", pieces=pieces)
        return found

    def optim_step(self, *, lr: float, max_grad_norm: float | None = None) -> OptimizerFigures:
        found = self._do("optim_step", lr=lr, max_grad_norm=max_grad_norm)
        grad_norm, was_taken = found.get("grad_norm"), found.get("was_taken")
        if not isinstance(grad_norm, int | float) or not isinstance(was_taken, bool):
            raise self.connection.unreadable("it lacks grad_norm or was_taken")
        return OptimizerFigures(grad_norm, was_taken=was_taken)

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        on_cpu = tuple(one.cpu() for one in (context_BC, context_mask_BC, ids_BT, mask_BT))
        (logprobs_BT,) = self._tensors("logprobs", self._do("logprobs", rows=on_cpu))
        if logprobs_BT.shape != ids_BT.shape:
            raise self.connection.unreadable(
                f"its logprobs have the shape {tuple(logprobs_BT.shape)}, not {tuple(ids_BT.shape)}"
            )
        return self._leaves.leaf(on_cpu, logprobs_BT)

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
            raise self.connection.unreadable(f"its answers have the shapes {sorted(shapes)}")
        return Generation(ids_BT, mask_BT, logprobs_BT)

    def save_state(self, directory: Path) -> None:
        self._write_files("save_state", directory)

    def load_state(self, directory: Path) -> None:
        self._do("load_state", files=pack_folder(directory))

    def save_weights_for_sampler(self, directory: Path) -> None:
        self._write_files("save_weights_for_sampler", directory)

    def close(self) -> None:
        self._delete()

    def _do(self, kind: str, **arguments: Any) -> dict[str, Any]:
        """Execute an operation exactly once, with retries."""
        number = self._number + 1
        message = pack_state({"kind": kind, **arguments})
        path = f"{ROUTE}/{self.model_id}/operations/{number}"
        answer = self.connection.operate(path, message, key=f"{self._client}:{number}")
        # A refused operation does not use up its number.
        self._number = number
        if answer.status_code != 200:
            raise self.connection.error(answer)
        content = answer.content
        try:
            result: dict[str, Any] = unpack_state(content)
            self.policy.token_count.add(TokenCount(**result.pop("tokens", {})))
        except (CheckpointError, AttributeError, TypeError) as error:
            raise self.connection.unreadable(f"{len(content)} bytes, {error}") from error
        return result

    def _tensors(self, names: str, found: Mapping[str, Any]) -> list[Tensor]:
        tensors = [found.get(name) for name in names.split()]
        if not all(isinstance(one, Tensor) for one in tensors):
            raise self.connection.unreadable(f"it lacks one of the tensors {names}")
        return [one for one in tensors if one is not None]

    def _write_files(self, kind: str, directory: Path) -> None:
        files = self._do(kind).get("files")
        if not isinstance(files, dict):
            raise self.connection.unreadable("it has no files")
        unpack_folder(files, directory)


def _report(connection: TrainingConnection, path: str, ended: threading.Event) -> None:
    connection.notify("GET", path)
    while not ended.wait(SECONDS_BETWEEN_REPORTS):
        connection.notify("GET", path)


def _delete(connection: TrainingConnection, path: str, ended: threading.Event) -> None:
    ended.set()
    connection.notify("DELETE", path)


def adapter_of(policy: LanguageModel) -> dict[str, Any] | None:
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
        self.options, self.base_url = options, options.base_url.rstrip("/")
        token = read_key(options.token_variable, "train_service.token_variable")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._client: Any | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def post_json(self, path: str, body: Mapping[str, Any], *, key: str) -> dict[str, Any]:
        """Send JSON, and return the JSON object of the response."""
        answer = run_sync(self._operate(path, {"json": dict(body)}, key, polls="POST"))
        if answer.status_code != 200:
            raise self.error(answer)
        try:
            found = answer.json()
        except (ValueError, RecursionError) as error:
            raise self.unreadable(f"it is not JSON ({error})") from error
        if not isinstance(found, dict):
            raise self.unreadable("it is not a JSON object")
        return found

    def operate(self, path: str, message: bytes, *, key: str) -> httpx.Response:
        """Execute an operation exactly once, and return its result or refusal."""
        sent = {"content": message, "headers": {"Content-Type": MESSAGE}}
        answer = run_sync(self._operate(path, sent, key, polls="GET"))
        if answer.status_code == 200 or DONE_HEADER in answer.headers:
            return answer
        raise self.error(answer)

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

    async def _operate(
        self, path: str, sent: Mapping[str, Any], key: str, *, polls: str
    ) -> httpx.Response:
        """Send a request, and poll while the service works on it."""
        with waiting_for(f"the training service {self.base_url}", after=10.0):
            try:
                async with asyncio.timeout(self.options.operation_timeout):
                    answer = await self._patiently("POST", path, key, sent)
                    while answer.status_code == 202:
                        # The service has waited for the result already.
                        await asyncio.sleep(SECONDS_BETWEEN_POLLS)
                        again = sent if polls == "POST" else {}
                        answer = await self._patiently(polls, path, key, again)
                    return answer
            except TimeoutError as error:
                raise ServiceUnreachableError(
                    f"the training service {self.base_url} has not finished an operation in "
                    f"{self.options.operation_timeout:g} s. Check the service or raise "
                    "train_service.operation_timeout, then continue with: nip-astra resume RUN."
                ) from error

    async def _patiently(
        self, method: str, path: str, key: str, sent: Mapping[str, Any]
    ) -> httpx.Response:
        """Retry a request while the service does not answer or is full."""
        deadline = time.monotonic() + self.options.retry_timeout_seconds
        headers = {KEY_HEADER: key, **sent.get("headers", {})}
        pause = 0.05
        while True:
            fault: Exception | None = None
            try:
                async with asyncio.timeout(SECONDS_OF_ONE_REQUEST):
                    answer = await self._open().request(
                        method, path, **{**sent, "headers": headers}
                    )
                if answer.status_code not in PASSING or DONE_HEADER in answer.headers:
                    return answer
                problem = f"status {answer.status_code}"
            except AnswerTooLargeError as error:
                raise AnswerTooLargeError(
                    f"the training service {self.base_url}: {error}. Check the service, or raise "
                    "train_service.max_answer_mib."
                ) from error
            except TimeoutError as error:
                fault = error
                problem = f"its answer is not complete after {SECONDS_OF_ONE_REQUEST:g} s"
            except self._httpx.RequestError as error:
                fault, problem = error, str(error) or type(error).__name__
            if time.monotonic() + pause > deadline:
                if fault is None:
                    return answer
                raise ServiceUnreachableError(
                    f"the training service {self.base_url} does not answer: {problem} (tried for "
                    f"{self.options.retry_timeout_seconds:.3g} s). Start it again, then continue "
                    "with: nip-astra resume RUN."
                ) from fault
            with waiting_for(f"the training service {self.base_url}: {problem}", after=0.5):
                await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _open(self) -> httpx.AsyncClient:
        """Return the client of the running event loop; a forked process has another loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            kind = bounded(self._httpx.AsyncClient, int(self.options.max_answer_mib * MIB))
            self._client = kind(
                base_url=self.base_url, headers=self._headers, timeout=SECONDS_WITHOUT_A_BYTE
            )
            self._loop = loop
        return self._client

    def error(self, answer: httpx.Response) -> ServiceError:
        try:
            reason = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            reason = answer.text[:300] or f"status {answer.status_code}"
        kind = KINDS.get(answer.status_code, ServiceError)
        return kind(f"the training service {self.base_url} refused a request: {reason}")


# ---- messages


def pack_folder(folder: Path) -> dict[str, Tensor]:
    """Return the files of a folder as bytes, by relative path."""
    return {
        path.relative_to(folder).as_posix(): torch.frombuffer(
            bytearray(path.read_bytes()), dtype=torch.uint8
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.stat().st_size
    }


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
    weights = [
        tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        for name, tensor in module.named_parameters()
        if "lora_" not in name
    ]
    digests = sorted(hashlib.sha256(weight.tobytes()).hexdigest() for weight in weights)
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def vocabulary_digest(tokenizer: Any) -> str:
    """Return a digest of a vocabulary."""
    items = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(repr(items).encode()).hexdigest()
