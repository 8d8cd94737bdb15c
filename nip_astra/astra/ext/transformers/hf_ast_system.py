"""Alias of the Hugging Face problem and trainer (newer name)."""

from nip_astra.astra.ext.transformers import *  # noqa: F403
