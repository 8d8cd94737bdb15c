"""Scorers rate texts for failure."""
