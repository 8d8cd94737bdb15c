"""Evaluation, scoring, comparison and export of runs of each family."""
