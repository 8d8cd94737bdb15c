"""Models as services: chat models, fine-tuning jobs, and what trains a policy."""
