"""Trained models whose view of an image agents read beside its pixels; registered by name."""
