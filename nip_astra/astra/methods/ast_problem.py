"""Alias of `ast_system`."""

from nip_astra.astra.methods.ast_system import *  # noqa: F403
