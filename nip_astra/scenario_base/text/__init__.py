"""Agents that play interaction protocols through chat models."""
