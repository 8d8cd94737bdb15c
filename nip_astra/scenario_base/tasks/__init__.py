"""Tasks: environments of messages with rewards."""
