"""Parts of trainers on trajectories, which learn through a training service."""
