"""Type variables of the interfaces."""

from __future__ import annotations

from typing import TypeVar

StateT = TypeVar("StateT")
"""A state of the conversation, usually text."""
ActionT = TypeVar("ActionT")
"""What the attacker says, usually text."""
Step = TypeVar("Step")
"""One training sample of an algorithm."""
Batch = TypeVar("Batch")
"""Samples put together for one forward and backward pass."""
