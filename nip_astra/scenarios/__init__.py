"""Scenario kinds, which build the components of an experiment from its parameters."""
