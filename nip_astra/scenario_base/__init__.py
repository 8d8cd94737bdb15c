"""What scenarios are made of: agents, conversations, prompts."""
