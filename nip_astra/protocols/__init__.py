"""Interaction protocols: turns, channels, decisions and rewards."""
