"""Parts of the trainers that learn from trajectories through a training service."""
