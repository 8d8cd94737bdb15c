"""Show what a run found."""
