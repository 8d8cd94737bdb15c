"""Classifiers of labels from messages."""
