"""Sweeps: many runs with one command; their plan, execution, search and results."""
