"""Measure attackers on held-out prompts."""
