"""Trainers: one file per algorithm over a few bases; looked up in the registry."""
