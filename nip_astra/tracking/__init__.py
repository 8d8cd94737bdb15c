"""Run directories and experiment trackers. A run is complete without W&B, which mirrors it."""
