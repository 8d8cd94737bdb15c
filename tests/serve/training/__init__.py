"""Training routes."""
