"""Rollouts: trees of conversations, and the training data drawn from them."""
