"""What Tinker's SDK sends as JSON; an option that this service cannot honour is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from nip_astra.serve.api_errors import wrong
from nip_astra.serve.bodies import Body, Text

Seconds = Annotated[int, Field(ge=1)]


class TinkerBody(Body):
    """A request; `type` and the like are the SDK's own."""

    model_config = ConfigDict(
        strict=False, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )
    type: Text | None = None


class SessionBody(TinkerBody):
    """A new session."""

    tags: list[Text] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: Text = ""
    project_id: Text | None = None
    display_name: Text | None = None


class HeartbeatBody(TinkerBody):
    """A session goes on."""

    session_id: Text


class LoraBody(TinkerBody):
    """A low-rank adapter."""

    rank: int = Field(ge=1, le=4096)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(TinkerBody):
    """The kind of an optimizer."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: Text = "adamw"

    def check(self) -> None:
        """Refuse another one than Adam."""
        if self.type != "adamw":
            raise wrong(
                f"a model was to be trained with the optimizer {self.type!r}, but this service has "
                "adamw. Leave optimizer out.",
                "optimizer_config",
            )


class CreateModelBody(TinkerBody):
    """A new model in training."""

    session_id: Text
    model_seq_id: int = Field(ge=0)
    base_model: Text
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()


class LoadBody(TinkerBody):
    """A saved state for a model, or a model of its own from one."""

    model_id: Text | None = None
    seq_id: int | None = None
    session_id: Text | None = None
    model_seq_id: int | None = None
    base_model: Text | None = None
    user_metadata: dict[str, Any] | None = None
    path: Text
    optimizer: bool
    optimizer_config: OptimizerBody | None = None
    weights_access_token: Text | None = None

    def check(self) -> None:
        """Refuse what belongs to accounts."""
        if self.weights_access_token is not None:
            raise wrong(
                "a checkpoint was to be loaded with a weights_access_token, but this service has "
                "no accounts: every client may load every checkpoint. Leave it out.",
                "weights_access_token",
            )


class AdamBody(TinkerBody):
    """The step of an optimizer."""

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class OptimStepBody(TinkerBody):
    """A step along the gradients."""

    model_id: Text
    seq_id: int = Field(ge=1)
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None

    @property
    def adam(self) -> AdamBody:
        """The parameters, which must be Adam's."""
        if self.adam_params is None:
            kind = (self.optimizer_params or {}).get("type")
            raise wrong(
                f"a step of the optimizer {kind!r} was asked for, but this service has adamw. Give "
                "AdamParams.",
                "optimizer_params",
            )
        return self.adam_params


class SaveBody(TinkerBody):
    """A state to save."""

    model_id: Text
    seq_id: int = Field(ge=1)
    path: Text | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSamplerBody(TinkerBody):
    """Weights to sample from."""

    model_id: Text
    seq_id: int = Field(ge=1)
    path: Text | None = None
    sampling_session_seq_id: int | None = None
    kind: Text = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: dict[str, str] | None = None


class SamplingSessionBody(TinkerBody):
    """A new sampling session."""

    session_id: Text
    sampling_session_seq_id: int = 0
    base_model: Text | None = None
    model_path: Text | None = None


class ModelIdBody(TinkerBody):
    """Something about a model."""

    model_id: Text


class TokensBody(TinkerBody):
    """A part of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class PromptBody(TinkerBody):
    """A prompt."""

    chunks: list[dict[str, Any]]

    def ids(self) -> list[int]:
        """Its tokens."""
        for chunk in self.chunks:
            if chunk.get("type") != "encoded_text":
                raise wrong(
                    f"a prompt holds a part of the kind {str(chunk.get('type'))[:50]!r}, but this "
                    "service reads tokens alone. Leave images and sounds out.",
                    "prompt",
                )
        return [token for chunk in self.chunks for token in TokensBody(**chunk).tokens]


class SamplingBody(TinkerBody):
    """How to sample."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: Text | list[Text] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class TensorBody(TinkerBody):
    """A tensor in JSON."""

    data: list[int]
    dtype: Text
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(TinkerBody):
    """A request for samples and for what the model thinks of the prompt."""

    num_samples: int = Field(default=1, ge=1)
    prompt: PromptBody
    sampling_params: SamplingBody
    base_model: Text | None = None
    model_path: Text | None = None
    sampling_session_id: Text | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0)
    topk_sample_logprobs: int = Field(default=0, ge=0)
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0)
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    record_stability_info: bool | None = None


class FutureBody(TinkerBody):
    """A result that is asked for."""

    request_id: Text
    allow_metadata_only: bool = False
