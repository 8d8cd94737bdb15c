"""Alias of the Hugging Face problem and trainer (older name)."""

from nip_astra.astra.ext.transformers import *  # noqa: F403
