"""Losses and rewards as pure functions of tensors."""
