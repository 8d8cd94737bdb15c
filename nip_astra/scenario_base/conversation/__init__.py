"""What scenarios of conversations are made of: prompts, and turns as tokens."""
