"""The JSON requests of Tinker's SDK; unsupported options are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from nip_astra.serve.requests import Body
from nip_astra.serve.training import MAX_WEIGHT_DECAY

Seconds = Annotated[int, Field(ge=1, le=10 * 365 * 24 * 3600)]
"""Lifetime of a checkpoint; at most ten years."""
Number = Annotated[int, Field(ge=1, lt=1 << 53)]
"""Number of a model's operation, in the order of execution."""
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Integer = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Top = Annotated[int, Field(ge=0, le=1024)]
"""Number of candidates to report per token."""
MAX_SAMPLES = 4096
"""Maximum answers of one request."""


class TinkerBody(Body):
    """A request; the SDK sends `type` with each."""

    model_config = ConfigDict(
        strict=False, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )
    type: str | None = None


class SessionBody(TinkerBody):
    """A new session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class HeartbeatBody(TinkerBody):
    """A client reports that it is alive."""

    session_id: str


class LoraBody(TinkerBody):
    """A low-rank adapter."""

    rank: int = Field(ge=1, le=4096)
    seed: Integer | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(TinkerBody):
    """The kind of an optimizer."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: Literal["adamw"] = "adamw"


class CreateModelBody(TinkerBody):
    """A new model in training."""

    session_id: str
    model_seq_id: Count
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody = LoraBody(rank=32)
    optimizer_config: OptimizerBody = OptimizerBody()


class NumberedBody(TinkerBody):
    """An operation on a model in training, by its number."""

    model_id: str
    seq_id: Number


class LoadBody(TinkerBody):
    """A saved state to load into a model, or to create a model from."""

    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerBody | None = None


class AdamBody(TinkerBody):
    """The parameters of an optimizer step."""

    learning_rate: float = 1e-4
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    # Weights without a gradient are divided by it; smaller numbers are 0 in float32.
    eps: float = Field(default=1e-12, ge=1e-30, le=1)
    weight_decay: float = Field(default=0.0, ge=0, le=MAX_WEIGHT_DECAY)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class OptimStepBody(NumberedBody):
    """An optimizer step."""

    adam_params: AdamBody


class SaveBody(NumberedBody):
    """A state to save."""

    path: str | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSamplerBody(NumberedBody):
    """Weights to sample from; they do not change while a client samples."""

    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: dict[str, str] | None = None


class SamplingSessionBody(TinkerBody):
    """A new sampling session."""

    session_id: str
    sampling_session_seq_id: int = 0
    base_model: str | None = None
    model_path: str | None = None


class ModelIdBody(TinkerBody):
    """A question about a model."""

    model_id: str


class JoinBody(TinkerBody):
    """A further client of a sampling session."""

    sampling_session_id: str


class WeightsInfoBody(TinkerBody):
    """A question about a checkpoint."""

    tinker_path: str


class TtlBody(TinkerBody):
    """Lifetime of a checkpoint; None for no limit."""

    ttl_seconds: Seconds | None = None


class TokensBody(TinkerBody):
    """A part of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Integer]

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, chunk: Any) -> Any:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else "encoded_text"
        if kind != "encoded_text":
            raise ValueError("this service reads tokens (encoded_text) only, no images or sounds")
        return chunk


class PromptBody(TinkerBody):
    """A prompt."""

    chunks: list[TokensBody]

    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingBody(TinkerBody):
    """Sampling options."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: Integer | None = None
    stop: str | list[str] | list[Integer] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class TensorBody(TinkerBody):
    """A tensor in JSON."""

    data: list[Integer]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(TinkerBody):
    """A request for samples, and for log-probabilities of the prompt."""

    num_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    prompt: PromptBody
    sampling_params: SamplingBody
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Count | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Top = 0
    topk_sample_logprobs: Top = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: Top = 0
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    record_stability_info: Literal[False] | None = None

    @model_validator(mode="after")
    def _check_number(self) -> SampleBody:
        # An equal number repeats a request.
        if self.sampling_session_id is not None and self.seq_id is None:
            raise ValueError("sampling_session_id needs seq_id, a new one for each request")
        return self


class FutureBody(TinkerBody):
    """A request for a result."""

    request_id: str
    allow_metadata_only: bool = False
