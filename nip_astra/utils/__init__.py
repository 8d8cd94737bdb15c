"""Small tools: seeds, threads, statistics."""
