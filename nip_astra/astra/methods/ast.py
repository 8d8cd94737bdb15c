"""Alias of `ast_system`, as named in ASTRA-RL's guides."""

from nip_astra.astra.methods.ast_system import *  # noqa: F403
