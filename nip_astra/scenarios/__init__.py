"""Scenario kinds: each builds the components of an experiment from its parameters."""
