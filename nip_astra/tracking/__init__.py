"""Run directories and experiment trackers."""
