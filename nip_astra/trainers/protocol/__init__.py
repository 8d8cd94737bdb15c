"""Parts of trainers whose agents play an interaction protocol."""
