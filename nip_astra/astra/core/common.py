"""Type variables of the interfaces."""

from __future__ import annotations

from typing import TypeVar

StateT = TypeVar("StateT")
"""A state of the conversation, usually text."""
ActionT = TypeVar("ActionT")
"""A probe of the attacker, usually text."""
Step = TypeVar("Step")
"""One training sample of an algorithm."""
Batch = TypeVar("Batch")
"""Samples of one forward and backward pass."""
