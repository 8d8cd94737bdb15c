"""Backends of chat models, one file each."""
