"""Building blocks of scenarios: agents, conversations, prompts."""
