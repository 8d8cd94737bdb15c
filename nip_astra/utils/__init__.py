"""General utilities: seeding, processes, text statistics, confidence intervals and formatting."""
