"""Trainers: one file an algorithm over a few bases; found through the registry."""
