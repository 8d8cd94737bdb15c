"""Agents that play an interaction protocol in words, through chat models."""
