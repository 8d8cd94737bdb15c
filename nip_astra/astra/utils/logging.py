"""Alias of `nip_astra.astra.logging`."""

from nip_astra.astra.logging import ASTRAWandbLogger, config_logging, logger

__all__ = ["ASTRAWandbLogger", "config_logging", "logger"]
