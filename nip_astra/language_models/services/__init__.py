"""Models as services: chat models, fine-tuning jobs, and training services."""
