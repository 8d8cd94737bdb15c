"""Graph networks in C, compiled for the machine at hand, and their loader."""
