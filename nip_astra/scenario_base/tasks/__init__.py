"""Tasks that a policy answers in messages, and the environments that reward it."""
