"""Evaluate trained agents and attackers on held-out data."""
