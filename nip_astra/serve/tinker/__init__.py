"""Tinker's protocol: training, sampling and checkpoints for clients of its SDK."""
