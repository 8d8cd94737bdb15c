"""How much a service takes on, and from whom."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.trust import read_variable

TrainingProtocol = Literal["http", "tinker"]
"""By which clients train models: ours, and Tinker's."""


class ServiceSettings(SubParameters):
    """Address, state and limits of a text service."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address demands a token."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    token_variable: str | None = None
    """Name of the environment variable with the bearer token that requests must bring; null asks
    for none, which is refused beyond loopback."""
    state_dir: str | None = None
    """Folder of files, jobs and trained models; null takes one below the user's state folder."""
    device: str = "cpu"
    """Where models are held: cpu, cuda, cuda:1 or auto."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What models compute in."""
    max_body_bytes: int = Field(default=4 << 20, ge=1)
    """Largest body of a request, but for uploaded files."""
    max_file_bytes: int = Field(default=256 << 20, ge=1)
    """Largest file to train on."""
    max_waiting: int = Field(default=1024, ge=1)
    """Requests that may wait for a place in the batch; further ones are told to come again."""
    max_streams: int = Field(default=256, ge=1)
    """Streams that may be open at once."""
    max_answer_tokens: int = Field(default=1024, ge=1)
    """Most tokens of one answer, and what a request gets that names no max_tokens."""
    max_answers: int = Field(default=128, ge=1)
    """Most answers of one request: prompts times n."""
    max_rows: int = Field(default=256, ge=1)
    """Most answers in the running batch. Larger is faster for many clients and takes memory."""
    max_cache_gib: float = Field(default=2.0, gt=0)
    """Most memory for keys and values of the running batch of one model."""

    max_jobs: int = Field(default=256, ge=1)
    """Fine-tuning jobs that may wait or run at once; they run one after the other."""
    lora_rank: int = Field(default=16, ge=1)
    """Rank of the adapters that jobs train. Larger learns more and takes more memory."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """Scale of adapters: their update is multiplied by alpha / rank."""
    max_full_parameters: int = Field(default=0, ge=0)
    """Models of at most so many weights are trained in full, and served from weights of their own;
    of larger ones an adapter is trained."""

    max_training_models: int = Field(default=8, ge=1)
    """Models that may be in training at once by the training routes; each takes the memory of its
    adapter, or of all its weights, three to four times."""
    training_idle_seconds: float = Field(default=3600.0, gt=0)
    """A model in training that nobody has asked for this long makes room where it is needed. One
    whose client reports regularly does so once that has been silent for two minutes."""
    max_message_bytes: int = Field(default=1 << 30, ge=1)
    """Largest request to the training routes; a saved state is one."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def root_url(self) -> str:
        """The address that clients of the training routes are given."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def base_url(self) -> str:
        """The address that a client of OpenAI's is given."""
        return f"{self.root_url}/v1"

    def token(self) -> str | None:
        """The bearer token, or None where none is needed.

        Raises
        ------
        ConfigurationError
            When one is needed and there is none.
        """
        if self.token_variable is None:
            if self.is_loopback:
                return None
            raise ConfigurationError(
                f"the service was to listen on {self.host}, where other machines reach it, without "
                "a token. Put a secret into an environment variable and name that as "
                "--token-variable, or listen on 127.0.0.1."
            )
        token = read_variable(self.token_variable) or ""
        if not token:
            raise ConfigurationError(
                f"requests were to bring the token in the environment variable "
                f"{self.token_variable}, which is not set or empty. Set it to a secret of your "
                "choice."
            )
        return token

    def state_folder(self) -> Path:
        """The folder of files and jobs."""
        if self.state_dir is not None:
            return Path(self.state_dir).resolve()
        root = read_variable("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(root).resolve() / "nip_astra" / "serve"
