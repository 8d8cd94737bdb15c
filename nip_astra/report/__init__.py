"""Reports of runs: HTML pages and terminal tables."""
