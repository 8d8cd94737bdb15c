"""Address, state and limits of a service."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.trust import read_variable

TrainingProtocol = Literal["http", "tinker"]
"""Protocol through which clients train models: ours or Tinker's."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ServiceSettings(SubParameters):
    """Address, state and limits of a text service."""

    host: str = "127.0.0.1"
    """Address to listen on. All but loopback addresses need a token."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    token_variable: str | None = None
    """Environment variable with the bearer token that requests must send; null for no token, which
    only a loopback address allows."""
    state_dir: str | None = None
    """Folder of files, jobs, checkpoints and trained models, for one service at a time; null for
    one in the user's state folder."""
    device: str = "cpu"
    """Device of the models: cpu, cuda, cuda:1 or auto."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the models."""
    max_body_bytes: int = Field(default=4 << 20, ge=1)
    """Maximum size of a request body, except for uploaded files."""
    max_file_bytes: int = Field(default=256 << 20, ge=1)
    """Maximum size of a training file."""
    max_waiting: int = Field(default=1024, ge=1)
    """Maximum requests waiting for the batch; further ones must retry."""
    max_streams: int = Field(default=256, ge=1)
    """Maximum concurrent streams."""
    max_answer_tokens: int = Field(default=1024, ge=1)
    """Maximum tokens of one answer, also for a request without max_tokens."""
    max_answers: int = Field(default=128, ge=1)
    """Maximum answers of one request: prompts times n."""
    max_rows: int = Field(default=256, ge=1)
    """Maximum answers in the running batch. Larger is faster for many clients and uses memory."""
    max_cache_gib: float = Field(default=2.0, gt=0)
    """Maximum memory for keys and values of the running batch of one model."""

    max_jobs: int = Field(default=256, ge=1)
    """Maximum fine-tuning jobs that wait or run; they run one after the other."""
    lora_rank: int = Field(default=16, ge=1)
    """Rank of the adapters that jobs train. Larger learns more and takes more memory."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """Scale of adapters: their update is multiplied by alpha / rank."""
    max_full_parameters: int = Field(default=0, ge=0)
    """Jobs may train all weights of models with at most this many; such a model is served from its
    own weights. 0 allows adapters only."""

    max_training_models: int = Field(default=8, ge=1)
    """Maximum models that clients train concurrently; each takes three to four times the memory of
    its adapter or, without one, of its weights."""
    training_idle_seconds: float = Field(default=3600.0, gt=0)
    """A model in training that was idle for this long is closed when room is needed; with a client
    that reports regularly, after two minutes of silence."""
    max_message_bytes: int = Field(default=1 << 30, ge=1)
    """Maximum size of a request to the training routes, for instance a saved state."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return is_loopback(self.host)

    @property
    def root_url(self) -> str:
        """Address for clients of the training routes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def base_url(self) -> str:
        """Address for OpenAI's clients."""
        return f"{self.root_url}/v1"

    def token(self) -> str | None:
        """Return the bearer token; None if none is needed."""
        if self.token_variable is None:
            if self.is_loopback:
                return None
            raise ConfigurationError(
                f"host {self.host} is open to other machines and needs a token. Put a secret into "
                "an environment variable and name it by --token-variable, or use 127.0.0.1."
            )
        token = (read_variable(self.token_variable) or "").strip()
        if not token:
            raise ConfigurationError(
                f"token_variable names {self.token_variable}, which is not set or empty. Set it to "
                "a secret."
            )
        return token

    def state_folder(self) -> Path:
        if self.state_dir is not None:
            return Path(self.state_dir).resolve()
        root = read_variable("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(root).resolve() / "nip_astra" / "serve"
