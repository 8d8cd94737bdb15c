"""Small helpers: seeds, threads, statistics."""
