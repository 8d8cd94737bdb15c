"""Scorers, which rate texts for failure."""
