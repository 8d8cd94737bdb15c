"""Checkpoints: written whole or not at all, and checked before they are believed."""
