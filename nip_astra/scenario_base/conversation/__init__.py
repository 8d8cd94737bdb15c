"""Building blocks of conversation scenarios: prompts, and turns as tokens."""
