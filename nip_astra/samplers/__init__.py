"""Samplers, which run episodes of agents."""
