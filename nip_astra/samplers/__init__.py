"""Samplers play episodes between agents."""
