"""Parts of trainers that stress-test language models."""
