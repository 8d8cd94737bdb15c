"""Parts of trainers whose agents are chat models."""
