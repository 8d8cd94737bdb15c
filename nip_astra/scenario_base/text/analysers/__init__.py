"""Rollout analysers: yes-or-no questions about what agents said, which a chat model answers."""
